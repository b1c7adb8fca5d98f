"""The real job, broken on purpose: each fault costs its own trial the right verdict, and nothing else anything."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.spawn import find_mpirun
from sbp.report import results

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent
CASES = HERE / "fault_cases.py"
# One placement of each case.
PLACED = ("--mesh", "4", "--placement", "input=S(0)", "--placement", "grad_output=B")
DEADLINE = "4s"


def command(*arguments: str, ranks: int = 4) -> list[str]:
    mpirun = find_mpirun()
    assert mpirun is not None
    return [mpirun, "-n", str(ranks), sys.executable, "-m", "sbp.run", *arguments]


def environment(mark: str, **more: str) -> dict[str, str]:
    """Processes are found again by the mark in their environment."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "SBP_TEST_MARK": mark, **more}


def processes_of(mark: str) -> list[str]:
    """The command lines of the processes that were started under the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"SBP_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [line for line in found if line]


def no_process_of(mark: str, seconds: float = 10.0) -> list[str]:
    """The processes that are still there after so long; it is to be an empty list."""
    deadline = time.monotonic() + seconds
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return processes_of(mark)


def verdicts(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        if record["kind"] == "verdict":
            assert record["case"] not in found
            found[record["case"]] = record["verdict"]
    return found


def expected_verdicts() -> dict[str, set[str]]:
    """The verdicts that the table of faults names, read without importing it."""
    words: dict[str, set[str]] = {}
    for node in ast.parse(CASES.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.Set):
            names = [t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name)]
            sets = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            words |= {name: set(ast.literal_eval(value)) for name, value in zip(names, sets)}
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FAULTS":
            assert isinstance(node.value, ast.Dict)
            faults = {}
            for key, value in zip(node.value.keys, node.value.values):
                assert isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
                last = value.elts[-1]
                faults[key.value] = (
                    words[last.id] if isinstance(last, ast.Name) else set(ast.literal_eval(last))
                )
            return faults
    raise AssertionError("no table of faults")


EXPECTED = expected_verdicts()


def test_there_are_at_least_forty_faults() -> None:
    assert len(EXPECTED) >= 40


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[str]]:
    """The results file of the run with all faults, its exit code, and the processes that it left."""
    path = tmp_path_factory.mktemp("faults") / "results.jsonl"
    mark = f"faults-{os.getpid()}"
    run = subprocess.run(
        command(str(CASES), *PLACED, "--timeout", DEADLINE, "--results", str(path)),
        env=environment(mark),
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert "Traceback" not in run.stderr, run.stderr
    return path, run.returncode, no_process_of(mark)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_fault_costs_its_trial_the_right_verdict(broken: tuple[Path, int, list[str]], name: str) -> None:
    assert verdicts(broken[0])[name] in EXPECTED[name]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_case_after_a_fault_passes(broken: tuple[Path, int, list[str]], name: str) -> None:
    assert verdicts(broken[0])[f"after_{name}"] == "pass"


def test_the_results_are_whole_and_no_process_is_left(broken: tuple[Path, int, list[str]]) -> None:
    path, code, left = broken
    assert code == 1
    read = results.read(path)
    assert read.complete and len(read.verdicts) == 2 * len(EXPECTED)
    assert left == []


def test_without_the_faults_all_pass(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run = subprocess.run(
        command(str(CASES), *PLACED, "--results", str(path)),
        env=environment(f"good-{os.getpid()}", SBP_FAULTS="off"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert set(verdicts(path).values()) == {"pass"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_ends_the_run_with_one_line() -> None:
    mark = f"full-{os.getpid()}"
    run = subprocess.run(
        command("Linear", "--mesh", "2", "--level", "quick", "--results", "/dev/full", ranks=2),
        env=environment(mark),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode in (2, 3)
    assert len([line for line in run.stderr.splitlines() if "/dev/full" in line]) == 1, run.stderr
    assert "Traceback" not in run.stderr
    assert no_process_of(mark) == []


def test_a_closed_standard_output_does_not_stop_the_results(tmp_path: Path) -> None:
    path, mark = tmp_path / "results.jsonl", f"closed-{os.getpid()}"
    process = subprocess.Popen(
        command("Linear", "--mesh", "2", "--level", "quick", "--results", str(path), ranks=2),
        env=environment(mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.wait(120)
    assert results.read(path).complete
    assert no_process_of(mark) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_supervisor_ends_the_job(tmp_path: Path, rank: int) -> None:
    path, mark = tmp_path / "results.jsonl", f"supervisor-{rank}-{os.getpid()}"
    process = subprocess.Popen(
        command("--suite", "modules", "--mesh", "2", "--results", str(path), ranks=2),
        env=environment(mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while (
        not (path.exists() and path.read_text().count('"kind": "verdict"') > 3)
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    [supervisor] = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_supervisor(entry, mark, rank)
    ]
    os.kill(supervisor, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not results.read(path).complete
    assert no_process_of(mark) == []


def _is_supervisor(entry: Path, mark: str, rank: int) -> bool:
    try:
        variables = (entry / "environ").read_bytes().split(b"\0")
        words = (entry / "cmdline").read_bytes()
    except OSError:
        return False
    wanted = {f"SBP_TEST_MARK={mark}".encode(), f"PMI_RANK={rank}".encode()}
    return wanted <= set(variables) and b"sbp.run" in words and b"mpirun" not in words
