"""Several worlds of ranks in one run: together they find what one world finds, and one line says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.spawn import find_mpirun

pytestmark = pytest.mark.distributed


def run(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    mpirun = find_mpirun()
    assert mpirun is not None
    command = [mpirun, "-n", str(ranks), sys.executable, "-m", "sbp.run", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def found(path: Path) -> dict[str, tuple[str, str | None]]:
    verdicts = [record for record in records(path) if record["kind"] == "verdict"]
    ids = [record["id"] for record in verdicts]
    assert len(ids) == len(set(ids)), "no trial twice"
    return {record["id"]: (record["verdict"], record["known"]) for record in verdicts}


SELECTION = ("MSELoss", "GLU", "--suite", "modules", "--mesh", "2")


def test_two_worlds_find_what_one_world_finds(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    alone = run(2, *SELECTION, "--results", str(one))
    shared = run(4, *SELECTION, "--ranks-per-world", "2", "--results", str(two))
    assert (alone.returncode, shared.returncode) == (0, 0), alone.stdout + shared.stdout + shared.stderr
    assert found(one) == found(two)
    assert any(verdict == "wrong gradient" for verdict, _ in found(two).values())
    first, *_, last = records(two)
    assert first["world"]["size"] == 2 and first["world"]["worlds"] == 2
    assert last["kind"] == "summary" and last["complete"]
    assert last["planned"] == last["verdicts"] == len(found(two))
    assert last["worlds"] >= 2, "both worlds ran trials"


def test_a_resumed_run_leaves_out_what_is_done_in_every_world(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    words = (*SELECTION, "--ranks-per-world", "2")
    assert run(4, *words, "--results", str(path)).returncode == 0
    whole = found(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    assert run(4, *words, "--resume", str(path)).returncode == 0
    assert found(path) == whole


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["NoSuchModule"], "sbp.run: no case is called 'NoSuchModule'"),
        (["--ranks-per-world", "3"], "launch: 4 ranks do not make whole worlds of 3; use mpirun -n 3"),
        (["--ranks-per-world", "0"], "sbp.run: --ranks-per-world 0: a world has at least one rank"),
        (["--known", "/nowhere.toml"], "sbp.run: cannot read known failures"),
        (["--mesh", "3"], "sbp.run: mesh 3 has 3 ranks, but 2 are running"),
    ],
)
def test_bad_input_is_one_line_whatever_the_number_of_worlds(words: list[str], line: str) -> None:
    result = run(4, "--ranks-per-world", "2", *words)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(line)


def test_a_budget_ends_all_worlds_in_order(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    result = run(4, "--suite", "modules", "--ranks-per-world", "2", "--budget", "8s", "--results", str(path))
    assert result.returncode in (0, 1), result.stderr
    last = records(path)[-1]
    assert last["kind"] == "summary" and last["complete"], result.stdout
    assert last["planned"] == last["verdicts"] == len(found(path))
    assert "budget" in last["stopped"]
