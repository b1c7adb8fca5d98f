"""``mpirun -n 4 python -m sbp.run``: run the trials on the ranks, and say what differs from one device.

This module is the process that the launcher starts on each rank: it imports no torch, so that nothing which a
trial does can take it down.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
from collections.abc import Iterator, Sequence

import launch
from sbp._version import __version__
from sbp.escape import complain, print_whatever_comes
from sbp.usage import USAGE, Parser, UsageError

DESCRIPTION = """\
Run modules and operators as global tensors under many SBP placements, and compare what every rank holds with what
one device computes."""

_NAME = "sbp.run"
# More on one machine is a slip of the finger, and would end it.
_MOST_RANKS = 1024

EXAMPLES = """\
examples:
  mpirun -n 4 python -m sbp.run                       the built-in suites on DTensor
  python -m sbp.run -n 4 Linear nn.BatchNorm2d        only these modules; starts mpirun itself
  python -m sbp.run -n 4 my_cases.py                  your own cases
  python -m sbp.run -n 4 -k "MSELoss and input=S(0)"  only trials whose id has both
  python -m sbp.run -n 4 --mesh 2x2 --list            the ids on a 2 x 2 mesh, without running them
  python -m sbp.run -n 4 --budget 60s --results r.jsonl

exit code: 0 no unexpected failure; 1 unexpected failures, or a known failure that passes; 2 bad usage or
input; 3 the run could not be done or is incomplete."""


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``sbp.run``."""
    parser = Parser(
        prog="python -m sbp.run",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("targets", nargs="*", metavar="TARGET", help="modules (Linear, nn.Linear), case names; all if none")
    add(
        "-n", type=int, metavar="N", help="start N ranks here: -n 4 (without it the ranks of mpirun are used)"
    )
    add("--suite", action="append", metavar="NAME", help="only this suite: --suite modules (may be repeated)")
    add("--subject", default="dtensor", metavar="NAME", help="the system under test: --subject dtensor")
    add(
        "--subject-python",
        metavar="PATH",
        help="the interpreter that a subject other than torch needs: --subject-python .venv-oneflow/bin/python",
    )
    add("-k", dest="keyword", metavar="EXPRESSION", help='ids to run: -k "Linear and not input=P"')
    add("--list", action="store_true", help="print the trials' ids and run nothing")
    add(
        "--mesh",
        action="append",
        metavar="SHAPE",
        help="the ranks as a grid: --mesh 2x2 (may be repeated; default: one axis, and 2xN/2 where that fits)",
    )
    add("--dtype", action="append", metavar="DTYPE", help="--dtype float64 (the default; may be repeated)")
    add("--device", default="cpu", metavar="DEVICE", help="--device cpu or --device cuda")
    add("--placement", action="append", metavar="NAME=SBP", help='hold a tensor so: --placement "input=S(0)"')
    add("--seed", type=int, default=0, metavar="N", help="of the ranks' hash seeds: --seed 1 (default 0)")
    add(
        "--id",
        action="append",
        metavar="ID",
        help="run exactly this trial (may be repeated); failures print theirs",
    )
    add(
        "--level",
        choices=("quick", "default", "full"),
        default="default",
        help="how many placements of a case",
    )
    add("--budget", metavar="TIME", help="stop starting trials after this long: --budget 60s, 5m, 1h")
    add("--timeout", metavar="TIME", default="60s", help="a trial's deadline: --timeout 60s (the default)")
    add(
        "--no-watch",
        dest="watch",
        action="store_false",
        help="do not look for in-place writes to distributed tensors while the trials run",
    )
    add(
        "--no-replay",
        dest="replay",
        action="store_false",
        help="do not run failed trials again to say at which step they go wrong first",
    )
    add("--known", metavar="FILE|none", help="known failures: --known my.toml (default: those that ship)")
    add(
        "--rank-logs",
        metavar="DIR",
        help="keep what the cases print, a file for each rank: --rank-logs logs (without it, it is dropped)",
    )
    add("--results", metavar="FILE", help="write the verdicts as JSON lines: --results results.jsonl")
    add(
        "--resume", metavar="FILE", help="go on where the run that wrote FILE stopped: --resume results.jsonl"
    )
    add(
        "--shard",
        metavar="K/N",
        help="only the K-th of N parts, for N machines: --shard 2/8; sbp merge joins them",
    )
    add(
        "--ranks-per-world",
        type=int,
        metavar="N",
        help="split the ranks into worlds of N, which share the trials: mpirun -n 64 ... --ranks-per-world 4",
    )
    add("--version", action="version", version=f"sbp {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code. On ranks other than the first it serves until the run is over."""
    argv = list(sys.argv[1:] if argv is None else argv)
    print_whatever_comes()
    try:
        # Help and errors are for one rank to print.
        with contextlib.nullcontext() if launch.is_first_rank() else _silence():
            options = make_parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    if options.n is not None and not launch.inside_job():
        if not 1 <= options.n <= _MOST_RANKS:
            return complain(
                _NAME,
                f"-n {options.n}: from 1 to {_MOST_RANKS} ranks are started here; mpirun starts more",
                USAGE,
            )
        return launch.spawn(options.n, ["-m", "sbp.run", *argv])
    from sbp.lead import lead, make_settings

    try:
        settings = make_settings(options)
    except UsageError as error:
        return complain(_NAME, str(error), USAGE) if launch.is_first_rank() else USAGE
    job = launch.start(settings, options.ranks_per_world)
    if isinstance(job, int):
        return job
    try:
        return lead(job, options, own_command(argv))
    finally:
        job.close()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    nothing = io.StringIO()
    with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        yield


def own_command(argv: Sequence[str]) -> str:
    """How this run was started, as text that can be typed."""
    return shlex.join(["python", "-m", "sbp.run", *argv])


if __name__ == "__main__":
    sys.exit(main())
