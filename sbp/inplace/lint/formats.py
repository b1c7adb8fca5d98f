"""The output formats: text for people, GitHub annotations, SARIF, JUnit and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

from sbp._version import __version__
from sbp.escape import printable
from sbp.inplace.lint.files import FileReport
from sbp.inplace.lint.findings import Finding
from sbp.inplace.lint.rules import RULES


def headline(finding: Finding) -> str:
    """``SBP101 message``, with the other lines that belong to it."""
    text = f"{finding.code} {finding.message}"
    if finding.related:
        lines = ", ".join(str(other.line) for other in finding.related)
        text += f"; {finding.related[0].text}: line {lines}"
    return text


def as_text(reports: Sequence[FileReport]) -> str:
    """One block for each finding: the place and message, the source line, a caret under what writes."""
    blocks = []
    for report in reports:
        for finding in report.findings:
            blocks.append(f"{finding.path}:{finding.line}:{finding.column + 1}: {headline(finding)}")
            source = report.lines.get(finding.line)
            if source is not None:
                blocks.extend(excerpt(finding, source))
    return printable("\n".join([*blocks, summary(reports)]))


def excerpt(finding: Finding, source: str) -> list[str]:
    """The source line and the caret, indented as the line is, tabs kept so that the caret stands right."""
    end = finding.end_column if finding.end_line == finding.line else len(source)
    width = max(1, min(end, len(source.rstrip())) - finding.column)
    lead = "".join("\t" if character == "\t" else " " for character in source[: finding.column])
    return [f"    {source.rstrip()}", f"    {lead}{'^' * width}"]


def summary(reports: Sequence[FileReport]) -> str:
    """The last line: how many findings, how sure, in how many files."""
    findings = [finding for report in reports for finding in report.findings]
    files = plural(len(reports), "file")
    if not findings:
        return f"{files} linted, nothing found"
    levels = Counter(finding.level or "unreadable" for finding in findings)
    kinds = ", ".join(
        f"{levels[name]} {name}" for name in ("certain", "likely", "unreadable") if levels[name]
    )
    return f"{files} linted, {plural(len(findings), 'finding')}: {kinds}"


def plural(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def as_github(reports: Sequence[FileReport]) -> str:
    """Workflow commands that GitHub shows as annotations: errors for ``certain``, warnings for ``likely``."""
    from sbp.report.github import Annotation, workflow_command

    return "\n".join(
        workflow_command(
            Annotation(
                severity(finding),
                headline(finding),
                f"{finding.code} {RULES[finding.code].name}",
                finding.path,
                finding.line,
                finding.column + 1,
                finding.end_line,
                finding.end_column + 1,
            )
        )
        for report in reports
        for finding in report.findings
    )


def severity(finding: Finding) -> str:
    """How grave it is, in the words of GitHub and SARIF."""
    return "warning" if finding.level == "likely" else "error"


def as_json(reports: Sequence[FileReport]) -> str:
    """All findings, with everything that is known of them. Lines and columns count from 1; the end is exclusive."""
    findings = [
        {
            "path": finding.path,
            "line": finding.line,
            "column": finding.column + 1,
            "end_line": finding.end_line,
            "end_column": finding.end_column + 1,
            "code": finding.code,
            "level": finding.level or None,
            "message": finding.message,
            "source": report.lines.get(finding.line),
            "fix": None if finding.kept or not finding.level else "available",
            "no_fix_because": finding.kept or None,
            "related_lines": [other.line for other in finding.related],
        }
        for report in reports
        for finding in report.findings
    ]
    return json.dumps({"version": 1, "files": len(reports), "findings": findings}, indent=2)


def as_sarif(reports: Sequence[FileReport]) -> str:
    """A SARIF 2.1.0 log."""
    from sbp.report.sarif import Place, Result, Rule, sarif_log

    rules = [
        Rule(
            rule.code,
            "".join(word.capitalize() for word in rule.name.split("-")),
            rule.summary,
            f"{rule.why}\n\n{rule.instead}",
        )
        for rule in RULES.values()
    ]
    results = [
        Result(
            finding.code,
            finding.message,
            Place(finding.path, finding.line, finding.column + 1, finding.end_line, finding.end_column + 1),
            severity(finding),
            [(Place(finding.path, other.line), other.text) for other in finding.related],
            {"certainty": finding.level or "unreadable"},
            report.lines.get(finding.line, ""),
        )
        for report in reports
        for finding in report.findings
    ]
    return json.dumps(sarif_log(__version__, rules, results, category="sbp/lint"), indent=2)


def as_junit(reports: Sequence[FileReport]) -> str:
    """One test case for each file; its failure lists the findings."""
    from sbp.report.junit import JUnitCase, JUnitSuite, junit_xml

    cases = []
    for report in reports:
        if not report.findings:
            cases.append(JUnitCase("sbp.lint", report.path))
            continue
        body = "\n".join(
            f"{finding.path}:{finding.line}:{finding.column + 1}: {headline(finding)}"
            for finding in report.findings
        )
        message = plural(len(report.findings), "finding")
        kinds = ", ".join(sorted({finding.code for finding in report.findings}))
        cases.append(JUnitCase("sbp.lint", report.path, 0.0, "failure", kinds, message, body))
    return junit_xml([JUnitSuite("sbp.lint", cases)]).rstrip("\n")


FORMATS: dict[str, Callable[[Sequence[FileReport]], str]] = {
    "text": as_text,
    "github": as_github,
    "sarif": as_sarif,
    "junit": as_junit,
    "json": as_json,
}
