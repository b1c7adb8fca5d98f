"""``sbp lint PATH...``: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sbp.escape import complain
from sbp.inplace.lint import config
from sbp.inplace.lint.files import FileReport, MissingPath, discover, lint_files
from sbp.inplace.lint.formats import FORMATS
from sbp.inplace.lint.rules import RULES, explain
from sbp.usage import Parser

CLEAN, FOUND, USAGE = 0, 1, 2

EXAMPLES = """\
examples:
  sbp lint src/                         in-place operations on distributed tensors, with the source lines
  sbp lint --level certain src/         only where a distributed tensor is made for certain
  sbp lint --diff src/                  what --fix would change
  sbp lint --format sarif src/ > lint.sarif
  sbp lint --explain SBP101             what a code means, with a bad and a good example

`# noqa: SBP101` on a line silences it; [tool.sbp.lint] in pyproject.toml configures.
exit code: 0 nothing found; 1 findings; 2 bad usage or configuration."""


class UsageError(ValueError):
    """Bad arguments; one line that says what to do."""


def make_parser() -> argparse.ArgumentParser:
    """The arguments of ``sbp lint``."""
    parser = Parser(
        prog="sbp lint",
        description="Find in-place operations on distributed tensors, from the source alone.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files and folders")
    parser.add_argument("--format", choices=list(FORMATS), default="text", help="default: text")
    parser.add_argument("--output", metavar="FILE", help="write the report to a file instead of the terminal")
    parser.add_argument(
        "--level", choices=config.LEVELS, help="the least sure level to report; default: likely"
    )
    parser.add_argument("--select", metavar="CODES", help="only these codes or prefixes, with commas between")
    parser.add_argument("--ignore", metavar="CODES", help="not these codes or prefixes")
    parser.add_argument(
        "--exclude", metavar="GLOB", action="append", help="leave these paths out; may be repeated"
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with [tool.sbp.lint]; default: the nearest "
                        "pyproject.toml")  # fmt: skip
    parser.add_argument("--jobs", "-j", type=int, metavar="N", help="processes; default: one for each core")
    parser.add_argument(
        "--fix", action="store_true", help="rewrite what can be turned safely, and say what cannot"
    )
    parser.add_argument(
        "--diff", action="store_true", help="show what --fix would change, and change nothing"
    )
    parser.add_argument(
        "--explain", metavar="CODE", help="say what a code means, with examples; `all` for all"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Lint, and return the exit code: 0 nothing found, 1 findings, 2 bad usage."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # A path may hold bytes that the terminal's encoding cannot show.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return run(arguments)
    except (UsageError, MissingPath, config.ConfigurationError) as error:
        return complain("sbp lint", str(error), USAGE)
    except BrokenPipeError:
        # The reader, `head` say, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND


def run(arguments: argparse.Namespace) -> int:
    """What the arguments ask for. Raises UsageError and ConfigurationError."""
    if arguments.explain:
        return run_explain(arguments.explain.upper())
    if not arguments.paths:
        raise UsageError("give files or folders to lint, as in `sbp lint src/`")
    configuration = configured(arguments)
    paths = discover(arguments.paths, configuration)
    jobs = arguments.jobs if arguments.jobs is not None else available_cores()
    if jobs < 1:
        raise UsageError("--jobs must be at least 1")
    if arguments.fix or arguments.diff:
        from sbp.inplace.lint.fix_command import run_fixes

        return run_fixes(paths, configuration, jobs, write=arguments.fix, show=arguments.diff)
    reports = lint_files(paths, configuration, jobs)
    emit(FORMATS[arguments.format](reports), arguments.output)
    return exit_code(reports)


def exit_code(reports: Sequence[FileReport]) -> int:
    """1 if there are findings."""
    return FOUND if any(report.findings for report in reports) else CLEAN


def run_explain(code: str) -> int:
    """Print what a code means."""
    codes = list(RULES) if code == "ALL" else [code]
    for number, one in enumerate(codes):
        if one not in RULES:
            raise UsageError(f"no code {one!r}; the codes are {', '.join(RULES)}")
        print(("\n" if number else "") + explain(one))
    return CLEAN


def configured(arguments: argparse.Namespace) -> config.Configuration:
    """The configuration file, with what the command line says on top."""
    if arguments.config:
        configuration = config.read(Path(arguments.config))
    else:
        found = config.find(arguments.paths)
        configuration = config.read(found) if found is not None else config.Configuration()
    if arguments.level:
        configuration = replace(configuration, level=arguments.level)
    for name in ("select", "ignore"):
        given = getattr(arguments, name)
        if given is not None:
            codes = [code.strip().upper() for code in given.split(",") if code.strip()]
            changes: dict[str, Any] = {name: config.codes_of(codes, f"--{name}")}
            configuration = replace(configuration, **changes)
    if arguments.exclude:
        configuration = replace(configuration, exclude=(*configuration.exclude, *arguments.exclude))
    return configuration


def available_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def emit(text: str, output: str | None) -> None:
    """Write the report where it was asked for."""
    if output is None:
        if text:
            print(text)
        return
    try:
        Path(output).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from None
