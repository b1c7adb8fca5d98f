"""Real mpirun jobs whose workers are made to fail: the others go on, and nothing stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.spawn import find_mpirun

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("misbehaving.py")
WELL = {"how": "nothing"}


class Run:
    """One job: the replies to each request, and what it cost."""

    def __init__(self, result: subprocess.CompletedProcess[str]) -> None:
        self.code = result.returncode
        self.errors = result.stderr
        self.lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]

    def statuses(self, number: int) -> list[str]:
        return [reply["status"] for reply in self.lines[number]["replies"]]

    def reply(self, number: int, rank: int) -> dict[str, Any]:
        reply: dict[str, Any] = self.lines[number]["replies"][rank]
        return reply


def run(requests: list[dict[str, Any]], output: Path, timeout: float = 4.0, ranks: int = 4) -> Run:
    mpirun = find_mpirun()
    assert mpirun is not None
    command = [mpirun, "-n", str(ranks), sys.executable, str(SCRIPT)]
    result = subprocess.run(
        [*command, json.dumps(requests), str(timeout), str(output)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return Run(result)


def processes_in(output: Path) -> list[str]:
    """Command lines of processes that have a file in ``output`` open as their standard output."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(output) in os.readlink(entry / "fd" / "1"):
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_all_ranks_answer_and_each_has_a_hash_seed_of_its_own(tmp_path: Path) -> None:
    first, second = run([WELL, WELL], tmp_path), run([WELL], tmp_path)
    assert first.code == 0 and first.statuses(0) == ["ok"] * 4
    values = [first.reply(0, rank)["value"] for rank in range(4)]
    assert [value["rank"] for value in values] == [0, 1, 2, 3]
    assert len({value["pid"] for value in values}) == 4
    assert len({value["hash"] for value in values}) == 4
    # The same worker answers again, and another run has the same hash seeds.
    assert first.reply(1, 2)["value"] == values[2]
    assert [second.reply(0, rank)["value"]["hash"] for rank in range(4)] == [v["hash"] for v in values]


@pytest.mark.parametrize("rank", [0, 2])
def test_each_way_to_fail_costs_one_request(tmp_path: Path, rank: int) -> None:
    ways = {
        "raise": "raised",
        "unprintable": "raised",
        "sys.exit": "raised",
        "keyboard interrupt": "raised",
        "unsendable": "raised",
        "os._exit": "crash",
        "SIGKILL": "crash",
        "SIGSEGV": "crash",
        "close stdout": "ok",
        "child process": "ok",
    }
    requests = [request for how in ways for request in ({"how": how, "ranks": [rank]}, WELL)]
    result = run(requests, tmp_path)
    assert result.code == 0, result.errors
    for number, (how, status) in enumerate(ways.items()):
        assert result.reply(2 * number, rank)["status"] == status, how
        others = [s for r, s in enumerate(result.statuses(2 * number)) if r != rank]
        assert others == ["ok"] * 3, how
        assert result.statuses(2 * number + 1) == ["ok"] * 4, f"after {how}"
    messages = [result.reply(2 * number, rank)["message"] for number in range(len(ways))]
    assert messages[0] == "this rank raises"
    assert messages[5:8] == ["exit code 0", "killed by SIGKILL", "killed by SIGSEGV"]
    assert "Segmentation fault" in result.reply(14, rank)["stack"]
    assert processes_in(tmp_path) == []


def test_hangs_end_at_the_deadline_with_the_stacks_of_all(tmp_path: Path) -> None:
    ways = ["loop in Python", "sleep in C", "SIGSTOP"]
    requests = [request for how in ways for request in ({"how": how, "ranks": [1]}, WELL)]
    result = run(requests, tmp_path, timeout=2.0)
    for number, how in enumerate(ways):
        assert result.statuses(2 * number) == ["ok", "hang", "ok", "ok"], how
        assert 2.0 <= result.lines[2 * number]["seconds"] < 12.0
        assert result.statuses(2 * number + 1) == ["ok"] * 4, f"after {how}"
    assert "in misbehave" in result.reply(0, 1)["stack"]
    assert processes_in(tmp_path) == []


def test_a_slow_rank_is_not_called_dead(tmp_path: Path) -> None:
    requests = [{"how": how, "ranks": [3]} for how in ("slow", "stopped for a while")]
    result = run(requests, tmp_path, timeout=10.0)
    assert [result.statuses(0), result.statuses(1)] == [["ok"] * 4, ["ok"] * 4]


def test_a_deadlock_is_seen_long_before_the_deadline(tmp_path: Path) -> None:
    requests = [{"how": "wait in a collective", "ranks": [1, 2]}, WELL]
    result = run(requests, tmp_path, timeout=60.0)
    assert result.statuses(0) == ["ok", "hang", "hang", "ok"]
    assert "deadlock" in result.reply(0, 1)["message"]
    assert "ranks 0, 3 finished" in result.reply(0, 1)["message"]
    assert result.lines[0]["seconds"] < 20
    assert result.statuses(1) == ["ok"] * 4


def test_ranks_that_wait_for_one_that_failed_are_stopped(tmp_path: Path) -> None:
    requests = [{"how": "SIGKILL", "ranks": [2], "others": "wait"}, WELL]
    result = run(requests, tmp_path, timeout=60.0)
    assert result.statuses(0) == ["waiting", "waiting", "crash", "waiting"]
    assert "torch/distributed" in result.reply(0, 0)["stack"]
    assert result.lines[0]["seconds"] < 20
    assert result.statuses(1) == ["ok"] * 4


def test_much_output_is_kept_in_part(tmp_path: Path) -> None:
    result = run([{"how": "print much", "ranks": [1]}, {"how": "raise"}], tmp_path)
    assert result.statuses(0) == ["ok"] * 4
    log = tmp_path / "rank1.log"
    assert log.stat().st_size < 3 << 20
    assert b"output left out here" in log.read_bytes()


def test_an_error_of_the_leading_rank_ends_the_whole_job(tmp_path: Path) -> None:
    begin = time.monotonic()
    result = run([WELL, {"how": "leave"}], tmp_path)
    assert result.code != 0
    assert "an error of the leading rank itself" in result.errors
    assert time.monotonic() - begin < 60
    deadline = time.monotonic() + 10
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_in(tmp_path) == []


def test_a_launcher_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "[]", "1", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
    )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "do not belong together" in result.stderr
