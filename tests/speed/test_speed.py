"""``sbp speed``: what is printed, what is counted, and a real run of two ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sbp.speed import command, report
from sbp.speed.count import StepCounter
from sbp.speed.models import CASES, build, draw, reason_to_skip
from sbp.usage import UsageError

ROOT = Path(__file__).parents[2]


def comparison() -> report.Comparison:
    single = report.Measured(report.SINGLE, (0.0437, 0.05, 0.04), peak_bytes=3 << 20, loss=0.5)
    plan = report.Measured(
        "ddp", (0.0334, 0.03, 0.04), {"all_reduce": 2, "broadcast": 1}, 1 << 19, 1 << 20, 0.5
    )
    skipped = report.Measured("tensor parallel", skipped="8 parts do not divide over 3 ranks")
    return report.Comparison("mlp", 6, (single, plan, skipped))


def test_the_lines_show_the_arithmetic() -> None:
    assert list(report.lines(comparison())) == [
        "mlp, batch 6",
        "  single device: 43.7 ms, the median of 3 (40.0 ms to 50.0 ms); peak memory 3.00 MiB",
        "  ddp: 33.4 ms, the median of 3 (30.0 ms to 40.0 ms)",
        "    relative speed: 1.31 (= 43.7 ms / 33.4 ms)",
        "    3 collectives (2 all_reduce, 1 broadcast), 0.50 MiB; peak memory 1.00 MiB a rank",
        "  tensor parallel: skipped, 8 parts do not divide over 3 ranks",
    ]


def test_the_script_for_pull_requests_finds_the_lines() -> None:
    spec = importlib.util.spec_from_file_location("post_speed_comment", ROOT / "ci/post_speed_comment.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert "1 comparisons; all lines:" in script.body_of("\n".join(report.lines(comparison())), "Speed")


def test_the_slowest_rank_of_each_round_counts() -> None:
    def answer(seconds: list[float], peak: int) -> dict[str, object]:
        return {"seconds": seconds, "collectives": {}, "collective_bytes": 0, "peak_bytes": peak, "loss": 1.0}

    found = report.gather("ddp", [answer([1.0, 5.0, 2.0], 7), answer([4.0, 2.0, 3.0], 9)])
    assert (found.seconds, found.median, found.peak_bytes) == ((4.0, 5.0, 3.0), 4.0, 9)
    # The single device is measured on the first rank alone.
    assert report.gather("single", [answer([1.0], 7), None]).seconds == (1.0,)


def test_batches_divide_over_the_ranks() -> None:
    assert command.batches_for(None, 2) == [8, 32]
    assert command.batches_for(None, 3) == [9, 33]
    with pytest.raises(UsageError, match="multiple of 4"):
        command.batches_for([6], 4)


@pytest.mark.parametrize(
    "words", [["--rounds", "0"], ["-n", "0"], ["--timeout", "soon"], ["--json", "/no/such/x"]]
)
def test_bad_options_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", CASES)
def test_the_models_run_and_every_parameter_has_a_gradient(name: str) -> None:
    cpu, case = torch.device("cpu"), CASES[name]
    model = build(case, "small", torch.float32, cpu)
    model(draw(case, "small", 2, torch.float32, cpu)).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_the_large_network_is_resnet_50() -> None:
    with torch.device("meta"):
        model = CASES["resnet"].build["large"]()
    # The number of parameters that torchvision states for ResNet-50.
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


def test_plans_that_do_not_fit_are_skipped() -> None:
    assert reason_to_skip(CASES["transformer"], "tensor parallel", "small", 8) == ""
    assert "3 ranks" in reason_to_skip(CASES["transformer"], "tensor parallel", "small", 3)
    assert reason_to_skip(CASES["resnet"], "tensor parallel", "small", 2)
    assert reason_to_skip(CASES["resnet"], "ddp", "small", 3) == ""


def test_the_peak_has_what_autograd_keeps_and_not_what_is_gone() -> None:
    inputs = torch.randn(1024, requires_grad=True)
    size = inputs.numel() * inputs.element_size()
    with StepCounter([inputs]) as counter:
        kept = inputs.exp()
        kept = kept.exp()  # the first result is needed for its gradient, and nobody else holds it
    assert counter.peak_bytes == 3 * size
    assert kept.numel() == 1024
    with StepCounter([inputs]) as counter, torch.no_grad():
        value = inputs.exp()
        for _ in range(5):
            value = value.exp()
    assert counter.peak_bytes == 3 * size


@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "sbp.cli", "speed", "-n", "2", "--case", "mlp", "--case", "transformer"),
            *("--batch", "4", "--rounds", "2", "--json", str(file)),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    data = json.loads(file.read_text())
    assert run.stdout.count("relative speed: ") == 6
    assert (data["world"]["size"], data["format"]) == (2, 1)
    mlp, transformer = data["comparisons"]
    for found in (mlp, transformer):
        single = found["single"]
        assert single["collectives"] == {} and len(single["seconds"]) == 2
        assert [plan["plan"] for plan in found["plans"]] == list(command.PLANS)
        for plan in found["plans"]:
            assert plan["relative_speed"] == single["median_seconds"] / plan["median_seconds"]
            # What is timed computes the same: one rank's mean, or the mean of both ranks' halves.
            assert plan["loss"] == pytest.approx(single["loss"], rel=1e-4)
    plans = {plan["plan"]: plan for plan in mlp["plans"]}
    weights = 4 * (256 * 1024 + 1024 + 1024 * 256 + 256)
    assert plans["tensor parallel"]["collectives"] == {"all_reduce": 1}
    assert plans["tensor parallel"]["collective_bytes"] == 4 * 4 * 32 * 256
    assert set(plans["ddp"]["collectives"]) == {"all_reduce"}
    assert plans["ddp"]["collective_bytes"] == weights
    assert plans["fsdp2"]["collectives"] == {"all_gather": 1, "reduce_scatter": 1}
    assert plans["fsdp2"]["collective_bytes"] == pytest.approx(2 * weights, rel=0.01)  # padded to the ranks
    # Two of them forward (attention and MLP), four backward (query, key, value and MLP).
    assert transformer["plans"][0]["collectives"] == {"all_reduce": 6}
    assert plans["tensor parallel"]["peak_bytes"] < mlp["single"]["peak_bytes"]


@pytest.mark.distributed
def test_a_batch_that_does_not_divide_is_one_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "sbp.cli", "speed", "-n", "2", "--case", "mlp", "--batch", "3"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (run.returncode, run.stderr.strip()) == (2, "sbp speed: --batch 3: 2 ranks need a multiple of 2")
