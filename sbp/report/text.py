"""A run in a few plain lines, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence

from sbp.escape import printable
from sbp.report.junit import describe_finding
from sbp.report.results import Results, group_failures


def results_to_text(results: Results, stale: Sequence[str] = (), limit: int = 40) -> str:
    """Counts, each distinct unexpected failure once with its command, and what is incomplete."""
    lines: list[str] = []
    groups = group_failures(results.unexpected)
    for one, members in groups[:limit]:
        lines.append(f"{one.verdict}  {one.id}")
        lines += [f"  {describe_finding(finding)}" for finding in one.findings[:4]]
        if len(one.findings) > 4:
            lines.append(f"  and {len(one.findings) - 4} more quantities")
        if len(members) > 1:
            lines.append(f"  the same in {len(members) - 1} more trials")
        if one.command:
            lines.append(f"  {one.command}")
        lines.append("")
    if len(groups) > limit:
        lines += [f"and {len(groups) - limit} more distinct failures", ""]
    lines += [f"known failures: {line}" for line in stale]
    counts = ", ".join(f"{count} {word}" for word, count in results.counts.items()) or "none"
    lines.append(f"{len(results.verdicts)} verdicts in {results.seconds:.1f} s: {counts}")
    if results.known:
        lines.append(f"{len(results.known)} known failures, as expected")
    lines.append(f"{len(results.unexpected)} unexpected" if results.unexpected else "no unexpected failure")
    lines += [f"incomplete: {problem}" for problem in results.problems]
    return printable("\n".join(lines))
