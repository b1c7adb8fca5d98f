"""``sbp diff old.jsonl new.jsonl``: what became of every trial between two runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp.escape import complain, printable
from sbp.report.files import ends_with_its_reader, opened_for_writing
from sbp.report.junit import describe_finding
from sbp.report.markdown import code, plain, table
from sbp.report.merge import MergeError, read_all
from sbp.report.results import Results, ResultsError, Verdict, failure_key, group_failures
from sbp.usage import Parser

OK, FAILED, USAGE, INCOMPLETE = 0, 1, 2, 3

# State of a trial -> what it means, in the order in which they are shown.
STATES = {
    "new": "fails now, and did not before",
    "changed": "failed before, and fails now with another verdict",
    "new known": "fails now, as a known failure",
    "fixed": "failed before, and does not now",
    "still": "fails as before",
    "added": "was not there before, and does not fail",
    "gone": "is not there any more",
    "same": "did not fail, and does not now",
}


@dataclass(frozen=True)
class Change:
    """One trial in both runs; ``old`` or ``new`` is None where it is only in one of them."""

    state: str
    old: Verdict | None
    new: Verdict | None

    @property
    def verdict(self) -> Verdict:
        """The trial as it is now, or as it was."""
        found = self.new or self.old
        assert found is not None
        return found


@dataclass(frozen=True)
class Diff:
    """The difference of two runs, trial by trial, in the order of the new one."""

    old: Results
    new: Results
    changes: tuple[Change, ...] = field(repr=False)

    def of(self, *states: str) -> list[Change]:
        return [change for change in self.changes if change.state in states]

    @property
    def counts(self) -> dict[str, int]:
        return {state: len(self.of(state)) for state in STATES}

    @property
    def exit_code(self) -> int:
        """1 where a trial fails that did not, or fails with another verdict; 3 where the new run is incomplete."""
        if self.of("new", "changed"):
            return FAILED
        return OK if self.new.complete else INCOMPLETE


def compare(old: Results, new: Results) -> Diff:
    """Compare two runs by the trials' ids. Which subject they ran on is compared away where each has one only, so
    that two subjects can be compared too."""
    across = len({v.subject for v in old.verdicts}) <= 1 and len({v.subject for v in new.verdicts}) <= 1

    def key(verdict: Verdict) -> tuple[str, str]:
        return ("", verdict.id) if across else verdict.key

    before = {key(verdict): verdict for verdict in old.verdicts}
    changes = [
        Change(_state(before.get(key(verdict)), verdict), before.get(key(verdict)), verdict)
        for verdict in new.verdicts
    ]
    now = {key(verdict) for verdict in new.verdicts}
    changes += [Change("gone", verdict, None) for name, verdict in before.items() if name not in now]
    return Diff(old, new, tuple(changes))


def _state(old: Verdict | None, new: Verdict) -> str:
    if new.failed:
        if old is not None and old.failed:
            return "still" if old.verdict == new.verdict or not new.unexpected else "changed"
        return "new" if new.unexpected else "new known"
    if old is None:
        return "added"
    return "fixed" if old.failed else "same"


def _title(results: Results) -> str:
    torch = results.run.versions.get("torch")
    return results.name + (f" (torch {torch})" if torch else "")


def _differently(change: Change) -> bool:
    return (
        change.old is not None
        and change.new is not None
        and failure_key(change.old)[:-1] != failure_key(change.new)[:-1]
    )


def _groups(changes: Iterable[Change]) -> list[tuple[Verdict, tuple[Verdict, ...]]]:
    return group_failures(change.new or change.old for change in changes)  # type: ignore[misc]


def to_text(diff: Diff, limit: int = 40) -> str:
    """For a terminal: each distinct failure once, and the counts."""
    lines = [f"old: {_title(diff.old)}", f"new: {_title(diff.new)}"]
    old = {id(change.new): change.old for change in diff.changes}
    for state, words in (
        ("new", "New failures"),
        ("changed", "Fail with another verdict"),
        ("new known", "New, but known failures"),
    ):
        groups = _groups(diff.of(state))
        if groups:
            lines += ["", words]
        for one, members in groups[:limit]:
            was = old[id(one)]
            lines.append(f"  {one.verdict} (was {was.verdict if was else 'not there'})  {one.id}")
            lines += [f"    {describe_finding(finding)}" for finding in one.findings[:3]]
            if len(members) > 1:
                lines.append(f"    the same in {len(members) - 1} more trials")
            if one.command:
                lines.append(f"    {one.command}")
        if len(groups) > limit:
            lines.append(f"  and {len(groups) - limit} more")
    fixed = diff.of("fixed")
    if fixed:
        lines += ["", "Fixed"]
        lines += [
            f"  {one.verdict}  {one.id}"
            + (f"  and {len(members) - 1} more trials" if len(members) > 1 else "")
            for one, members in group_failures(change.old for change in fixed if change.old)[:limit]
        ]
    differently = sum(_differently(change) for change in diff.of("still"))
    lines += ["", counts_line(diff)]
    if differently:
        lines.append(f"{differently} of those that still fail do so in another quantity")
    return "\n".join(lines)


def counts_line(diff: Diff) -> str:
    """All counts in a line."""
    counts = diff.counts
    words = [f"{counts['new']} new", f"{counts['changed']} changed", f"{counts['fixed']} fixed"]
    words.append(f"{counts['still']} still failing")
    words += [
        f"{counts[state]} {name}"
        for state, name in (("new known", "new but known"), ("added", "added"), ("gone", "gone"))
        if counts[state]
    ]
    return ", ".join(words)


def to_markdown(diff: Diff, limit: int = 100) -> str:
    """For a comment on a pull request."""
    bad = len(diff.of("new", "changed"))
    lines = [f"## {'❌' if bad else '✅'} sbp: {counts_line(diff)}", ""]
    lines += [f"old: {plain(_title(diff.old))}, new: {plain(_title(diff.new))}", ""]
    lines += [f"> [!CAUTION]\n> The new run is not complete: {plain(p)}\n" for p in diff.new.problems]
    for state, words in STATES.items():
        groups = _groups(diff.of(state)) if state not in ("same", "added", "gone") else []
        if not groups:
            continue
        open_ = state in ("new", "changed")
        lines += ["", f"### {words.capitalize()}" if open_ else f"<details><summary>{words}</summary>", ""]
        rows = [
            [one.verdict, code(one.id), str(len(members)), _first_words(one)]
            for one, members in groups[:limit]
        ]
        lines += table(["verdict", "trial", "trials", "finding"], rows, [2])
        if len(groups) > limit:
            lines.append(f"\nand {len(groups) - limit} more")
        lines += [] if open_ else ["", "</details>"]
    return "\n".join([*lines, ""])


def _first_words(verdict: Verdict) -> str:
    return plain(describe_finding(verdict.findings[0])) if verdict.findings else ""


def to_json(diff: Diff) -> dict[str, Any]:
    """As plain data: counts, and the ids of the trials of every state but ``same``."""

    def entry(change: Change) -> dict[str, Any]:
        return {
            "id": change.verdict.id,
            "old": change.old.verdict if change.old else None,
            "new": change.new.verdict if change.new else None,
        }

    states = [state for state in STATES if state != "same"]
    return {
        "old": {
            "name": diff.old.name,
            "versions": dict(diff.old.run.versions),
            "complete": diff.old.complete,
        },
        "new": {
            "name": diff.new.name,
            "versions": dict(diff.new.run.versions),
            "complete": diff.new.complete,
        },
        "counts": diff.counts,
        **{state.replace(" ", "_"): [entry(change) for change in diff.of(state)] for state in states},
    }


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sbp diff",
        description="Compare two runs trial by trial: between versions of torch, commits, or subjects.",
        epilog="exit code: 0 no trial fails that did not before; 1 new failures, or failures with another verdict; "
        "2 bad usage or input; 3 the new run is incomplete. Known failures are not counted as new.",
    )
    parser.add_argument("old", metavar="OLD", help="the results to compare with: old.jsonl")
    parser.add_argument("new", metavar="NEW", help="the results to judge: new.jsonl")
    parser.add_argument("--json", metavar="FILE", help="all changes as JSON: --json diff.json (- for stdout)")
    parser.add_argument("--markdown", metavar="FILE", help="for a pull request: --markdown diff.md")
    parser.add_argument("--html", metavar="FILE", help="the page with both runs: --html diff.html")
    return parser


@ends_with_its_reader
def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = make_parser().parse_args(argv)
    try:
        diff = compare(read_all([options.old]), read_all([options.new]))
        if options.json:
            with opened_for_writing(options.json) as file:
                json.dump(to_json(diff), file, indent=1)
                file.write("\n")
        if options.markdown:
            with opened_for_writing(options.markdown) as file:
                file.write(to_markdown(diff))
        if options.html:
            from sbp.report.html import results_to_html

            with opened_for_writing(options.html) as file:
                file.write(results_to_html(diff.new, old=diff.old))
        if "-" not in (options.json, options.markdown, options.html):
            print(printable(to_text(diff)))
    except BrokenPipeError:
        raise
    except (ResultsError, MergeError, OSError) as error:
        return complain("sbp diff", str(error), USAGE)
    for problem in diff.new.problems:
        print(printable(f"sbp diff: {diff.new.name}: incomplete: {problem}"), file=sys.stderr)
    return diff.exit_code
