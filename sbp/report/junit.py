"""JUnit XML, as CI systems read it. Used by the reports and by the lint. Needs only the standard library.

There is no one standard; what is written here keeps to the schema that Jenkins validates with (and so to what
GitLab, Azure and the GitHub actions for it read): counts on every suite, one outcome for each test case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

from sbp.report.results import Finding, Results, Verdict, group_failures

# Everything that XML 1.0 has no place for, not even as an escape.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# CI systems show attributes in a line and refuse very long bodies.
_LONGEST_MESSAGE = 1_000
_LONGEST_BODY = 60_000
_MOST_FAILURES = 20


@dataclass(frozen=True)
class JUnitCase:
    """One test case. ``outcome`` is empty for a pass, else ``failure``, ``error`` or ``skipped``."""

    classname: str
    name: str
    seconds: float = 0.0
    outcome: str = ""
    type: str = ""
    message: str = ""
    body: str = ""
    out: str = ""


@dataclass(frozen=True)
class JUnitSuite:
    """Test cases under a name, with facts about the run."""

    name: str
    cases: Sequence[JUnitCase]
    properties: Mapping[str, str] = field(default_factory=dict)
    timestamp: str = ""


def junit_xml(suites: Sequence[JUnitSuite]) -> str:
    """The document, with an XML declaration."""
    everything = [case for suite in suites for case in suite.cases]
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites{_counts(everything)}>"]
    for suite in suites:
        stamp = f" timestamp={_attribute(suite.timestamp)}" if suite.timestamp else ""
        lines.append(
            f"  <testsuite name={_attribute(suite.name)}{_counts(suite.cases, skipped=True)}{stamp}>"
        )
        if suite.properties:
            lines.append("    <properties>")
            lines += [
                f"      <property name={_attribute(name)} value={_attribute(value)}/>"
                for name, value in suite.properties.items()
            ]
            lines.append("    </properties>")
        lines += [_case(case) for case in suite.cases]
        lines.append("  </testsuite>")
    lines.append("</testsuites>")
    return "\n".join(lines) + "\n"


def _counts(cases: Sequence[JUnitCase], skipped: bool = False) -> str:
    def count(outcome: str) -> int:
        return sum(case.outcome == outcome for case in cases)

    seconds = sum(max(case.seconds, 0.0) for case in cases)
    words = f' tests="{len(cases)}" failures="{count("failure")}" errors="{count("error")}"'
    return words + (f' skipped="{count("skipped")}"' if skipped else "") + f' time="{seconds:.3f}"'


def _case(case: JUnitCase) -> str:
    head = f"    <testcase classname={_attribute(case.classname)} name={_attribute(case.name)}"
    head += f' time="{max(case.seconds, 0):.3f}"'
    inside = ""
    if case.outcome:
        message = f" message={_attribute(case.message[:_LONGEST_MESSAGE])}"
        kind = f" type={_attribute(case.type)}" if case.type else ""
        inside += f"\n      <{case.outcome}{kind}{message}>{_text(case.body)}</{case.outcome}>"
    if case.out:
        inside += f"\n      <system-out>{_text(case.out)}</system-out>"
    return f"{head}>{inside}\n    </testcase>" if inside else f"{head}/>"


def clean(text: str) -> str:
    """Text with what XML cannot hold replaced."""
    return _ILLEGAL.sub("\ufffd", text)


def _attribute(text: str) -> str:
    return quoteattr(clean(text), {"\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})


def _text(text: str) -> str:
    if len(text) > _LONGEST_BODY:
        text = text[:_LONGEST_BODY] + "\n... cut here"
    return escape(clean(text))


# ------------------------------------------------------------------------------------ from a results file


def results_to_junit(results: Results, stale: Sequence[str] = ()) -> str:
    """One test case for each case of the run, which fails with what was found; and one for the run itself.

    ``stale``: lines about known failures that pass or match nothing; each is a failure of the run's own case.
    """
    by_suite: dict[str, dict[str, list[Verdict]]] = {}
    for verdict in results.verdicts:
        by_suite.setdefault(_suite_name(verdict), {}).setdefault(verdict.case, []).append(verdict)
    properties = {f"version.{name}": version for name, version in results.run.versions.items()}
    properties["command"] = results.run.command
    stamp = results.run.started.removesuffix("Z")
    suites = [
        JUnitSuite(
            name,
            [_case_of(name, case, verdicts) for case, verdicts in cases.items()],
            properties,
            stamp if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", stamp) else "",
        )
        for name, cases in by_suite.items()
    ]
    suites.append(JUnitSuite("sbp.run", list(_cases_of_the_run(results, stale))))
    return junit_xml(suites)


def _suite_name(verdict: Verdict) -> str:
    parts = ["sbp", verdict.suite or "suite", verdict.subject]
    return ".".join(part for part in parts if part)


def _cases_of_the_run(results: Results, stale: Sequence[str]) -> Iterable[JUnitCase]:
    if results.complete:
        yield JUnitCase("sbp.run", "the run is complete")
    else:
        message = "; ".join(results.problems)
        yield JUnitCase("sbp.run", "the run is complete", 0.0, "error", "incomplete", message, message)
    if stale:
        body = "\n".join(stale)
        name = "every known failure still fails"
        yield JUnitCase("sbp.run", name, 0.0, "failure", "known failures", f"{len(stale)} do not", body)


def _case_of(suite: str, case: str, verdicts: Sequence[Verdict]) -> JUnitCase:
    seconds = sum(verdict.seconds for verdict in verdicts)
    unexpected = [verdict for verdict in verdicts if verdict.unexpected]
    known = [verdict for verdict in verdicts if verdict.failed and not verdict.unexpected]
    out = "\n".join(f"known {verdict.verdict}: {verdict.id}: {verdict.known}" for verdict in known)
    if unexpected:
        groups = group_failures(unexpected)
        worst = groups[0][0]
        # A failure is a wrong answer; an error is no answer. CI systems count them apart.
        no_answer = all(verdict.verdict in ("error", "hang", "crash") for verdict in unexpected)
        message = f"{len(unexpected)} of {len(verdicts)} trials: {headline(worst)}"
        return JUnitCase(
            suite,
            case,
            seconds,
            "error" if no_answer else "failure",
            worst.verdict,
            message,
            "\n\n".join(_describe(one, len(members)) for one, members in groups[:_MOST_FAILURES]),
            out,
        )
    refused = [verdict for verdict in verdicts if verdict.verdict == "refused"]
    if len(refused) == len(verdicts):
        first = refused[0].findings[0].relation if refused[0].findings else "the subject says so"
        return JUnitCase(suite, case, seconds, "skipped", "refused", f"all trials refused: {first}", "", out)
    return JUnitCase(suite, case, seconds, out=out)


def headline(verdict: Verdict) -> str:
    """The verdict and its first finding in a line."""
    if not verdict.findings:
        return verdict.verdict
    first = verdict.findings[0]
    return f"{verdict.verdict}: {first.quantity + ': ' if first.quantity else ''}{first.relation}"


def _describe(verdict: Verdict, count: int) -> str:
    lines = [f"{verdict.verdict}: {verdict.id}"]
    lines += [f"  {describe_finding(finding)}" for finding in verdict.findings]
    if verdict.origin and verdict.origin.file:
        place = f"{verdict.origin.file}:{verdict.origin.line}"
        lines.append(f"  at {place} {verdict.origin.module} {verdict.origin.operator}".rstrip())
    if verdict.error and verdict.error.traceback:
        lines.append(verdict.error.traceback.rstrip())
    if verdict.flaky:
        lines.append("  flaky: it passed when it was tried again alone")
    if count > 1:
        lines.append(f"  the same in {count - 1} more trials")
    if verdict.command:
        lines.append(f"  run it alone: {verdict.command}")
    if verdict.repro:
        lines.append(f"  repro: {verdict.repro}")
    return "\n".join(lines)


def describe_finding(finding: Finding) -> str:
    """One finding in a line: the quantity, how it differs, the claimed placement, by how much."""
    words = f"{finding.quantity}: {finding.relation}" if finding.quantity else finding.relation
    if finding.claimed is not None:
        words += f"; claimed {finding.claimed}"
    if finding.expected is not None:
        words += f", due {finding.expected}"
    if finding.relative_error:
        words += f" (relative error {finding.relative_error:.2g})"
    return words
