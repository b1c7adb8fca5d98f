"""The watch on four real ranks: what it finds, and that it holds nobody up. One job runs all scenarios."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """Scenario -> what each rank returned; see on_ranks.py."""
    command = [sys.executable, str(Path(__file__).with_name("on_ranks.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, list[Any]] = json.loads(done.stdout)
    return results


def same_on_all(results: list[Any]) -> Any:
    assert all(one == results[0] for one in results), results
    return results[0]


def test_known_faults_are_found_on_every_rank(found: dict[str, list[Any]]) -> None:
    told = same_on_all(found["known_cases"])
    outcomes = {source: (outcome, compared) for source, outcome, compared, _ in told}
    assert outcomes == {
        "x.fill_(3)": ("wrong value", True),
        "nn.functional.hardswish(x, inplace=True)": ("changed placement", False),
        "x[:2].zero_()": ("lost", False),
        "x.select(0, 3).zero_()": ("lost", False),
        "x.scatter_add_(0, index, place(mesh, S0))": ("changed placement", False),
        "x += 1": ("refused", False),
        "x.data = place(mesh, B)": ("lost", False),
        "x += place(mesh, P)": ("safe", True),
        "x *= place(mesh, B)": ("safe", True),
        "x.add_(place(mesh, S1))": ("safe", True),
        "torch._foreach_mul_([x, place(mesh, B)], 2.0)": ("safe", True),
    }


def test_a_mesh_of_two_axes_and_a_part_of_it(found: dict[str, list[Any]]) -> None:
    told = same_on_all(found["two_axes"])
    assert {source: (outcome, compared) for source, outcome, compared, _ in told} == {
        "x += place_full(grid, [P, P], full)": ("safe", True),
        "x.fill_(3)": ("wrong value", True),
        "row.fill_(3)": ("wrong value", True),
        'row += place_full(grid["tp"], [P], full)': ("safe", True),
    }


def test_a_rank_that_writes_alone_is_not_held_up_for_ever(found: dict[str, list[Any]]) -> None:
    results = found["one_rank_writes"]
    assert all("only some ranks" in message for _, _, _, message in results[0]["told"])
    assert len(results[0]["told"]) == 2
    assert [one["told"] for one in results[1:]] == [[], [], []]
    assert len({one["total"] for one in results}) == 1
    assert max(one["seconds"] for one in results) < 20


def test_ranks_that_write_in_different_order(found: dict[str, list[Any]]) -> None:
    told = same_on_all(found["another_order"])["told"]
    assert [source for source, *_ in told] == ["x.zero_()", "y.mul_(2)"]
    assert any("only some ranks" in message for *_, message in told)


def test_a_rank_that_comes_late(found: dict[str, list[Any]]) -> None:
    told = same_on_all(found["one_rank_comes_late"])
    assert [outcome for _, outcome, _, _ in told] == ["safe", "safe"]
    assert [message for source, _, _, message in told if source == "x.zero_()"] == [
        "not compared: only some ranks came to this write"
    ]


def test_an_error_on_one_rank_reaches_its_program_and_holds_up_nobody(found: dict[str, list[Any]]) -> None:
    results = found["one_rank_raises"]
    assert [one["raised"] for one in results] == ["", "RuntimeError", "", ""]
    assert [one["told"][0][1] for one in results] == ["safe", "error", "safe", "safe"]
    assert all(one["told"][1] == ["x.add_(1)", "safe", True, ""] for one in results)


def test_training_is_the_same_to_the_last_bit(found: dict[str, list[Any]]) -> None:
    for one in found["training"]:
        assert one["plain"] == one["watched"]
        assert set(one["outcomes"]) == {"safe"}
        assert one["modules"] == ["0", "0.activate", "1", "1.activate"]
        assert one["compared"]
