"""The table of true signatures of all operators: made in parallel, written, read, and compared with another.

Operators are judged in processes of their own: a call that crashes the interpreter costs that call, an operator that
does not end what is left of it, and no other.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbp.oracle.calls import Call

FORMAT = 2
# The table of the torch version that this release knows, in the package.
SHIPPED = Path(__file__).parent / "data" / "signatures-torch-2.13.json.gz"
# How long one operator may take, in seconds of its process's CPU time: a busy machine gives the same table. One that
# waits instead of computing has so many times as long.
SECONDS = 20.0
_WAITING = 10
SAMPLES = 6
# The largest table that is read, in bytes; one that unpacks to more was made to fill the memory.
_MOST = 256 << 20


class TableError(ValueError):
    """A table that cannot be read; one line that says which and why."""


Part = Mapping[str, Any]
"""A piece of an operator's entry, as it becomes known: ``next``, the call that is judged next; what to add to
``calls``, ``left out`` and ``gradients``; ``dtype``; ``error``, which ends it; ``died``, how the interpreter ended;
``whole``, an entry of another kind."""

Judge = Callable[[str, int], Iterator[Part]]
"""Judges an operator from one kind of its calls on, by number."""


def judge_operator(name: str, gradient: bool = False, samples: int = SAMPLES) -> dict[str, Any]:
    """The true signatures of one operator of the database, as the table has them.

    Args:
        name: an operator's name (``sbp.suites.operator_database``).
        gradient: also those of each input's gradient.
        samples: how many sample calls are used at most.

    Raises KeyError where there is no such operator.
    """
    return _put_together(judge_kinds(name, gradient=gradient, samples=samples))


def judge_kinds(
    name: str, start: int = 0, *, gradient: bool = False, samples: int = SAMPLES
) -> Iterator[Part]:
    """As :func:`judge_operator`, in parts, from the kind of call number ``start`` on."""
    from sbp.oracle.calls import Call
    from sbp.oracle.gradients import gradient_calls
    from sbp.suites.operator_database import find_operator

    operator = find_operator(name)
    short = name.rpartition(".")[0] or name if name.count(".") == 1 else name
    yield {"dtype": str(operator.dtype).removeprefix("torch."), **({"gradients": {}} if gradient else {})}
    for samples_of_a_kind in operator.variants(samples)[start:]:
        part: dict[str, Any] = {"calls": [], "left out": []}
        variants = [Call(short, operator.function, one.args, one.kwargs) for one in samples_of_a_kind]
        yield {"next": str(variants[0])}
        found = _judge(variants, name, part["left out"])
        if found is not None:
            part["calls"].append(found)
            if gradient and operator.differentiable:
                gradients = part["gradients"] = {}
                for argument, calls in gradient_calls(variants, name).items():
                    judged = _judge(calls, f"{name} {argument}", part["left out"], ("sum",))
                    if judged is not None:
                        gradients[argument] = [judged]
        yield part


def as_a_whole(judge: Callable[[str], Mapping[str, Any]], name: str, start: int) -> Iterator[Part]:
    """For :func:`judge_operators`: makes an operator's entry in one go. Call it with the first argument bound."""
    del start  # there are no kinds to begin with another one
    yield {"whole": judge(name)}


def _put_together(parts: Iterable[Part]) -> dict[str, Any]:
    """The entry of an operator: ``error`` alone where nothing of it could be judged for a reason of that kind."""
    entry: dict[str, Any] = {"calls": [], "left out": []}
    error = ""
    for part in parts:
        if "whole" in part:
            return dict(part["whole"])
        entry["calls"] += part.get("calls", ())
        entry["left out"] += part.get("left out", ())
        entry |= {"dtype": part["dtype"]} if "dtype" in part else {}
        if "gradients" in part:
            gradients = entry.setdefault("gradients", {})
            for argument, calls in part["gradients"].items():
                gradients.setdefault(argument, []).extend(calls)
        if "error" in part and entry["calls"]:
            entry["left out"].append(["all other calls", part["error"]])
        error = part.get("error") or part.get("died") or error
    return {"error": error} if error and not entry["calls"] else entry


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
class _Work:
    """An operator that is being judged: what is known so far, and the next kind of call and its text."""

    name: str
    parts: list[Part] = field(default_factory=list)
    kind: int = 0
    call: str = ""


@dataclass
class _Process:
    process: Any
    connection: Any
    work: _Work | None = None
    since: float = 0.0


def judge_operators(
    names: Sequence[str],
    processes: int | None = None,
    gradient: bool = False,
    seconds: float = SECONDS,
    done: Callable[[int], None] | None = None,
    judge: Judge | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Judge many operators in parallel.

    Args:
        names: of the operators.
        processes: how many operators at a time; all cores without it.
        gradient: also the signatures of gradients.
        seconds: how long one operator may take, in seconds of CPU time.
        done: called with how many are done.
        judge: what judges an operator, without it :func:`judge_kinds`.

    Yields: the name and entry of each as it becomes known. A call that ends the interpreter is left out of it with
    the reason. The entry of an operator of which nothing could be judged holds ``error`` alone.
    """
    waiting = [_Work(name) for name in reversed(names)]
    count = processes or os.cpu_count() or 1
    context = multiprocessing.get_context("fork")
    running: list[_Process] = []
    finished = 0

    def start() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(theirs, judge or partial(judge_kinds, gradient=gradient), seconds),
            daemon=True,
        )
        process.start()
        theirs.close()
        running.append(_Process(process, ours))
        give(running[-1])

    def give(worker: _Process) -> None:
        worker.work = waiting.pop() if waiting else None
        worker.since = time.monotonic()
        if worker.work is not None:
            worker.connection.send((worker.work.name, worker.work.kind))

    import sbp.suites.operator_database as database

    database.load()  # once, before the forks
    try:
        for _ in range(min(count, len(names))):
            start()
        while any(worker.work for worker in running):
            connections = [worker.connection for worker in running if worker.work]
            ready = multiprocessing.connection.wait(connections, timeout=1.0)
            for worker in list(running):
                work = worker.work
                if work is None:
                    continue
                if worker.connection in ready:
                    ended = _take(worker, work, seconds)
                elif time.monotonic() - worker.since > seconds * _WAITING:
                    work.parts.append({"error": f"not done within {seconds * _WAITING:g} s"})
                    ended = _LOST
                else:
                    continue
                if ended in (_LOST, _AGAIN):
                    worker.process.kill()
                    running.remove(worker)
                    if ended == _AGAIN:
                        waiting.append(work)
                    if waiting:
                        start()
                elif ended == _DONE:
                    give(worker)
                if ended in (_LOST, _DONE):
                    finished += 1
                    yield work.name, _put_together(work.parts)
                    if done is not None:
                        done(finished)
    finally:
        for worker in running:
            worker.process.kill()


# What has become of the operator that a process judges: not yet done; done; done and the process with it; to be judged
# on, in another process.
_GOES_ON, _DONE, _LOST, _AGAIN = range(4)


def _take(worker: _Process, work: _Work, seconds: float) -> int:
    """Take what a process has sent."""
    try:
        part = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode
        if code == -signal.SIGPROF:
            work.parts.append({"error": f"not done within {seconds:g} s of CPU time"})
            return _LOST
        died = f"the interpreter died (exit code {code})"
        if not work.call:
            work.parts.append({"error": died})
            return _LOST
        work.parts.append({"left out": [[work.call, died]], "died": died})
        work.kind, work.call = work.kind + 1, ""
        return _AGAIN
    if part is None:
        return _DONE
    if "next" in part:
        # The one before is done with.
        work.kind, work.call = work.kind + bool(work.call), part["next"]
    else:
        work.parts.append(part)
    return _GOES_ON


def _serve(connection: Any, judge: Judge, seconds: float) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process, also in the middle of a kernel
    while True:
        try:
            name, start = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            for part in judge(name, start):
                connection.send(part)
        except Exception as error:
            connection.send({"error": f"{type(error).__name__}: {error}"[:300]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(None)


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
