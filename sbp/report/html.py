"""The page: one self-contained HTML file with everything that a run found, which opens from disk.

The verdicts go in as columns of numbers into dictionaries of texts, as gzipped JSON in base64; the script in the page
unpacks and shows them. No text of a result is ever put into markup: the summary is escaped by Jinja2, the rest gets
into the page as text nodes. A content security policy with the hashes of the page's own script and style shuts out
everything else, the network included.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from sbp._version import __version__
from sbp.oracle.tolerance import relative_limit
from sbp.report.diff import STATES, Diff, compare
from sbp.report.junit import describe_finding
from sbp.report.results import INPLACE_FAULTS, Finding, Inplace, Results, Verdict, group_failures
from sbp.words import FAILURES, HARMLESS, WORDS

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("data.js", "dom.js", "filters.js", "detail.js", "matrix.js", "lists.js", "plot.js", "main.js")

# One letter for each verdict stands beside its colour; the page explains them.
LETTERS = {
    "pass": "·",
    "noise": "~",
    "no signal": "0",
    "refused": "–",
    "crash": "C",
    "hang": "H",
    "ranks disagree": "R",
    "lost write": "W",
    "wrong layout": "L",
    "wrong value": "V",
    "wrong gradient": "G",
    "wrong state": "S",
    "error": "E",
}

# The page is to stay under 2 MB: less detail goes in, step by step, until it does.
MOST_BYTES = 1_900_000
_MOST_INPLACE = 2_000
_DETAIL = (
    {"text": 6_000, "noise": 8, "errors": None},
    {"text": 1_500, "noise": 3, "errors": 400},
    {"text": 400, "noise": 0, "errors": 100},
    {"text": 200, "noise": 0, "errors": 0},
)


def results_to_html(results: Results, old: Results | None = None) -> str:
    """The page of a run; with ``old``, also what became of every trial since."""
    diff = compare(old, results) if old is not None else None
    page = ""
    for detail in _DETAIL:
        data = encode(results, diff, detail)
        page = _render(results, old, data)
        if len(page.encode("utf-8")) <= MOST_BYTES:
            break
    return page


def _render(results: Results, old: Results | None, data: Mapping[str, Any]) -> str:
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    script = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f"(() => {{\n'use strict';\n{script}}})();\n"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    packed = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")
    return environment.get_template("report.html.j2").render(
        results=results,
        old=old,
        title=_title(results),
        groups=group_failures(results.unexpected)[:50],
        describe=describe_finding,
        version=__version__,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        # mtime=0: the same results give the same page.
        data=base64.b64encode(gzip.compress(packed, compresslevel=9, mtime=0)).decode("ascii"),
    )


def _hash(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _title(results: Results) -> str:
    torch = results.run.versions.get("torch")
    return "sbp" + (f" on torch {torch}" if torch else "")


class _Texts:
    """A dictionary of texts; 0 is the empty one."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {"": 0}

    def __call__(self, text: str | None) -> int:
        return self.index.setdefault(text or "", len(self.index))

    @property
    def all(self) -> list[str]:
        return list(self.index)


def encode(results: Results, diff: Diff | None, detail: Mapping[str, Any]) -> dict[str, Any]:
    """The data of the page. ``detail`` says how much of long texts, noise and errors is kept."""
    texts = _Texts()
    groups: dict[tuple[int, ...], int] = {}
    cases: dict[tuple[str, str], _Case] = {}
    verdicts = list(results.verdicts)
    if diff is not None:
        verdicts += [change.old for change in diff.of("gone") if change.old is not None]
    for verdict in verdicts:
        case = cases.setdefault((verdict.suite, verdict.case), _Case(len(cases), verdict))
        case.add(verdict.placements)
    full = _with_full_errors(verdicts, detail["errors"])
    columns: dict[str, list[Any]] = {
        name: [] for name in ("group", "case", "verdict", "known", "placed", "ms", "error")
    }
    sparse: dict[str, dict[int, Any]] = {name: {} for name in ("findings", "noise", "more")}
    for number, verdict in enumerate(verdicts):
        group = tuple(texts(text) for text in _group(verdict))
        case = cases[verdict.suite, verdict.case]
        columns["group"].append(groups.setdefault(group, len(groups)))
        columns["case"].append(case.number)
        columns["verdict"].append(WORDS.index(verdict.verdict))
        columns["known"].append(-1 if verdict.known is None else texts(verdict.known))
        columns["placed"].append([texts(verdict.placements.get(name, "")) for name in case.tensors])
        columns["ms"].append(round(verdict.seconds * 1000))
        columns["error"].append(_logarithm(verdict.largest_error))
        if verdict.findings:
            sparse["findings"][number] = [
                _finding(finding, texts, detail["text"]) for finding in verdict.findings
            ]
        if verdict.noise and detail["noise"]:
            worst = sorted(verdict.noise.items(), key=lambda item: -_ratio(*item[1]))[: detail["noise"]]
            sparse["noise"][number] = [
                [texts(name), _logarithm(error), _logarithm(noise)] for name, (error, noise) in worst
            ]
        more = _more(verdict, detail["text"], number in full)
        if more:
            sparse["more"][number] = more
    inplace = sorted((item for item in results.inplace if item.listed), key=_gravity)
    data: dict[str, Any] = {
        "words": list(WORDS),
        "failures": list(FAILURES),
        "harmless": list(HARMLESS),
        "letters": LETTERS,
        "groups": [list(group) for group in groups],
        "cases": [case.encoded(texts) for case in cases.values()],
        **columns,
        **sparse,
        "inplace": [_inplace(item) for item in inplace[:_MOST_INPLACE]],
        "inplaceLeft": max(len(inplace) - _MOST_INPLACE, 0),
        "limits": {dtype: relative_limit(dtype) for dtype in sorted({verdict.dtype for verdict in verdicts})},
        "cut": detail is not _DETAIL[0],
    }
    if diff is not None:
        data["diff"] = _diff(diff, len(results.verdicts), texts)
    data["texts"] = texts.all  # last: now all of them are there
    return data


class _Case:
    """A case of a suite: its number, and the tensors that have placements, in the order of the plan."""

    def __init__(self, number: int, verdict: Verdict) -> None:
        self.number = number
        self.suite = verdict.suite
        self.name = verdict.case
        self.short = verdict.short_name
        self.rows: set[tuple[str, ...]] = set()

    def add(self, placements: Mapping[str, str]) -> None:
        self.rows.add(tuple(placements))

    @functools.cached_property
    def tensors(self) -> list[str]:
        """Each trial names the tensors that are not B, in the plan's order: these orders are woven together."""
        found: list[str] = []
        for row in sorted(self.rows, key=lambda row: (-len(row), row)):
            for position, name in enumerate(row):
                if name in found:
                    continue
                before = [found.index(other) for other in row[:position] if other in found]
                after = [found.index(other) for other in row[position + 1 :] if other in found]
                found.insert(max(before) + 1 if before else min(after, default=len(found)), name)
        return found

    def encoded(self, texts: _Texts) -> list[Any]:
        return [
            texts(self.suite),
            texts(self.name),
            texts(self.short),
            [texts(name) for name in self.tensors],
        ]


def _group(verdict: Verdict) -> tuple[str, ...]:
    """What many trials share: suite, subject, mesh, dtype, device, kind of trial, options."""
    options = " ".join(f"{name}={value}" for name, value in sorted(verdict.options.items()))
    return (
        verdict.suite,
        verdict.subject,
        verdict.mesh,
        verdict.dtype,
        verdict.device,
        verdict.trial,
        options,
    )


def _finding(finding: Finding, texts: _Texts, longest: int) -> list[Any]:
    return [
        texts(finding.quantity),
        texts(finding.verdict),
        list(finding.ranks) or ([] if finding.rank is None else [finding.rank]),
        -1 if finding.claimed is None else texts(finding.claimed),
        -1 if finding.expected is None else texts(finding.expected),
        _number(finding.max_abs_error),
        _number(finding.relative_error),
        texts(_shorten(finding.relation, longest)),
        texts(_shorten(finding.detail, longest)),
    ]


def _more(verdict: Verdict, longest: int, full: bool) -> dict[str, Any]:
    """What only some trials have. The id always, since it is what people copy."""
    more: dict[str, Any] = {"id": verdict.id}
    if verdict.verdict == "pass" and not verdict.noise and verdict.id == _usual_id(verdict):
        more = {}
    for name in ("command", "sensitivity"):
        if getattr(verdict, name):
            more[name] = getattr(verdict, name)
    if verdict.repro:
        more["repro"] = _shorten(verdict.repro, longest)
    if verdict.flaky:
        more["flaky"] = True
    if verdict.origin is not None:
        origin = verdict.origin
        more["origin"] = [origin.file, origin.line, origin.module, origin.operator]
    if verdict.error is not None:
        error = verdict.error
        more["error"] = {"type": error.type, "message": _shorten(error.message, longest)}
        if full:
            more["error"]["traceback"] = _shorten(error.traceback, longest)
            more["error"]["stacks"] = {
                rank: _shorten(stack, longest // 2) for rank, stack in list(error.stacks.items())[:64]
            }
        elif error.traceback or error.stacks:
            more["error"]["line"] = verdict.line
    return more


def _usual_id(verdict: Verdict) -> str:
    """The id that the page would put together itself."""
    placed = ",".join(f"{name}={sbp}".replace(" ", "") for name, sbp in verdict.placements.items())
    parts = [verdict.suite, verdict.case, verdict.mesh, placed or "all=B"]
    if verdict.trial not in ("", "forward"):
        parts.append(verdict.trial)
    parts += [f"{name}={value}" for name, value in sorted(verdict.options.items())]
    parts += [word for word in (verdict.dtype, verdict.device) if word not in ("", "float64", "cpu")]
    return "/".join(parts)


def _with_full_errors(verdicts: Sequence[Verdict], most: int | None) -> set[int]:
    """The trials whose tracebacks and stacks are kept: one of each distinct failure first."""
    numbers = {id(verdict): number for number, verdict in enumerate(verdicts)}
    having = [verdict for verdict in verdicts if verdict.error is not None]
    if most is None or len(having) <= most:
        return {numbers[id(verdict)] for verdict in having}
    first = [one for one, _ in group_failures(having)]
    return {numbers[id(verdict)] for verdict in [*first, *having][:most]}


def _gravity(item: Inplace) -> tuple[int, str, int]:
    """The gravest first, then by place."""
    order = (
        INPLACE_FAULTS.index(item.outcome)
        if item.is_fault
        else len(INPLACE_FAULTS) + (item.outcome == "safe")
    )
    return order, item.file, item.line or 0


def _inplace(item: Inplace) -> list[Any]:
    return [
        item.file,
        item.line,
        item.operator,
        item.module,
        item.outcome,
        item.source,
        item.placements,
        item.message,
        item.count,
        item.trial,
    ]


def _diff(diff: Diff, count: int, texts: _Texts) -> dict[str, Any]:
    """The state of each trial, and what the old run found where it failed."""
    gone = [change for change in diff.changes if change.new is None]
    ordered = [change for change in diff.changes if change.new is not None][:count] + gone
    states = list(STATES)
    old: dict[int, Any] = {}
    for number, change in enumerate(ordered):
        if change.old is not None and (change.old.failed or change.old.verdict != change.verdict.verdict):
            findings = [describe_finding(finding) for finding in change.old.findings[:3]]
            old[number] = [WORDS.index(change.old.verdict), texts("\n".join(findings))]
    return {
        "states": states,
        "meaning": list(STATES.values()),
        "state": [states.index(change.state) for change in ordered],
        "old": old,
        "oldName": diff.old.name,
        "oldVersions": dict(diff.old.run.versions),
        "newName": diff.new.name,
        "newVersions": dict(diff.new.run.versions),
        "oldProblems": list(diff.old.problems),
    }


def _number(value: float | None) -> float | str | None:
    """Three digits are enough to look at; what is not finite goes as text."""
    if value is None:
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else str(value)


def _logarithm(value: float | None) -> int | None:
    """A hundred times the decimal logarithm; 9999 for what is not finite, -9999 for zero."""
    if value is None:
        return None
    if not math.isfinite(value):
        return 9999
    return round(100 * math.log10(abs(value))) if value else -9999


def _ratio(error: float | None, noise: float | None) -> float:
    if error is None or math.isnan(error):
        return math.inf
    return error / noise if noise else error


def _shorten(text: str, longest: int) -> str:
    """The beginning and the end of a long text: a traceback's last line says most."""
    if len(text) <= longest:
        return text
    half = max(longest // 2, 20)
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
