"""A failure names the step at which it goes wrong first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sbp.report.results import read

CASES = Path(__file__).parent / "cases.py.txt"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("culprit")
    (folder / "faulty.py").write_text(CASES.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "sbp.run", "-n", "2", "faulty.py", "--level", "quick", "--results", "r.jsonl"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    records = [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()]
    culprits = {each["id"].split("/")[1]: each for each in records if each["kind"] == "culprit"}
    return folder, done.stdout, culprits


def line_of(marker):
    lines = CASES.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if marker in line)


@pytest.mark.distributed
def test_the_backward_of_a_loss_is_the_origin(run):
    found = run[2]["backward_of_a_loss"]
    assert (found["direction"], found["module"], found["class"]) == ("backward", "loss", "MSELoss")
    assert found["operator"] == "nn.functional.mse_loss"
    assert (found["file"], found["line"]) == ("faulty.py", line_of("# LOSS"))
    assert found["origin"] is True
    assert "2 x the reference" in found["relation"]


@pytest.mark.distributed
def test_hand_written_code_is_followed_by_its_modules(run):
    found = run[2]["bias_on_every_rank"]
    assert (found["direction"], found["module"], found["operator"]) == (
        "forward",
        "down",
        "nn.functional.linear",
    )
    assert (found["file"], found["line"]) == ("faulty.py", line_of("# BIAS"))


@pytest.mark.distributed
def test_a_sum_that_nobody_reduces_shows_where_it_is_used(run):
    found = run[2]["not_reduced"]
    assert (found["direction"], found["module"]) == ("forward", "norm")
    assert found["operator"] == "nn.functional.layer_norm"


@pytest.mark.distributed
def test_it_is_printed_and_in_the_reports(run):
    folder, text, _ = run
    assert "first differs backward at nn.functional.mse_loss in loss (MSELoss)" in " ".join(text.split())
    results = read(folder / "r.jsonl")
    homes = {verdict.case: verdict.origin for verdict in results.verdicts if verdict.origin}
    assert homes["backward_of_a_loss"].line == line_of("# LOSS")
    assert not results.unread
