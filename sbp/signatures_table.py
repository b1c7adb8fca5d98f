"""The table of true signatures of all operators: made in parallel, written, read, and compared with another.

Operators are judged in processes of their own, so one that crashes the interpreter or does not end costs its own
entry and no other.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import multiprocessing.connection
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbp.oracle.calls import Call

FORMAT = 2
# How long one operator may take, and how many sample calls of it are used.
SECONDS = 20.0
SAMPLES = 6
# The largest table that is read, in bytes; one that unpacks to more was made to fill the memory.
_MOST = 256 << 20


class TableError(ValueError):
    """A table that cannot be read; one line that says which and why."""


def judge_operator(name: str, gradient: bool = False, samples: int = SAMPLES) -> dict[str, Any]:
    """The true signatures of one operator of the database, as the table has them.

    Args:
        name: an operator's name (``sbp.suites.operator_database``).
        gradient: also those of each input's gradient.
        samples: how many sample calls are used at most.

    Raises KeyError where there is no such operator.
    """
    from sbp.oracle.calls import Call
    from sbp.oracle.gradients import gradient_calls
    from sbp.suites.operator_database import find_operator

    operator = find_operator(name)
    entry: dict[str, Any] = {"dtype": str(operator.dtype).removeprefix("torch."), "calls": [], "left out": []}
    gradients: dict[str, list[Any]] = {}
    short = name.rpartition(".")[0] or name if name.count(".") == 1 else name
    for samples_of_a_kind in operator.variants(samples):
        variants = [Call(short, operator.function, one.args, one.kwargs) for one in samples_of_a_kind]
        found = _judge(variants, name, entry["left out"])
        if found is None:
            continue
        entry["calls"].append(found)
        if gradient and operator.differentiable:
            for argument, calls in gradient_calls(variants, name).items():
                judged = _judge(calls, f"{name} {argument}", entry["left out"], ("sum",))
                if judged is not None:
                    gradients.setdefault(argument, []).append(judged)
    if gradient:
        entry["gradients"] = gradients
    return entry


def _judge(
    variants: Sequence[Call], seed: str, left_out: list[list[str]], partials: Sequence[str] | None = None
) -> dict[str, Any] | None:
    """The entry of one kind of call; None with a note in ``left_out`` where nothing can be found out."""
    from sbp.oracle.pieces import PARTIALS
    from sbp.oracle.signatures import CannotJudge, find_signatures

    try:
        findings = find_signatures(variants, seed=seed, partials=partials or PARTIALS)
    except CannotJudge as reason:
        left_out.append([str(variants[0]), str(reason)])
        return None
    return {
        "call": findings.call,
        "inputs": list(findings.inputs),
        "outputs": list(findings.outputs),
        "signatures": [[list(s.inputs), s.output, s.placement, list(s.needs)] for s in findings.signatures],
        "tested": findings.judged,
        "which": findings.how,
        "draws": findings.draws,
        "meshes": sorted({tested.mesh for tested in findings.tested}),
    }


@dataclass
class _Process:
    process: Any
    connection: Any
    name: str = ""
    since: float = 0.0


def judge_operators(
    names: Sequence[str],
    processes: int | None = None,
    gradient: bool = False,
    seconds: float = SECONDS,
    done: Callable[[int], None] | None = None,
    judge: Callable[[str], dict[str, Any]] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Judge many operators in parallel.

    Args:
        names: of the operators.
        processes: how many operators at a time; all cores without it.
        gradient: also the signatures of gradients.
        seconds: how long one operator may take.
        done: called with how many are done.
        judge: makes the entry of one operator; without it :func:`judge_operator` does.

    Yields: the name and entry of each as it becomes known. The entry of one that failed holds ``error`` alone.
    """
    waiting = list(reversed(names))
    count = processes or os.cpu_count() or 1
    context = multiprocessing.get_context("fork")
    running: list[_Process] = []
    finished = 0

    def start() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, judge or partial(judge_operator, gradient=gradient)), daemon=True
        )
        process.start()
        theirs.close()
        running.append(_Process(process, ours))

    def give(worker: _Process) -> bool:
        if not waiting:
            return False
        worker.name, worker.since = waiting.pop(), time.monotonic()
        worker.connection.send(worker.name)
        return True

    import sbp.suites.operator_database as database

    database.load()  # once, before the forks
    try:
        for _ in range(min(count, len(names))):
            start()
        for worker in list(running):
            give(worker)
        while any(worker.name for worker in running):
            connections = [worker.connection for worker in running if worker.name]
            ready = multiprocessing.connection.wait(connections, timeout=1.0)
            for worker in list(running):
                entry: dict[str, Any] | None = None
                lost = False
                if worker.connection in ready:
                    try:
                        entry = worker.connection.recv()
                    except (EOFError, OSError):
                        worker.process.join()
                        code = worker.process.exitcode
                        entry, lost = {"error": f"the interpreter died (exit code {code})"}, True
                elif worker.name and time.monotonic() - worker.since > seconds:
                    entry, lost = {"error": f"not done within {seconds:g} s"}, True
                if entry is None:
                    continue
                finished += 1
                name, worker.name = worker.name, ""
                if lost:
                    worker.process.kill()
                    running.remove(worker)
                    if waiting:
                        start()
                        give(running[-1])
                else:
                    give(worker)
                yield name, entry
                if done is not None:
                    done(finished)
    finally:
        for worker in running:
            worker.process.kill()


def _serve(connection: Any, judge: Callable[[str], dict[str, Any]]) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        try:
            entry = judge(name)
        except Exception as error:
            entry = {"error": f"{type(error).__name__}: {error}"[:300]}
        connection.send(entry)


def write_table(path: str | Path, entries: Mapping[str, Any], torch_version: str) -> None:
    """Write a table as JSON, compressed where the name ends in ``.gz``. The same entries give the same bytes."""
    data = {"format": FORMAT, "torch": torch_version, "operators": dict(sorted(entries.items()))}
    text = json.dumps(data, separators=(",", ":"), sort_keys=True).encode()
    path = Path(path)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def read_table(path: str | Path) -> dict[str, Any]:
    """Read what :func:`write_table` wrote. Raises TableError."""
    try:
        with Path(path).open("rb") as file:
            start = file.peek(2)[:2]
            stream: Any = gzip.GzipFile(fileobj=file) if start == b"\x1f\x8b" else file
            text = stream.read(_MOST + 1)
        if len(text) > _MOST:
            raise TableError(f"{path} is longer than {_MOST >> 20} MiB, which no table of signatures is")
        data = json.loads(text)
    except TableError:
        raise
    except gzip.BadGzipFile as error:
        raise TableError(f"{path} is not a table of signatures: {error}") from error
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise TableError(f"{path} is not a table of signatures: {error}") from error
    if (
        not isinstance(data, dict)
        or data.get("format") != FORMAT
        or not isinstance(data.get("operators"), dict)
    ):
        raise TableError(f"{path} is not a table of signatures that this version of sbp can read")
    for name, entry in data["operators"].items():
        if not _is_entry(entry):
            raise TableError(f"{path}: the entry of {name} is not one of a table of signatures")
    return data


def _is_entry(entry: Any) -> bool:
    """Whether what is compared of an operator's entry is there, with the types that it is to have."""
    if not isinstance(entry, dict):
        return False
    if "error" in entry:
        return isinstance(entry["error"], str)
    gradients = entry.get("gradients", {})
    if not isinstance(gradients, dict):
        return False
    return all(
        isinstance(calls, list) and all(_is_call(call) for call in calls)
        for calls in (entry.get("calls"), *gradients.values())
    )


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict) or not isinstance(call.get("call"), str):
        return False
    signatures = call.get("signatures")
    return isinstance(signatures, list) and all(
        isinstance(signature, list)
        and len(signature) == 4
        and _are_texts(signature[0])
        and isinstance(signature[1], int)
        and isinstance(signature[2], str)
        and _are_texts(signature[3])
        for signature in signatures
    )


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def compare_tables(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed between two tables, a line each: operators that came or went, signatures that are true in one of
    them only."""
    lines = []
    before, after = old["operators"], new["operators"]
    for name in sorted({*before, *after}):
        if name not in after:
            lines.append(f"- {name}: not in the new table")
        elif name not in before:
            lines.append(f"+ {name}: not in the old table")
        else:
            one, other = _signatures(before[name]), _signatures(after[name])
            lines += [f"- {name}{where}: {signature}" for where, signature in sorted(one - other)]
            lines += [f"+ {name}{where}: {signature}" for where, signature in sorted(other - one)]
    return lines


def _signatures(entry: Mapping[str, Any]) -> set[tuple[str, str]]:
    if "error" in entry:
        return {("", entry["error"])}
    found = set()
    parts = [("", entry["calls"]), *((f" gradient of {n}", c) for n, c in entry.get("gradients", {}).items())]
    for which, calls in parts:
        for call in calls:
            for inputs, output, placement, needs in call["signatures"]:
                text = f"{', '.join(inputs)} -> {placement}" + (f" ({', '.join(needs)})" if needs else "")
                found.add((f" {call['call']} output {output}{which}", text))
    return found
