"""``sbp known``: holds a file of known failures against results, and brings it up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sbp.escape import complain, printable
from sbp.known import SHIPPED, Known, KnownError, describe_stale, load, read_text
from sbp.known_update import update_text
from sbp.report.command import is_whole
from sbp.report.files import ends_with_its_reader, opened_for_writing
from sbp.report.merge import MergeError, read_all
from sbp.report.results import Results, ResultsError, apply_known
from sbp.usage import Parser

OK, FAILED, USAGE, INCOMPLETE = 0, 1, 2, 3

EXAMPLES = """\
examples:
  sbp known check results.jsonl --known known.toml --strict
  sbp known update results.jsonl --known known.toml --reason "see our issue 12"
  sbp known list

exit code: 0 fine; 1 check found unexpected failures or, with --strict, entries to put right; 2 bad usage or input;
3 check was given an incomplete run."""


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``sbp known``."""
    parser = Parser(
        prog="sbp known",
        description="Known failures: trials that are expected to fail, each with a reason.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, results: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if results:
            sub.add_argument("results", nargs="+", metavar="RESULTS", help="what sbp.run --results wrote")
        sub.add_argument(
            "--known", metavar="FILE", help="the TOML file (default: the one that ships with sbp)"
        )
        return sub

    check = command("check", "say what is unexpected, and which entries pass or match nothing")
    check.add_argument("--strict", action="store_true", help="such entries are an error")
    update = command("update", "remove what passes, add what fails; comments stay")
    update.add_argument(
        "--reason", metavar="TEXT", default="", help="of new entries (default: how it differs)"
    )
    update.add_argument("--link", metavar="URL", default="", help="of new entries")
    update.add_argument("--no-add", action="store_true", help="only remove and correct")
    update.add_argument("--no-remove", action="store_true", help="only add")
    update.add_argument("--prune", action="store_true", help="also remove what matches no trial")
    command("list", "print the entries", results=False)
    return parser


@ends_with_its_reader
def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = make_parser().parse_args(argv)
    path = Path(options.known) if options.known else SHIPPED
    try:
        if options.command == "list":
            return list_entries(load(path))
        results = read_all(options.results)
        return (
            check(results, path, options.strict)
            if options.command == "check"
            else update(results, path, options)
        )
    except BrokenPipeError:
        raise
    except (KnownError, ResultsError, MergeError, OSError) as error:
        return complain("sbp known", str(error), USAGE)


def list_entries(known: Known) -> int:
    """Print every entry in a line or two."""
    for entry in known.entries:
        patterns = ", ".join(pattern.text for pattern in entry.patterns)
        print(printable(f"{known.where(entry)}: {patterns}: {', '.join(entry.verdicts)}\n  {entry.reason}"))
    print(f"{len(known.entries)} entries")
    return OK


def check(results: Results, path: Path, strict: bool) -> int:
    """Print what the file does not explain and which of its entries are stale."""
    known = load(path)
    results, usage = apply_known(results, known)
    stale = describe_stale(known, usage.stale(is_whole(results)), limit=1000)
    for line in stale:
        print(printable(f"{'error' if strict else 'warning'}: {line}"))
    for verdict in results.unexpected:
        print(printable(f"unexpected: {verdict.verdict}  {verdict.id}"))
    print(
        f"{len(results.known)} known, {len(results.unexpected)} unexpected, {len(stale)} entries to put right"
    )
    for problem in results.problems:
        print(printable(f"sbp known: incomplete: {problem}"), file=sys.stderr)
    if results.problems:
        return INCOMPLETE
    return FAILED if results.unexpected or (stale and strict) else OK


def update(results: Results, path: Path, options: argparse.Namespace) -> int:
    """Rewrite the file so that it fits the results, and say what was done."""
    if not results.verdicts:
        raise ResultsError(f"{results.name}: there is no verdict to go by")
    text = read_text(path) if path.exists() else ""
    new, notes = update_text(
        text,
        path,
        results,
        whole_run=is_whole(results),
        reason=options.reason,
        link=options.link,
        add=not options.no_add,
        remove=not options.no_remove,
        prune=options.prune,
    )
    if new != text:
        with opened_for_writing(str(path)) as file:
            file.write(new)
    for note in notes:
        print(printable(note))
    print(printable(f"{path}: {'changed' if new != text else 'nothing to change'}"))
    return OK
