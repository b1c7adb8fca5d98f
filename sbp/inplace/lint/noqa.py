"""``# noqa`` comments, with flake8's meaning: bare ones silence everything, codes silence what starts with them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sbp.inplace.lint.findings import UNREADABLE, Finding

INLINE = re.compile(r"#\s*noqa(?P<codes>\s*:\s*[A-Z][0-9A-Z]*(?:[,\s]+[A-Z]+[0-9]+)*)?", re.IGNORECASE)
WHOLE_FILE = re.compile(
    r"^\s*#\s*(?:flake8|ruff)\s*[:=]\s*noqa(?P<codes>\s*:\s*[A-Z][0-9A-Z]*(?:[,\s]+[A-Z]+[0-9]+)*)?\s*$",
    re.IGNORECASE | re.MULTILINE,
)
CODE = re.compile(r"[A-Z]+[0-9]*", re.IGNORECASE)


def silences(match: re.Match[str], code: str) -> bool:
    """Whether a comment silences a code."""
    codes = match["codes"]
    if codes is None:
        return True
    return any(code.startswith(given.upper()) for given in CODE.findall(codes))


def without_noqa(findings: Sequence[Finding], text: str, lines: Sequence[str]) -> list[Finding]:
    """The findings that no comment silences. A comment counts on any line of the statement that was found."""
    if "noqa" not in text.lower():
        return list(findings)
    whole = list(WHOLE_FILE.finditer(text))
    kept = []
    for finding in findings:
        if finding.code != UNREADABLE:
            if any(silences(match, finding.code) for match in whole):
                continue
            span = lines[finding.line - 1 : max(finding.end_line, finding.line)]
            comments = (match for line in span for match in INLINE.finditer(line))
            if any(silences(match, finding.code) for match in comments):
                continue
        kept.append(finding)
    return kept
