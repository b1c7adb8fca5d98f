"""The console script ``sbp``: finds a subcommand and hands it the rest of the command line.

Each subcommand is imported only when it is called, so that ``sbp lint`` starts without torch or numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand; ``target`` is ``"module:function"``, and the function takes the rest of the arguments
    and returns the exit code."""

    name: str
    target: str
    help: str


COMMANDS: tuple[Command, ...] = (
    Command("run", "sbp.run:main", "check modules and operators on the ranks (mpirun -n 4 sbp run ...)"),
    Command("lint", "sbp.inplace.lint.command:main", "find in-place operations on distributed tensors"),
    Command("signatures", "sbp.signatures_cli:main", "which SBP signatures are true for an operator"),
    Command("audit", "sbp.audit_cli:main", "judge a subject's sharding rules, without ranks"),
    Command(
        "report", "sbp.report.command:main", "turn results into HTML, JUnit, SARIF, Markdown, annotations"
    ),
    Command("repro", "sbp.repro.command:main", "write a stand-alone script for each failure of a run"),
    Command("diff", "sbp.report.diff:main", "compare two runs trial by trial"),
    Command("merge", "sbp.report.merge:main", "put the shards of a run together"),
    Command("speed", "sbp.speed.command:main", "time models on one device against parallel plans"),
    Command("doctor", "sbp.doctor:main", "what is here to run ranks with, and what is wrong with it"),
    Command("known", "sbp.known_command:main", "check and update a file of known failures"),
    Command("completion", "sbp.completion:main", "what completes these commands in bash, zsh or fish"),
)

USAGE = 2


def overview() -> str:
    """What ``sbp`` prints without arguments."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.help}" for command in COMMANDS]
    return "\n".join(["usage: sbp COMMAND ...", "", *lines, "", "sbp COMMAND --help says more."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 2 when there is no such subcommand."""
    from sbp.escape import complain, print_whatever_comes

    print_whatever_comes()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in ("--version", "-V"):
        from sbp._version import __version__

        print(f"sbp {__version__}")
        return 0
    for command in COMMANDS:
        if command.name == name:
            module, _, function = command.target.partition(":")
            code: int | None = getattr(import_module(module), function)(rest)
            return code or 0
    names = ", ".join(command.name for command in COMMANDS)
    return complain("sbp", f"no command {name!r}; the commands are {names}", USAGE)


if __name__ == "__main__":
    sys.exit(main())
