"""``sbp speed``: the command, and the first rank that leads the measurement. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launch
from sbp.escape import complain
from sbp.lead import check_torch, versions
from sbp.speed.report import FORMAT, SINGLE, Comparison, Measured, gather, lines, to_dict
from sbp.usage import INCOMPLETE, OK, USAGE, Parser, UsageError, parse_time

CASES = ("mlp", "transformer", "resnet")
PLANS = ("tensor parallel", "ddp", "fsdp2")
_PLAN_WORDS = {"tp": "tensor parallel", "ddp": "ddp", "fsdp2": "fsdp2"}
_BATCHES = (8, 32)
_PRELOAD = ("torch", "torch.distributed.tensor", "torch._dynamo", "sbp.speed.worker")

DESCRIPTION = """\
Time forward and backward of a ResNet-50-like network, a transformer block and an MLP on one device and under parallel
plans on all ranks. All of them take turns in one run. The batch is the same for all: a data parallel plan gives each
rank its part of it. Relative speed is the time of one device divided by that of the plan: above 1 the plan wins."""

EXAMPLES = """\
examples:
  sbp speed -n 2                              small models, about a minute on two cores
  sbp speed -n 2 --case mlp --plan tp --batch 64
  mpirun -n 8 sbp speed --device cuda --scale large --dtype bfloat16 --json speed.json

exit code: 0 measured; 2 bad usage or input; 3 it could not be measured."""


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``sbp speed``."""
    parser = Parser(
        prog="sbp speed",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", type=int, metavar="N", help="start N ranks here (without it the ranks of mpirun are used)")
    add("--case", action="append", choices=CASES, help="only this model (may be repeated)")
    add("--plan", action="append", choices=tuple(_PLAN_WORDS), help="only this plan (may be repeated)")
    add(
        "--batch",
        action="append",
        type=int,
        metavar="SIZE",
        help=f"samples of the whole batch (may be repeated; default {' and '.join(map(str, _BATCHES))})",
    )
    add(
        "--rounds",
        type=int,
        default=10,
        metavar="N",
        help="timed steps of each; the median counts (default 10)",
    )
    add("--warm-up", type=int, default=3, metavar="N", help="steps before the timed ones (default 3)")
    add("--scale", choices=("small", "large"), default="small", help="small for processors, large for GPUs")
    add("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=1, metavar="N", help="of each rank, on one device as well (default 1)")
    add("--timeout", default="5m", metavar="TIME", help="for each model and batch size (default 5m)")
    add("--json", metavar="FILE", help="write what was measured to FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code. On ranks other than the first it serves until all is measured."""
    argv = list(sys.argv[1:] if argv is None else argv)
    silence = (
        contextlib.nullcontext() if launch.is_first_rank() else contextlib.redirect_stderr(io.StringIO())
    )
    try:
        with silence:
            options = make_parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        check_options(options)
        if options.n is not None and not launch.inside_job():
            return launch.spawn(options.n, ["-m", "sbp.speed", *argv])
    except UsageError as error:
        return _complain(str(error), USAGE) if launch.is_first_rank() else USAGE
    settings = launch.Settings(
        entry="sbp.speed.worker:start",
        preload=_PRELOAD,
        # The checks that trials run with would be timed as well.
        environment={"TORCH_DISTRIBUTED_DEBUG": "OFF"},
        exchange="sbp.exchange:share",
    )
    job = launch.start(settings)
    if isinstance(job, int):
        return job
    try:
        return lead(job, options)
    except UsageError as error:
        return _complain(str(error), USAGE)
    except (SpeedError, launch.JobError) as error:
        return _complain(str(error), INCOMPLETE)
    except KeyboardInterrupt:
        return _complain("interrupted", INCOMPLETE)
    finally:
        job.close()


class SpeedError(RuntimeError):
    """A rank failed; one line that says which and how."""


def check_options(options: argparse.Namespace) -> None:
    """Raises UsageError for the first option that makes no sense."""
    for name, least in (("n", 1), ("rounds", 1), ("warm_up", 0), ("threads", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(
                f"-{'-' * (name != 'n')}{name.replace('_', '-')} {value}: at least {least} is needed"
            )
    parse_time(options.timeout)
    check_torch()
    if options.json is not None and not Path(options.json).absolute().parent.is_dir():
        raise UsageError(f"--json {options.json}: there is no such folder")


def batches_for(given: Sequence[int] | None, ranks: int) -> list[int]:
    """The batch sizes; those that nobody asked for are made to divide. Raises UsageError."""
    if not given:
        return [-(-batch // ranks) * ranks for batch in _BATCHES]
    for batch in given:
        if batch < 1 or batch % ranks:
            raise UsageError(f"--batch {batch}: {ranks} ranks need a multiple of {ranks}")
    return list(given)


def lead(job: Any, options: argparse.Namespace) -> int:
    """Measure everything, print it as it comes and write the JSON file."""
    timeout = parse_time(options.timeout)
    batches = batches_for(options.batch, job.size)
    backend = _make_world(job, options.device, timeout)
    plans = [_PLAN_WORDS[word] for word in options.plan] if options.plan else list(PLANS)
    threads = f"{options.threads} thread{'s' * (options.threads != 1)} each"
    print(
        f"forward and backward, {options.dtype}, {job.size} rank{'s' * (job.size != 1)} on {options.device} "
        f"({backend}), {threads}, scale {options.scale}"
    )
    found = []
    for case in options.case or CASES:
        for batch in batches:
            found.append(_compare(job, options, case, batch, plans, timeout))
            print()
            print("\n".join(lines(found[-1])), flush=True)
    if options.json is not None:
        data = {
            "format": FORMAT,
            "versions": versions(),
            "world": {"size": job.size, "launcher": job.launcher, "backend": backend},
            "device": options.device,
            "dtype": options.dtype,
            "scale": options.scale,
            "threads": options.threads,
            "warm_up": options.warm_up,
            "comparisons": [to_dict(comparison) for comparison in found],
        }
        try:
            Path(options.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {options.json}: {error.strerror}") from error
    return OK


def _make_world(job: Any, device: str, timeout: float) -> str:
    """Have the workers become one torch.distributed world; returns its backend. Raises UsageError, SpeedError."""
    backend = "gloo"
    if device == "cuda":
        gpus = _ask(job, {"do": "gpus"}, timeout)
        if min(gpus) == 0:
            raise UsageError("--device cuda: torch finds no GPU on some rank")
        # NCCL wants a GPU for each rank.
        if all(rank.local_size <= count for rank, count in zip(job.ranks, gpus, strict=True)):
            backend = "nccl"
    request = {"do": "open", "host": job.address, "timeout": timeout}
    [opened] = _ask(job, request, timeout, ranks=[0])
    _ask(job, {**request, "do": "join", "port": opened["port"], "backend": backend}, timeout)
    return backend


def _ask(job: Any, request: Mapping[str, Any], timeout: float, ranks: list[int] | None = None) -> list[Any]:
    """What the ranks answer. Raises SpeedError where one does not, or fails: there is nothing to go on with."""
    replies = job.call(request, timeout, ranks)
    # A rank that merely waits for another one is not at fault.
    for reply in sorted(replies, key=lambda reply: reply.status == "waiting"):
        if reply.status != "ok":
            words = " ".join(part for part in (reply.error, reply.message.strip()) if part)
            raise SpeedError(
                f"rank {reply.rank}: {reply.status}: {(words.splitlines() or ['no message'])[0]}"
            )
    return [reply.value for reply in replies]


def _compare(
    job: Any, options: argparse.Namespace, case: str, batch: int, plans: Sequence[str], timeout: float
) -> Comparison:
    request = {
        "do": "speed",
        "case": case,
        "batch": batch,
        "plans": list(plans),
        **{
            name: getattr(options, name)
            for name in ("rounds", "warm_up", "scale", "dtype", "device", "threads")
        },
    }
    answers = _ask(job, request, timeout)
    measured = []
    for name in (SINGLE, *plans):
        skipped = answers[0]["skipped"].get(name)
        if skipped:
            measured.append(Measured(name, skipped=skipped))
        else:
            measured.append(gather(name, [answer["measured"][name] for answer in answers]))
    return Comparison(case, batch, tuple(measured))


def _complain(line: str, code: int) -> int:
    return complain("sbp speed", line, code)
