"""Writing, reading and comparing tables of signatures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sbp.signatures_cli import main
from sbp.signatures_table import TableError, judge_operators, read_table, write_table

Parts = Iterator[dict[str, Any]]


def die(name: str, start: int) -> Parts:
    """Five calls; of the operator "bad" the second and the fourth one end the interpreter."""
    for kind in range(start, 5):
        yield {"next": f"{name}({kind})"}
        if name == "worse" or (name == "bad" and kind in (1, 3)):
            os._exit(7)
        yield {"calls": [{"call": f"{name}({kind})", "signatures": []}]}


def test_a_call_that_kills_the_interpreter_costs_only_itself() -> None:
    entries = dict(judge_operators(["good", "bad", "worse", "other"], 1, judge=die))
    assert [call["call"] for call in entries["bad"]["calls"]] == ["bad(0)", "bad(2)", "bad(4)"]
    died = "the interpreter died (exit code 7)"
    assert entries["bad"]["left out"] == [["bad(1)", died], ["bad(3)", died]]
    assert entries["worse"] == {"error": died}
    assert len(entries["good"]["calls"]) == len(entries["other"]["calls"]) == 5


def die_at_once(name: str, start: int) -> Parts:
    if name == "bad":
        os._exit(7)
    yield {"dtype": "float64"}


def test_an_operator_that_kills_the_interpreter_before_any_call() -> None:
    entries = dict(judge_operators(["good", "bad", "other"], 1, judge=die_at_once))
    assert entries["bad"] == {"error": "the interpreter died (exit code 7)"}
    assert "error" not in entries["good"] and "error" not in entries["other"]


def compute_or_wait(name: str, start: int) -> Parts:
    yield {"next": "first"}
    yield {"calls": [{"call": "first", "signatures": []}] if name == "computes" else []}
    yield {"next": "second"}
    while name == "computes":
        sum(range(1000))
    if name == "waits":
        time.sleep(600)


def test_an_operator_that_does_not_end_costs_what_is_left_of_it() -> None:
    names = ["good", "computes", "waits", "other"]
    entries = dict(judge_operators(names, 2, seconds=0.2, judge=compute_or_wait))
    assert [call["call"] for call in entries["computes"]["calls"]] == ["first"]
    assert entries["computes"]["left out"] == [["all other calls", "not done within 0.2 s of CPU time"]]
    assert entries["waits"] == {"error": "not done within 2 s"}
    assert "error" not in entries["good"] and "error" not in entries["other"]


def test_a_written_table_is_read_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json.gz", tmp_path / "new.json"
    assert main(["t", "--output", str(old), "--processes", "1"]) == 0
    table = read_table(old)
    assert main(["--diff", str(old), str(old)]) == 0
    assert "no difference" in capsys.readouterr().out
    call = table["operators"]["t"]["calls"][-1]
    dropped = call["signatures"].pop()
    write_table(new, table["operators"], table["torch"])
    assert main(["--diff", str(old), str(new)]) == 1
    assert f"-> {dropped[2]}" in capsys.readouterr().out


def test_json_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["t", "--json", "--processes", "1"]) == 0
    calls = json.loads(capsys.readouterr().out)["operators"]["t"]["calls"]
    assert any([["S(0)"], 0, "S(1)", []] in call["signatures"] for call in calls)


def test_what_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1")
    with pytest.raises(TableError, match="not a table"):
        read_table(tmp_path / "x.json")
