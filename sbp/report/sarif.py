"""SARIF 2.1.0: findings with a source line, for code scanning. Used by the reports and by the lint.

Within GitHub's limits: at most 5,000 results are kept (the gravest), because more are not shown; texts of rules are
cut at 1,024 characters; every result has one location and a fingerprint, so that an alert survives when lines
above it change. Needs only the standard library.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from sbp.report.results import Inplace, Results, Verdict

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
HOME = "https://github.com/sbp-conformance/sbp"
MOST_RESULTS = 5_000
_LONGEST_TEXT = 1_024
_LEVELS = ("error", "warning", "note")

# The scheme by which GitHub's upload action makes fingerprints; see line_fingerprints.
_BLOCK = 100
_FACTOR = 37
_MASK = (1 << 64) - 1
_BLANKS = (0x20, 0x09)
_NEWLINE, _RETURN = 0x0A, 0x0D


@dataclass(frozen=True)
class Rule:
    """A kind of finding. ``help`` is Markdown; ``level`` is error, warning or note."""

    id: str
    name: str
    text: str
    help: str = ""
    level: str = "warning"
    url: str = HOME


@dataclass(frozen=True)
class Place:
    """A place in a source file: lines and columns count from 1, in characters, the end column is exclusive.

    ``path`` may be absolute or relative to the root of the repository.
    """

    path: str
    line: int | None = None
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None


@dataclass(frozen=True)
class Result:
    """One finding at a place. ``identity`` goes into the fingerprint where the source cannot be read."""

    rule: str
    message: str
    place: Place
    level: str = ""
    related: Sequence[tuple[Place, str]] = ()
    properties: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""


def sarif_log(
    version: str,
    rules: Sequence[Rule],
    results: Iterable[Result],
    notes: Sequence[str] = (),
    successful: bool = True,
    root: str | Path | None = None,
    category: str = "sbp",
    read_source: Callable[[Path], str | None] | None = None,
) -> dict[str, Any]:
    """A SARIF log as plain data, ready for ``json.dump``.

    Args:
        version: of sbp.
        rules: all that results may be of.
        results: in any order; the gravest are kept where there are more than GitHub shows.
        notes: lines about the run itself, such as that it is incomplete.
        successful: whether the run came to its end.
        root: the repository; paths are written relative to it. The working directory where not given.
        category: tells the uploads of one commit apart.
        read_source: gives a file's text or None; reads the disk where not given.

    Raises KeyError for a result whose rule is not among ``rules``.
    """
    root = Path(root or os.getcwd()).absolute()
    index = {rule.id: position for position, rule in enumerate(rules)}
    levels = {rule.id: rule.level for rule in rules}
    ordered = sorted(results, key=lambda result: _LEVELS.index(result.level or levels[result.rule]))
    notes = list(notes)
    if len(ordered) > MOST_RESULTS:
        notes.append(
            f"{len(ordered) - MOST_RESULTS} more findings were left out: GitHub shows {MOST_RESULTS}"
        )
        ordered = ordered[:MOST_RESULTS]
    fingerprints = Fingerprints(root, read_source or _read_source)
    invocation: dict[str, Any] = {"executionSuccessful": successful}
    if notes:
        invocation["toolExecutionNotifications"] = [
            {"level": "warning", "message": {"text": text}} for text in notes
        ]
    run = {
        "tool": {
            "driver": {
                "name": "sbp",
                "version": version,
                "informationUri": HOME,
                "rules": [_rule(rule) for rule in rules],
            }
        },
        "automationDetails": {"id": f"{category}/"},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "the root of the repository"}}},
        "invocations": [invocation],
        "results": [_result(result, index, levels, root, fingerprints) for result in ordered],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, Any]:
    text = _cut(rule.text)
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": text},
        "fullDescription": {"text": text},
        "help": {"text": rule.help or rule.text, "markdown": rule.help or rule.text},
        "helpUri": rule.url,
        "defaultConfiguration": {"level": rule.level},
        "properties": {"tags": ["correctness", "distributed"]},
    }


def _result(
    result: Result,
    index: Mapping[str, int],
    levels: Mapping[str, str],
    root: Path,
    fingerprints: Fingerprints,
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "ruleId": result.rule,
        "ruleIndex": index[result.rule],
        "level": result.level or levels[result.rule],
        "message": {"text": result.message or result.rule},
        "locations": [_location(result.place, root)],
        "partialFingerprints": {"primaryLocationLineHash": fingerprints.of(result)},
    }
    if result.related:
        record["relatedLocations"] = [
            {"id": number, **_location(place, root), "message": {"text": text}}
            for number, (place, text) in enumerate(result.related, start=1)
        ]
    if result.properties:
        record["properties"] = dict(result.properties)
    return record


def _location(place: Place, root: Path) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": artifact(place.path, root)}
    region: dict[str, int] = {"startLine": max(place.line or 1, 1)}
    if place.column is not None:
        region["startColumn"] = max(place.column, 1)
    if place.end_line is not None:
        region["endLine"] = max(place.end_line, region["startLine"])
    if place.end_column is not None:
        region["endColumn"] = max(place.end_column, 1)
    physical["region"] = region
    return {"physicalLocation": physical}


def artifact(path: str, root: Path) -> dict[str, str]:
    """Where a file is: relative to the repository's root, or an absolute ``file:`` URI outside of it."""
    relative = relative_path(path, root)
    if relative is not None:
        return {"uri": quote(relative), "uriBaseId": "%SRCROOT%"}
    return {"uri": "file://" + quote(PurePath(os.path.abspath(path)).as_posix())}


def relative_path(path: str, root: Path) -> str | None:
    """The path from the repository's root with forward slashes, None where it is not inside."""
    absolute = Path(os.path.normpath(root / path))
    try:
        return absolute.relative_to(root).as_posix()
    except ValueError:
        return None


class Fingerprints:
    """Fingerprints of results, the same as GitHub's upload action would make from the source."""

    def __init__(self, root: Path, read_source: Callable[[Path], str | None]) -> None:
        self.root = root
        self.read_source = read_source
        self._lines: dict[str, list[str]] = {}

    def of(self, result: Result) -> str:
        lines = self._lines.get(result.place.path)
        if lines is None:
            text = self.read_source(self.root / result.place.path)
            lines = [] if text is None else line_fingerprints(text)
            self._lines[result.place.path] = lines
        line = max(result.place.line or 1, 1)
        if line <= len(lines):
            return lines[line - 1]
        words = "\n".join([result.rule, result.place.path, result.identity or result.message])
        return line_fingerprints(words)[0]


def _read_source(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except (OSError, ValueError):  # a path from a results file may hold what no path can
        return None


def line_fingerprints(text: str) -> list[str]:
    """A fingerprint for each line of a file, as GitHub's upload action defines it.

    The hash of the 100 characters from the line's start on, white space other than line ends left out, by a
    rolling polynomial with the factor 37 modulo 2**64; then a colon and the how-manieth such hash it is.
    """
    characters: list[int] = []
    starts = [0]
    after_return = False
    # Its characters are JavaScript's: units of UTF-16.
    for (unit,) in struct.iter_unpack("<H", text.encode("utf-16-le", "surrogatepass")):
        if unit in _BLANKS or (after_return and unit == _NEWLINE):
            after_return = False  # white space between \r and \n makes two line ends of them
            continue
        after_return = unit == _RETURN
        if unit in (_RETURN, _NEWLINE):
            characters.append(_NEWLINE)
            starts.append(len(characters))
        else:
            characters.append(unit)
    characters.append(0xFFFF)  # the end of the file counts as a character
    characters += [0] * _BLOCK
    seen: dict[int, int] = {}
    found = []
    for start in starts:
        value = 0
        for code in characters[start : start + _BLOCK]:
            value = (value * _FACTOR + code) & _MASK
        seen[value] = seen.get(value, 0) + 1
        found.append(f"{value:x}:{seen[value]}")
    return found


def _cut(text: str, limit: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ------------------------------------------------------------------------------------ from a results file

# What the watch calls an outcome -> the rule and its level. Outcomes that are fine are no findings.
_OUTCOMES = {
    "changed placement": ("error", "An in-place operation changed the placement of a distributed tensor."),
    "lost": ("error", "An in-place write to a distributed tensor was lost."),
    "wrong value": ("error", "An in-place operation gave another result than its out-of-place form."),
    "error": ("warning", "An in-place operation on a distributed tensor raised an error from deep inside."),
    "refused": ("note", "An in-place operation on a distributed tensor was refused."),
    "bypassed": ("warning", "A write went past the distributed tensor, to its local piece."),
}
_FINE = ("safe", "ok", "pass", "")


def results_to_sarif(
    results: Results,
    version: str,
    root: str | Path | None = None,
    read_source: Callable[[Path], str | None] | None = None,
) -> dict[str, Any]:
    """The SARIF log of a run: in-place findings, and failures whose culprit has a source line."""
    rules: dict[str, Rule] = {}
    found: list[Result] = []
    for item in results.inplace:
        if item.outcome in _FINE or not item.file or not item.listed:
            continue
        rule = _inplace_rule(item.outcome)
        rules[rule.id] = rule
        found.append(_inplace_result(item, rule))
    homeless = 0
    for verdict in results.unexpected:
        if verdict.origin is None or not verdict.origin.file:
            homeless += 1
            continue
        rule = _verdict_rule(verdict.verdict)
        rules[rule.id] = rule
        found.append(_verdict_result(verdict, rule))
    notes = list(results.problems)
    if homeless:
        notes.append(f"{homeless} failures have no source line; see the other reports")
    kept = {(result.rule, result.place, result.message): result for result in found}
    ordered_rules = [rules[name] for name in sorted(rules)]
    return sarif_log(
        version, ordered_rules, kept.values(), notes, results.complete, root, "sbp/run", read_source
    )


def _slug(words: str) -> str:
    return "-".join(words.split())


def _inplace_rule(outcome: str) -> Rule:
    level, text = _OUTCOMES.get(
        outcome, ("warning", f"An in-place operation on a distributed tensor: {outcome}.")
    )
    help_text = (
        f"{text}\n\n`x += y` keeps the storage of `x`, so it must keep its placement too. "
        "Write `x = x + y`, or redistribute `y` first."
    )
    return Rule(
        f"inplace-{_slug(outcome)}", "Inplace" + outcome.title().replace(" ", ""), text, help_text, level
    )


def _inplace_result(item: Inplace, rule: Rule) -> Result:
    words = [f"{item.source or item.operator}: {item.outcome}"]
    if item.placements:
        words.append(item.placements)
    if item.module:
        words.append(f"in {item.module}")
    if item.message:
        words.append(item.message)
    message = ", ".join(words) + (f" ({item.count} times)" if item.count > 1 else "")
    return Result(
        rule.id, message, Place(item.file, item.line), identity=f"{item.operator} {item.module} {item.source}"
    )


def _verdict_rule(word: str) -> Rule:
    text = f"A module or operator gives {word} when it is distributed."
    if word in ("hang", "crash", "error", "ranks disagree", "lost write"):
        text = f"A module or operator ends in: {word}, when it is distributed."
    return Rule(_slug(word), word.title().replace(" ", ""), text, "", "error")


def _verdict_result(verdict: Verdict, rule: Rule) -> Result:
    assert verdict.origin is not None
    first = verdict.findings[0] if verdict.findings else None
    relation = f": {first.quantity} {first.relation}".rstrip() if first else ""
    return Result(
        rule.id,
        f"{verdict.verdict} in {verdict.id}{relation}",
        Place(verdict.origin.file, verdict.origin.line),
        properties={"trial": verdict.id, "command": verdict.command},
        identity=verdict.id,
    )
