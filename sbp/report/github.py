"""GitHub Actions: annotations beside the code, and the job's summary page. Used by the reports and by the lint.

A step shows at most 10 annotations of a kind, and a summary may have 1 MiB; both are kept to here, with a line that
says what was left out. Everything that comes from a result is escaped, so that no text of a case can end an
annotation and give the runner a command.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sbp.escape import printable
from sbp.report.junit import describe_finding, headline
from sbp.report.results import Results, group_failures

MOST_OF_A_KIND = 10
MOST_SUMMARY_BYTES = 1024 * 1024
_LEVELS = ("error", "warning", "notice")


@dataclass(frozen=True)
class Annotation:
    """A message of level error, warning or notice; with a place, where there is one. Lines count from 1."""

    level: str
    message: str
    title: str = ""
    path: str = ""
    line: int | None = None
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None


def workflow_command(annotation: Annotation) -> str:
    """The line on stdout that makes the annotation."""
    if annotation.level not in _LEVELS:
        raise ValueError(f"{annotation.level!r} is no level of annotation")
    fields = {
        "file": annotation.path,
        "line": annotation.line,
        "endLine": annotation.end_line,
        "col": annotation.column,
        "endColumn": annotation.end_column,
        "title": annotation.title,
    }
    given = [f"{name}={_property(str(value))}" for name, value in fields.items() if value not in ("", None)]
    return f"::{annotation.level}{' ' if given else ''}{','.join(given)}::{_data(annotation.message)}"


def annotate(annotations: Sequence[Annotation], most: int = MOST_OF_A_KIND) -> list[str]:
    """The workflow commands for as many annotations as a step shows; the last of a kind says how many are left."""
    lines = []
    for level in _LEVELS:
        of_kind = [annotation for annotation in annotations if annotation.level == level]
        if len(of_kind) > most:
            left = len(of_kind) - (most - 1)
            of_kind = [*of_kind[: most - 1], Annotation(level, f"and {left} more; see the job's summary")]
        lines += [workflow_command(annotation) for annotation in of_kind]
    return lines


def _data(text: str) -> str:
    # The runner shows its log with colours, so what would steer a terminal is made visible first.
    return printable(text).replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def write_summary(text: str, path: str | Path | None = None) -> bool:
    """Append Markdown to the job's summary; False outside of GitHub Actions.

    ``text`` is cut, at a line, where the summary would grow over GitHub's limit. Raises OSError.
    """
    target = path or os.environ.get("GITHUB_STEP_SUMMARY")
    if not target:
        return False
    target = Path(target)
    room = MOST_SUMMARY_BYTES - (target.stat().st_size if target.exists() else 0)
    with target.open("a", encoding="utf-8") as file:
        file.write(fit(text, room))
    return True


def fit(text: str, room: int) -> str:
    """The text, cut at the end of a line where it has more than ``room`` bytes in UTF-8."""
    raw = text.encode("utf-8")
    if len(raw) < room:
        return text
    end = "\n\n*The rest was cut: a summary may have 1 MiB.*\n"
    kept = raw[: max(room - len(end) - 1, 0)]
    return kept[: kept.rfind(b"\n") + 1].decode("utf-8") + end if kept else ""


# ------------------------------------------------------------------------------------ from a results file


def annotations_of(results: Results, stale: Sequence[str] = (), strict: bool = False) -> list[Annotation]:
    """One annotation for each distinct unexpected failure, the incomplete run first."""
    found = [Annotation("error", problem, "sbp: incomplete run") for problem in results.problems]
    for worst, members in group_failures(results.unexpected):
        lines = [worst.id, *(describe_finding(finding) for finding in worst.findings[:4])]
        if len(members) > 1:
            lines.append(f"the same in {len(members) - 1} more trials")
        if worst.command:
            lines.append(worst.command)
        title = f"sbp: {worst.short_name}: {headline(worst)}"[:200]
        origin = worst.origin
        path, line = (origin.file, origin.line) if origin and origin.file else ("", None)
        found.append(Annotation("error", "\n".join(lines), title, path, line))
    for item in results.inplace:
        if item.is_fault and item.file:
            words = f"{item.source or item.operator}: {item.outcome} {item.placements}".rstrip()
            found.append(Annotation("warning", words, "sbp: in-place operation", item.file, item.line))
    level = "error" if strict else "warning"
    return found + [Annotation(level, line, "sbp: known failures") for line in stale]
