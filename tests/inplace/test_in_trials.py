"""The watch in the trials of a run: what reaches the results file and the terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.spawn import find_mpirun
from sbp.inplace.in_trials import identity, join
from sbp.report import results
from sbp.report.sarif import results_to_sarif
from sbp.terminal import make_console, print_writes

CASE = """\
import torch
from torch import nn

import sbp


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, states):
        hidden = self.project(states)
        hidden += 1.5
        hidden[:2].zero_()
        return hidden


@sbp.case
def gate():
    return Gate(), torch.randn(8, 8)
"""


def write(**changed: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "kind": "inplace",
        "file": "/src/model.py",
        "line": 3,
        "source": "x += y",
        "module": "layers.0",
        "operator": "aten.add_.Tensor",
        "placements": "self: S(0), other: B",
        "outcome": "safe",
        "message": "",
        "family": "",
        "count": 1,
    }
    return {**record, **changed}


def test_a_write_is_told_once_and_as_the_first_rank_has_it() -> None:
    told = join([[write(count=2)], [write(), write(outcome="lost")], []], "modules/x")
    assert [(one["outcome"], one["count"], one["trial"]) for one in told] == [
        ("safe", 2, "modules/x"),
        ("lost", 1, "modules/x"),
    ]


@pytest.mark.parametrize(
    "change",
    [{"line": 4}, {"module": "layers.1"}, {"placements": "self: B"}, {"operator": "aten.mul_.Tensor"}],
)
def test_another_place_or_placement_is_another_write(change: dict[str, Any]) -> None:
    assert identity(write(**change)) != identity(write())
    assert identity(write(count=7, trial="y")) == identity(write())


def test_the_terminal_names_the_lines_that_went_wrong() -> None:
    out = io.StringIO()
    faults = [
        write(line=7, outcome="lost", message="a copy", trial="modules/x", placements=place)
        for place in ("self: S(0)", "self: S(1)")
    ]
    print_writes(make_console(out), [write(trial="modules/x"), *faults])
    text = out.getvalue()
    assert "/src/model.py:7, in module layers.0" in text
    assert "lost: x += y" in text
    assert "under 1 more placements" in text
    assert "model.py:3" not in text
    assert "at 2 lines: 1 safe, 2 lost" in text


def test_nothing_is_printed_where_nothing_was_written() -> None:
    out = io.StringIO()
    print_writes(make_console(out), [])
    assert out.getvalue() == ""


@pytest.mark.distributed
def test_every_run_tells_the_writes_of_the_cases(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASE)
    command = [str(find_mpirun()), "-n", "2", sys.executable, "-m", "sbp.run", "cases.py", "--mesh", "2"]
    only = ["-k", "states=S(0) and not grad_output"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*more: str) -> tuple[str, list[dict[str, Any]]]:
        ran = subprocess.run(
            [*command, *only, *more, "--results", "results.jsonl"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 1, ran.stderr
        lines = (tmp_path / "results.jsonl").read_text().splitlines()
        return ran.stdout, [one for one in map(json.loads, lines) if one["kind"] == "inplace"]

    text, written = run()
    places = {(Path(one["file"]).name, one["line"], one["outcome"]) for one in written}
    assert {("cases.py", 14, "safe"), ("cases.py", 15, "lost")} <= places
    # The trial failed, so the writes were compared with their out-of-place forms as well.
    assert all(one["compared"] for one in written if one["line"] == 14)
    assert len({identity(one) for one in written}) == len(written)
    assert "cases.py:15, in module Gate" in text
    assert "lost: hidden[:2].zero_()" in text
    found = results.read(tmp_path / "results.jsonl")
    sarif = results_to_sarif(found, "0", tmp_path)
    assert {
        (one["ruleId"], one["locations"][0]["physicalLocation"]["region"]["startLine"])
        for one in sarif["runs"][0]["results"]
        if one["ruleId"].startswith("inplace")
    } == {("inplace-lost", 15)}
    text, written = run("--no-watch")
    assert written == []
    assert "In-place" not in text
