"""``mpirun -n 4 python -m sbp.run`` for real: what it finds in torch, and what it does with bad input and bad cases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.spawn import find_mpirun
from sbp.report import results

pytestmark = pytest.mark.distributed

TORCH_2_13 = torch.__version__.startswith("2.13.")


def run(*arguments: str, ranks: int = 4, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    mpirun = find_mpirun()
    assert mpirun is not None
    command = [mpirun, "-n", str(ranks), sys.executable, "-m", "sbp.run", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def verdicts(path: Path) -> dict[str, dict[str, Any]]:
    return {record["id"]: record for record in records(path) if record["kind"] == "verdict"}


@pytest.mark.skipif(not TORCH_2_13, reason="what torch 2.13 has wrong")
@pytest.mark.slow
def test_it_finds_what_torch_2_13_has_wrong(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    cases = [
        "MSELoss(mean):8x4",
        "BatchNorm2d(8):4x8x2x4:train",
        "Conv2d(4,8,3,padding=1):4x4x8x8",
        "Embedding(12,8,scale_grad_by_freq):8x4",
        "CrossEntropyLoss(mean,weight):8x5",
        "CrossEntropyLoss(mean,ignore_index=1):8x5",
        "GLU-0",
        "Mish-0",
    ]
    result = run(*cases, "--mesh", "4", "--known", "none", "--level", "full", "--results", str(path))
    assert result.returncode == 1, result.stderr
    found = verdicts(path)

    def finding(name: str, quantity: str) -> dict[str, Any]:
        return next(f for f in found[f"modules/{name}"]["findings"] if f["quantity"] == quantity)

    mse = finding("MSELoss(mean):8x4/4/input=S(0)", "input.grad")
    assert mse["verdict"] == "wrong gradient"
    assert mse["relation"].startswith("4 x the reference (x the number of ranks) on every rank")
    assert mse["claimed"] == "S(0)" and mse["ranks"] == [0, 1, 2, 3]
    statistics = "BatchNorm2d(8):4x8x2x4:train/4/input=S(1)"
    assert {f["quantity"] for f in found[f"modules/{statistics}"]["findings"]} == {
        "running_mean",
        "running_var",
    }
    assert found[f"modules/{statistics}"]["verdict"] == "wrong state"
    assert found["modules/Conv2d(4,8,3,padding=1):4x4x8x8/4/input=S(2)"]["verdict"] == "wrong layout"
    assert (
        finding("Embedding(12,8,scale_grad_by_freq):8x4/4/input=S(0)", "weight.grad")["verdict"]
        == "wrong gradient"
    )
    for options in ("weight", "ignore_index=1"):
        name = f"modules/CrossEntropyLoss(mean,{options}):8x5/4/input=S(0)"
        assert found[name]["verdict"] == "wrong value"
    assert "ranks disagree" in {found[f"modules/{name}-0/4/input=P"]["verdict"] for name in ("GLU", "Mish")}
    # What is right stays silent, in the same modules.
    for name in (
        "MSELoss(mean):8x4",
        "BatchNorm2d(8):4x8x2x4:train",
        "Embedding(12,8,scale_grad_by_freq):8x4",
    ):
        assert found[f"modules/{name}/4/all=B"]["verdict"] == "pass"


@pytest.mark.skipif(not TORCH_2_13, reason="the known failures are those of torch 2.13")
def test_with_the_known_failures_that_ship_the_run_is_green(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    result = run("MSELoss(mean):8x4", "Linear(8,12):4x8", "--level", "quick", "--results", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "known failures, as expected" in result.stdout
    read = results.read(path)
    assert read.complete and read.exit_code == 0 and read.known
    kinds = [record["kind"] for record in records(path)]
    assert kinds[0] == "run" and kinds[-1] == "summary" and set(kinds[1:-1]) == {"verdict"}
    summary = records(path)[-1]
    assert summary["planned"] == summary["verdicts"] == len(kinds) - 2


def test_a_trial_can_be_run_by_its_id_and_a_run_resumed(tmp_path: Path) -> None:
    path, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    case = "Linear(8,12):4x8"
    assert run(case, "--level", "quick", "--results", str(path)).returncode == 0
    whole = verdicts(path)
    name = next(iter(whole))
    one = tmp_path / "one.jsonl"
    assert run(case, "--id", name, "--mesh", whole[name]["mesh"], "--results", str(one)).returncode == 0
    assert list(verdicts(one)) == [name]
    # A run that was killed in the middle of a line.
    lines = path.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:4]) + lines[4][:50])
    assert not results.read(part).complete
    assert run(case, "--level", "quick", "--resume", str(part)).returncode == 0
    resumed = results.read(part)
    assert resumed.complete
    assert [v.id for v in resumed.verdicts] == list(whole), "no trial twice, none left out, in order"
    assert {v.id: v.verdict for v in resumed.verdicts} == {
        n: record["verdict"] for n, record in whole.items()
    }


def test_the_parts_of_a_run_are_the_run() -> None:
    def ids(*options: str) -> list[str]:
        result = run("MSELoss", "Linear", "--level", "quick", "--list", *options, ranks=2)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    whole, parts = ids(), [ids("--shard", f"{number}/3") for number in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(whole)
    assert len(whole) == len(set(whole)) > 20


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["Liner"], "no case is called 'Liner'; did you mean Linear"),
        (["--mesh", "3x5"], "mesh 3x5 has 15 ranks, but 2 are running"),
        (["--mesh", "many"], "'many' is not a mesh"),
        (["--placement", "input=Q"], "'Q' is not a placement"),
        (["--suite", "nothing"], "there is no suite 'nothing'"),
        (["--dtype", "int7"], "'int7' is not a dtype"),
        (["-k", "("], "cannot read -k '('"),
        (["-k", "nothing_has_this_name", "--suite", "modules", "Linear"], "matches no trial"),
        (["--results", "/nowhere/results.jsonl"], "cannot write results to /nowhere/results.jsonl"),
        (["--known", "/nowhere/known.toml"], "cannot read known failures"),
        (["--resume", "/nowhere/results.jsonl"], "/nowhere/results.jsonl"),
        (["--timeout", "soon"], "'soon' is not a time"),
        (["--shard", "9/8"], "--shard '9/8'"),
        (["--level", "some"], "invalid choice: 'some'"),
        (["no_such_file.py"], "no_such_file.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], line: str) -> None:
    result = run(*arguments, ranks=2)
    assert result.returncode == 2
    complaints = [text for text in result.stderr.splitlines() if line in text]
    assert len(complaints) == 1, result.stderr
    assert "Traceback" not in result.stderr


BAD_CASES = """
import ctypes, os, signal, time
import torch
import torch.distributed as dist
from torch import nn
from sbp import case


class Well(nn.Module):
    def forward(self, input):
        return input * 2


class Bad(nn.Module):
    def __init__(self, how, rank):
        super().__init__()
        self.how, self.rank = how, rank

    def forward(self, input):
        # The reference is not to fail: it runs without DTensors.
        if type(input) is not torch.Tensor and dist.get_rank() == self.rank:
            self.how()
        return input * 2


def _raise():
    raise ValueError("only this rank raises")


def _hang():
    while True:
        pass


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _x():
    return torch.randn(4, 3, requires_grad=True)


@case
def before():
    return Well(), _x()

@case
def raises():
    return Bad(_raise, 1), _x()

@case
def hangs():
    return Bad(_hang, 2), _x()

@case
def killed():
    return Bad(_kill, 3), _x()

@case
def after():
    return Well(), _x()
"""


def test_a_rank_that_raises_hangs_or_is_killed_costs_its_trial_and_no_other(tmp_path: Path) -> None:
    file, path = tmp_path / "bad_cases.py", tmp_path / "results.jsonl"
    file.write_text(BAD_CASES)
    arguments = [str(file), "--mesh", "4", "--level", "quick", "--timeout", "3s"]
    result = run(*arguments, "--placement", "input=S(0)", "--results", str(path))
    assert result.returncode == 1, result.stderr
    found: dict[str, set[str]] = {}
    for record in verdicts(path).values():
        found.setdefault(record["case"], set()).add(record["verdict"])
    assert found == {
        "before": {"pass"},
        "raises": {"error"},
        "hangs": {"hang"},
        "killed": {"crash"},
        "after": {"pass"},
    }
    by_case = {record["case"]: record for record in verdicts(path).values()}
    assert by_case["raises"]["findings"][0]["ranks"] == [1]
    assert "only this rank raises" in by_case["raises"]["error"]["message"]
    assert "_hang" in by_case["hangs"]["error"]["stacks"]["2"]
    assert "killed by SIGKILL" in by_case["killed"]["findings"][0]["relation"]
    assert results.read(path).complete


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_has_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "results.jsonl"
    mpirun = find_mpirun()
    assert mpirun is not None
    process = subprocess.Popen(
        [mpirun, "-n", "2", sys.executable, "-m", "sbp.run", "--results", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while (
        not (path.exists() and path.read_text().count('"kind": "verdict"') > 3)
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    read = results.read(path)
    assert len(read.verdicts) > 3 and not read.complete


def test_what_cases_print_is_kept_by_rank_and_by_trial(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "from sbp import case\n"
        "class Talks(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if dist.is_initialized() and torch.is_grad_enabled():\n"
        "            print('python', dist.get_rank())\n"
        "            os.write(2, b'beneath python\\n')\n"
        "        return super().forward(x)\n"
        "@case(spmd=lambda module, world: module)\n"
        "def first():\n"
        "    return Talks(4, 4), torch.randn(2, 4)\n"
        "second = first.variant('second')\n"
    )
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank1.log").write_text("of an earlier run\n")
    result = run(str(tmp_path / "talks.py"), "--rank-logs", str(logs), ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "beneath" not in result.stdout + result.stderr
    for rank in (0, 1):
        text = (logs / f"rank{rank}.log").read_text()
        first, second = text.split(f"[rank {rank}] ")[1:]
        for case, part in (("first", first), ("second", second)):
            assert f"talks.py/{case}/2" in part
            assert f"python {rank}\n" in part and "beneath python\n" in part
        assert "earlier" not in text


def test_a_deadlock_of_hand_written_code_is_seen_though_it_is_watched(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "from sbp import case\n"
        "class Waits(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if dist.get_rank() == 0:\n"
        "            dist.all_reduce(x.clone())\n"
        "        return super().forward(x)\n"
        "@case(spmd=lambda module, world: Waits(4, 4))\n"
        "def waits():\n"
        "    return nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)\n"
    )
    path = tmp_path / "results.jsonl"
    result = run(str(tmp_path / "waits.py"), "--timeout", "100s", "--results", str(path), ranks=2)
    assert result.returncode == 1, result.stdout + result.stderr
    [verdict] = verdicts(path).values()
    assert verdict["verdict"] == "hang"
    # Not by its deadline, which would say that there was no answer within it.
    assert "deadlock: waits in a collective for ever, rank 1 finished" in verdict["findings"][0]["relation"]
    assert all(finding["relation"] for finding in verdict["findings"])
