"""OneFlow 0.9.0 on 4 CPU ranks: what is known to be wrong is found, what is known to be right stays silent.

SBP_ONEFLOW_PYTHON names a Python 3.10 that has OneFlow (launch/quickstart-oneflow.sh makes one); without it the tests
are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.spawn import find_mpirun

PYTHON = os.environ.get("SBP_ONEFLOW_PYTHON", "")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not PYTHON,
        reason="SBP_ONEFLOW_PYTHON names no Python 3.10 with OneFlow (launch/quickstart-oneflow.sh)",
    ),
]
WRONG = {"wrong value", "wrong gradient", "wrong state", "lost write", "ranks disagree", "crash", "hang"}


def run(path: Path, suite: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """The verdicts by id, without the suite's name."""
    mpirun = find_mpirun()
    assert mpirun is not None
    command = [mpirun, "-n", "4", sys.executable, "-m", "sbp.run", "--subject", "oneflow"]
    command += [
        "--subject-python",
        PYTHON,
        "--suite",
        suite,
        "--known",
        "none",
        "--results",
        str(path),
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    records = map(json.loads, path.read_text().splitlines())
    return {
        record["id"].partition("/")[2]: record
        for record in records
        if record["kind"] == "verdict" and record.get("options", {}).get("mode") != "local"
    }


def test_in_place_writes(tmp_path: Path) -> None:
    cases = ("iadd:64x16:grad", "isub:8x4", "imul:8x4", "imul:64x16:grad", "clamp_:64x16:grad")
    found = run(tmp_path / "r.jsonl", "inplace", *cases, "--mesh", "4", "--level", "full", "-k", "not mode=")
    right = [record for trial, record in found.items() if trial.startswith(("iadd", "isub"))]
    assert len(right) >= 30
    assert {record["verdict"] for record in right} == {"pass"}
    # x B, y P: each replica of x gets another value.
    assert found["imul:8x4/4/other=P"]["verdict"] == "ranks disagree"
    # x S(0), y B: wrong, and memory past the end of x is written to.
    past_the_end = found["imul:64x16:grad/4/input=S(0)"]
    assert past_the_end["verdict"] in ("wrong value", "crash")
    if past_the_end["verdict"] == "wrong value":
        assert "neighbouring memory" in {finding["quantity"] for finding in past_the_end["findings"]}
    assert found["clamp_:64x16:grad/4/input=P"]["verdict"] == "wrong value"


def test_sources_of_partial_values_and_of_random_numbers(tmp_path: Path) -> None:
    cases = ("randperm(64)->P", "randperm(64)->B", "randperm(0)->P", "arange(12)->P", "functional.dropout")
    found = run(tmp_path / "r.jsonl", "sources", *cases, "two moves->B", "--mesh", "4")
    assert found["randperm(64)->P/4/all=B"]["verdict"] == "wrong value"
    assert found["arange(12)->P/4/all=B"]["verdict"] == "wrong value"
    assert found["randperm(64)->B/4/all=B"]["verdict"] == "pass"
    assert found["randperm(0)->P/4/all=B"]["verdict"] == "pass"
    assert found["functional.dropout/4/input=B/unseeded=True"]["verdict"] == "ranks disagree"
    swapped = [record["verdict"] for trial, record in found.items() if trial.startswith("two moves")]
    assert WRONG & set(swapped), swapped


def test_optimizers_do_not_step_a_partial_parameter(tmp_path: Path) -> None:
    found = run(
        tmp_path / "r.jsonl",
        "optimizers",
        "LayerNorm(8)",
        "--mesh",
        "4",
        "-k",
        "optimizer=SGD and not momentum",
    )
    assert found["LayerNorm(8)/4/bias=P/train/optimizer=SGD"]["verdict"] == "wrong state"
    assert found["LayerNorm(8)/4/all=B/train/optimizer=SGD"]["verdict"] in ("pass", "noise")


def test_every_redistribution_on_two_axes_is_right(tmp_path: Path) -> None:
    found = run(tmp_path / "r.jsonl", "redistribute", "--mesh", "2x2")
    assert len(found) > 200
    assert {record["verdict"] for record in found.values()} == {"pass"}
