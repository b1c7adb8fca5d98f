"""Colour: on a terminal, and not where NO_COLOR asks for none."""

from __future__ import annotations

import io
import re

import pytest

from sbp.session import Verdict
from sbp.terminal import make_console, print_failures
from sbp.trial import Trial
from sbp.verdict.judge import Finding


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(terminal: bool) -> str:
    trial = Trial("modules", "Linear(8,12):4x8", "4", {"input": "S(0)"})
    finding = Finding("wrong value", "output", 0, (0,), "S(0)", 1.0, 0.5, "2 x the reference")
    file = Terminal() if terminal else io.StringIO()
    print_failures(
        make_console(file), [Verdict(trial, "wrong value", [finding])], lambda trial: "sbp.run", "Failures"
    )
    return file.getvalue()


COLOUR = re.compile(r"\x1b\[(?:\d+;)*[34]\d[;m]")


def test_colour_on_a_terminal_and_none_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert COLOUR.search(printed(terminal=True))
    assert "\x1b" not in printed(terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(terminal=True)
    assert "wrong value" in text and not COLOUR.search(text)
