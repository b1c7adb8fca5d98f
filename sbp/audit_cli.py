"""``sbp audit``: which sharding rules of a subject are unsound, and what they leave out."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from sbp.escape import complain
from sbp.signatures_cli import choose_operators
from sbp.signatures_table import as_a_whole, judge_operators
from sbp.usage import FAILED, INCOMPLETE, OK, USAGE, Parser, at_least_one, parse_time

EXAMPLES = """\
examples:
  sbp audit dtensor gather               one operator, in its in-place variant also
  sbp audit dtensor --json audit.json    every operator of torch's database

Unsound rules come first, each with a call, a mesh and input placements for which it is false. The exit code is 1 where
there is one, 3 where an operator could not be judged."""

# How long one operator may take.
SECONDS = 60.0


def make_parser() -> argparse.ArgumentParser:
    """The command line of ``sbp audit``."""
    parser = Parser(
        prog="sbp audit",
        description="Judge a subject's sharding rules by what is true, without ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("subject", choices=["dtensor"], help="whose rules")
    add("operators", nargs="*", metavar="OP", help="names of torch's operator database; all without one")
    add("--json", metavar="FILE", help="also write the findings to FILE")
    add("--markdown", action="store_true", help="print the unsound rules as a table for a README")
    add(
        "--processes",
        type=at_least_one,
        metavar="N",
        help="how many operators at a time; all cores without it",
    )
    add("--seconds", type=parse_time, default=SECONDS, metavar="T", help=f"for one operator ({SECONDS:g})")
    return parser


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    try:
        options = make_parser().parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return _complain("torch is not installed; pip install 'sbp-conformance[run]'")
    from sbp.audit import audit_operator
    from sbp.suites.operator_database import operator_names

    names = operator_names()
    try:
        wanted = choose_operators(options.operators, names) if options.operators else names
    except LookupError as error:
        return _complain(str(error.args[0]))
    judge = partial(as_a_whole, audit_operator)
    entries = dict(judge_operators(wanted, options.processes, seconds=options.seconds, judge=judge))
    audit = {
        "subject": options.subject,
        "torch": version,
        "operators": {name: entries[name] for name in wanted},
    }
    if options.json:
        try:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(audit, file, indent=1)
        except OSError as error:
            return _complain(f"cannot write {options.json}: {error.strerror or error}")
    if options.markdown:
        print("\n".join(markdown_table(audit["operators"])))
    else:
        print_audit(Console(highlight=False, soft_wrap=True), audit["operators"])
    if any(entry.get("unsound") for entry in entries.values()):
        return FAILED
    return INCOMPLETE if any("error" in entry for entry in entries.values()) else OK


def print_audit(console: Console, operators: Mapping[str, Any]) -> None:
    """An audit for a person: by operator, those with unsound rules first."""
    order = sorted(
        operators, key=lambda name: (not operators[name].get("unsound"), "error" in operators[name])
    )
    for name in order:
        entry = operators[name]
        if "error" in entry:
            console.print(Text(f"{name}  could not be judged: {entry['error']}", style="red"))
            continue
        if not (entry["unsound"] or entry["missing"] or len(operators) == 1):
            continue
        console.print(Text.assemble((name, "bold"), (f"   {entry['judged']} claims judged", "dim")))
        for finding in entry["unsound"]:
            console.print(Text(f"  unsound: {describe_unsound(finding)}", style="red"))
            console.print(Text(f"      {finding['call']} on a mesh of {finding['mesh']}", style="dim"))
        for line in describe_missing(entry["missing"]):
            console.print(Text(f"  {line}"))
    unsound = sum(bool(entry.get("unsound")) for entry in operators.values())
    judged = sum(entry.get("judged", 0) for entry in operators.values())
    failed = sum("error" in entry for entry in operators.values())
    console.print(
        f"{len(operators)} operators, {judged} claims judged: {unsound} operators with unsound rules, "
        f"{failed} could not be judged"
    )


def markdown_table(operators: Mapping[str, Any]) -> list[str]:
    """The unsound rules as lines of Markdown, each rule and kind of fault once, with the first example."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in operators.values():
        for finding in entry.get("unsound", ()):
            groups.setdefault((finding["rule"], finding["kind"]), []).append(finding)
    lines = ["| rule | fault | placements | such as | call |", "| --- | --- | --- | --- | --- |"]
    for (rule, kind), findings in sorted(groups.items()):
        first = findings[0]
        example = f"{', '.join(first['inputs'])} -> {', '.join(first['claims'])}"
        call = first["call"].replace("|", "\\|")
        lines.append(
            f"| `{rule}` | {kind} | {len(findings)} | `{example}` | `{call}`, mesh of {first['mesh']} |"
        )
    return lines


def describe_unsound(finding: Mapping[str, Any]) -> str:
    """One line: ``aten.gather.default S(0), B -> S(0): wrong result``."""
    moved = ""
    if finding["runs on"] != finding["inputs"]:
        moved = f" moved to {', '.join(finding['runs on'])}"
    claims = ", ".join(finding["claims"])
    return f"{finding['rule']} {', '.join(finding['inputs'])}{moved} -> {claims}: {finding['kind']}"


def describe_missing(missing: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each rule: how many true signatures it refuses or moves data for, and the first as an example."""
    lines = []
    groups = Counter((finding["rule"], "refused" in finding) for finding in missing)
    for (rule, refused), count in groups.items():
        some = [f for f in missing if (f["rule"], "refused" in f) == (rule, refused)]
        first = some[0]
        true = ", ".join("|".join(placements) for placements in first["true"])
        example = f"{', '.join(first['inputs'])} -> {true}"
        if refused:
            lines.append(f"missing: {rule} refuses {count} true signatures, such as {example}")
        else:
            collectives = sum(f["collectives"] for f in some)
            received = sum(f["bytes"] for f in some)
            lines.append(
                f"needless traffic: {rule} moves data for {count} true signatures ({collectives} collectives, "
                f"{received} bytes), such as {example}, run on {', '.join(first['runs on'])}"
            )
    return lines


def _complain(line: str) -> int:
    return complain("sbp audit", line, USAGE)
