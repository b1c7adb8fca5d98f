"""Writing, reading and comparing tables of signatures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sbp.signatures_cli import main
from sbp.signatures_table import TableError, judge_operators, read_table, write_table


def die(name: str) -> dict[str, object]:
    if name == "bad":
        import os

        os._exit(7)
    return {"calls": [], "left out": []}


def test_an_operator_that_kills_the_interpreter_costs_only_itself() -> None:
    entries = dict(judge_operators(["good", "bad", "other"], 1, judge=die))
    assert entries["bad"] == {"error": "the interpreter died (exit code 7)"}
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
