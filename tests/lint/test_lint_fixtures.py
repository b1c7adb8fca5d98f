"""The flow analysis on fixture files, whose comments say which findings are expected: no more, no fewer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sbp.inplace.lint.analyse import lint_source
from sbp.inplace.lint.rules import RULES, explain

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.py"))
EXPECTED = re.compile(r"#\s*expect:\s*(SBP\d+) (certain|likely)")


def expected(text: str) -> list[tuple[int, str, str]]:
    return [
        (number, match[1], match[2])
        for number, line in enumerate(text.split("\n"), 1)
        for match in EXPECTED.finditer(line)
    ]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
@pytest.mark.parametrize("thorough", [False, True], ids=["fast", "thorough"])
def test_findings_are_those_that_the_comments_say(path: Path, thorough: bool) -> None:
    text = path.read_text(encoding="utf-8")
    found = [(f.line, f.code, f.level) for f in lint_source(text, path.name, thorough=thorough)]
    assert sorted(found) == expected(text)


def test_there_is_something_to_expect() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FIXTURES]
    assert len(FIXTURES) >= 5 and sum(len(expected(text)) for text in texts) > 100


@pytest.mark.parametrize("code", [code for code in RULES if code != "SBP100"])
def test_each_rule_finds_its_bad_example_and_not_its_good_one(code: str) -> None:
    rule = RULES[code]
    assert [finding.code for finding in lint_source(rule.bad)] == [code]
    assert lint_source(rule.good) == []
    compile(rule.bad, "bad", "exec")
    compile(rule.good, "good", "exec")
    printed = explain(code)
    for line in (rule.bad + rule.good).split("\n"):
        assert line in printed
