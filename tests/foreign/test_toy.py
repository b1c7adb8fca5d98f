"""A subject of somebody's own through the real command: the protocol of docs/add-a-subject.md, from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.spawn import find_mpirun
from sbp.foreign import find

HERE = Path(__file__).parent


def run(*arguments: str, ranks: int = 4) -> subprocess.CompletedProcess[str]:
    mpirun = find_mpirun()
    assert mpirun is not None
    command = [mpirun, "-n", str(ranks), sys.executable, "-m", "sbp.run", *arguments, "--known", "none"]
    paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def verdicts(path: Path) -> dict[str, dict[str, Any]]:
    records = map(json.loads, path.read_text().splitlines())
    return {record["id"]: record for record in records if record["kind"] == "verdict"}


@pytest.mark.distributed
def test_a_correct_toy_is_right_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "toy.jsonl"
    ended = run(
        "--subject", "toy:ToySubject", "add_:8x4", "add_:6x5", "--suite", "inplace", "--results", str(file)
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = verdicts(file)
    on_one_axis = [record for record in found.values() if record["mesh"] == "4"]
    assert len(on_one_axis) > 20
    assert {record["verdict"] for record in on_one_axis} == {"pass"}
    assert {record["verdict"] for record in found.values() if record["mesh"] == "2x2"} == {"refused"}


@pytest.mark.distributed
def test_a_careless_toy_is_found_out_exactly_where_it_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "toy.jsonl"
    choice = ("add_:8x4", "--suite", "inplace", "--mesh", "4", "--results", str(file))
    ended = run("--subject", "toy:CarelessSubject", *choice)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    for record in verdicts(file).values():
        placed = record["placements"]
        same = placed.get("input", "B") == placed.get("other", "B")
        assert (record["verdict"] == "pass") == same, record


@pytest.mark.parametrize("name", ["toy", "toy:", ":Toy", "toy.Toy", "a b:C", "oneflow:"])
def test_names_that_name_no_subject(name: str) -> None:
    assert find(name) is None


@pytest.mark.distributed
def test_a_subject_that_is_not_there_is_one_line() -> None:
    ended = run("--subject", "no_such_module:Subject", "--suite", "inplace", ranks=1)
    assert ended.returncode == 2
    assert "no_such_module does not start there: ModuleNotFoundError" in ended.stderr
    assert "Traceback" not in ended.stderr
