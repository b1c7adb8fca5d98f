"""``sbp signatures``: which SBP signatures are true for an operator."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from sbp.escape import complain, printable
from sbp.signatures_table import (
    SHIPPED,
    TableError,
    compare_tables,
    judge_operators,
    read_table,
    write_table,
)
from sbp.usage import FAILED, INCOMPLETE, OK, USAGE, Parser, at_least_one

EXAMPLES = """\
examples:
  sbp signatures matmul softmax          a table for each kind of call
  sbp signatures --gradient matmul       also the gradients' signatures
  sbp signatures matmul --json           for programs
  sbp signatures --all --output table.json.gz
  sbp signatures --diff old.json.gz new.json.gz     exit code 1 where they differ
  sbp signatures --diff shipped table.json.gz       what differs from the table of torch 2.13 in this package

A signature S(0), B -> S(0) names the placements of the tensor arguments in their order, then that of the result. It
is found by experiment: nothing that is shown was refuted by any draw. Conditions stand behind it: (even) where splits
come out even, (nonempty) where no rank has an empty piece, (finite) without NaN, (local sizes) where each rank is
given the size of its own piece of the result."""


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``sbp signatures``."""
    parser = Parser(
        prog="sbp signatures",
        description="Find out by experiment which SBP signatures are true for an operator of torch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("operators", nargs="*", metavar="OP", help="names of torch's operator database: matmul, softmax")
    add("--all", action="store_true", help="every operator of the database")
    add("--gradient", action="store_true", help="also the signatures of each input's gradient")
    add("--json", action="store_true", help="print JSON")
    add("--output", metavar="FILE", help="write the table to FILE (compressed where it ends in .gz)")
    add(
        "--diff",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="print what changed between two written tables; shipped is the one in this package",
    )
    add(
        "--processes",
        type=at_least_one,
        metavar="N",
        help="how many operators at a time; all cores without it",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    try:
        options = make_parser().parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        if options.diff:
            lines = compare_tables(
                *(read_table(SHIPPED if path == "shipped" else path) for path in options.diff)
            )
            print(printable("\n".join(lines)) if lines else "no difference")
            return FAILED if lines else OK
        return _judge(options)
    except TableError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"cannot write {options.output}: {error.strerror or error}")


def _judge(options: argparse.Namespace) -> int:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return _complain("torch is not installed; pip install 'sbp-conformance[run]'")
    if not options.operators and not options.all:
        return _complain("name an operator, such as sbp signatures matmul, or use --all")
    from sbp.suites.operator_database import operator_names

    names = operator_names()
    try:
        wanted = names if options.all else choose_operators(options.operators, names)
    except LookupError as error:
        return _complain(str(error.args[0]))
    entries: dict[str, Any] = {}
    terminal = Console(stderr=True)
    for name, entry in judge_operators(wanted, options.processes, options.gradient):
        entries[name] = entry
        if options.all and terminal.is_terminal:
            terminal.print(f"{len(entries)}/{len(wanted)} {name:<50}", end="\r", highlight=False)
    if options.output:
        write_table(options.output, entries, version)
    if options.json:
        print(json.dumps({"torch": version, "operators": {name: entries[name] for name in wanted}}, indent=1))
    elif not options.output:
        for name in wanted:
            print_entry(Console(highlight=False, soft_wrap=True), name, entries[name])
    failed = [name for name in wanted if "error" in entries[name]]
    if options.all or options.output:
        judged = sum(call["tested"] for entry in entries.values() for call in entry.get("calls", ()))
        print(
            f"{len(entries)} operators, {judged} signatures tested, {len(failed)} operators failed",
            file=sys.stderr,
        )
    return INCOMPLETE if failed and not options.all else OK


def choose_operators(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The database's ``names`` that a user's words mean. Raises LookupError with one line for a user."""
    wanted: list[str] = []
    for word in words:
        short = word.removeprefix("torch.")
        found = [name for name in names if name == short or name.split(".")[-1] == short]
        if not found:
            near = difflib.get_close_matches(short, names, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise LookupError(f"torch's operator database has no {word!r}{hint}")
        wanted += [name for name in found if name not in wanted]
    return wanted


def print_entry(console: Console, name: str, entry: Mapping[str, Any]) -> None:
    """One operator's signatures for a person."""
    console.print(Text(name, style="bold"))
    if "error" in entry:
        console.print(Text(f"  could not be judged: {entry['error']}", style="red"))
        return
    for call in entry["calls"]:
        _print_call(console, call, call["call"])
    for argument, calls in entry.get("gradients", {}).items():
        for call in calls:
            _print_call(console, call, f"gradient to {argument}: {call['call']}")
    for call, reason in entry["left out"]:
        console.print(Text(f"\n  {call}   not judged: {reason}", style="dim"))


def _print_call(console: Console, call: Mapping[str, Any], title: str) -> None:
    tested = f"{call['tested']} signatures judged, {call['draws']} draws"
    if call["which"] != "all":
        tested += f", {call['which']}"
    console.print(Text.assemble(f"\n  {title} -> {', '.join(call['outputs'])}", (f"   {tested}", "dim")))
    broadcast = {
        (tuple(inputs), output, tuple(needs))
        for inputs, output, placement, needs in call["signatures"]
        if placement == "B"
    }
    for inputs, output, placement, needs in call["signatures"]:
        # Equal pieces have themselves for average, maximum and minimum: that says no more than B does.
        same = tuple(inputs), output, tuple(needs)
        if placement in ("P(avg)", "P(max)", "P(min)") and same in broadcast:
            continue
        which = f"output {output}: " if len(call["outputs"]) > 1 else ""
        line = f"    {which}{', '.join(inputs)} -> {placement}"
        console.print(Text.assemble(line, (f"   ({', '.join(needs)})" if needs else "", "dim")))


def _complain(line: str) -> int:
    return complain("sbp signatures", line, USAGE)
