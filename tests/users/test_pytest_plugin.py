"""The pytest plugin, as a user runs it: in a pytest of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

SAMPLE = Path(__file__).resolve().parent / "plugin" / "sample_test_file.py"
LINEAR = [f"test_linear[{words}]" for words in ("4", "4-input:S0", "4-input:S1", "4-input:P")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite")
    shutil.copy(SAMPLE, path / "test_parallel.py")
    (path / "pytest.ini").write_text("[pytest]\nmarkers =\n    chosen: some\n")
    (path / "known.toml").write_text(
        '[[known]]\npattern = "test_parallel.py/test_known/*"\nverdict = "wrong value"\n'
        'reason = "doubled on purpose"\n'
    )
    return path


def run(folder: Path, *arguments: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    # Installed, the plugin comes by its entry point; here it is named, so that it is there either way but once.
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "sbp.pytest_plugin",
        "-p",
        "xdist",
        "-W",
        "ignore",
        *arguments,
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def listed(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_each_placement_is_a_test_that_can_be_chosen(folder: Path) -> None:
    done = run(
        folder, "--co", "-q", "test_parallel.py::test_linear", "test_parallel.py::test_mlp[4-train-AdamW]"
    )
    tests = listed(done)
    assert tests[:4] == LINEAR and tests[-1] == "test_mlp[4-train-AdamW]" and len(set(tests)) == len(tests)
    assert {"test_linear[2x2]", "test_linear[2x2-input:S0.B]", "test_linear[2x2-input:B.S1]"} < set(tests)
    assert all(name.startswith("test_linear[2x2") for name in tests[4:-1])
    done = run(folder, "--co", "-q", "-k", "input:S1 and 4 or several", "--sbp-ranks", "4")
    assert listed(done) == ["test_linear[4-input:S1]", "test_several[one-4]", "test_several[other-2x2]"]
    done = run(folder, "--co", "-q", "-m", "chosen and sbp", "--sbp-ranks", "2")
    assert listed(done) == [
        "test_mlp[2-train-SGD]",
        "test_mlp[2-train-AdamW]",
        "test_doubled[2]",
        "test_refused[2]",
        "test_known[2]",
        "test_several[one-2]",
        "test_several[other-2x1]",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("@case\ndef test_x():\n    return 1 / 0", "case test_x cannot be built: ZeroDivisionError"),
        ("@case(meshes='3q')\ndef test_x():\n    return nn.ReLU(), torch.ones(2)", "'3q' is not a mesh"),
        ("@case(plan=abs, axes=('a', 'b', 'c'))\ndef test_x():\n    return nn.Linear(2, 2), torch.ones(2, 2)",
         "test_x.py: case test_x needs a multiple of 4 ranks, there are 2"),
    ],
)  # fmt: skip
def test_a_case_that_makes_no_sense_is_one_line_at_collection(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "test_x.py").write_text(f"import torch\nfrom torch import nn\nfrom sbp import case\n{text}\n")
    done = run(tmp_path, "-q", "--sbp-ranks", "2")
    assert done.returncode == 2 and words in done.stdout and "Traceback" not in done.stdout


def test_settings_that_are_no_numbers_are_usage_errors(folder: Path) -> None:
    done = run(folder, "--co", "-q", "-o", "sbp_ranks=many", "test_parallel.py::test_linear")
    assert "sbp_ranks = 'many' is not a positive number" in done.stdout + done.stderr
    assert done.returncode != 0


@pytest.mark.distributed
def test_failures_are_text_and_the_reports_are_whole(folder: Path) -> None:
    report = folder / "report.xml"
    arguments = ["--sbp-ranks", "2", "--sbp-known", "known.toml", "--durations=3", "-rfx"]
    done = run(folder, "-q", "--cache-clear", f"--junitxml={report}", *arguments)
    text = done.stdout
    failed = ["test_doubled[2]", "test_refused[2]", "test_fixture_fails"]
    lines = [line for line in text.splitlines() if line.startswith("FAILED")]
    assert [line.partition("::")[2].partition(" ")[0] for line in lines] == failed, text
    assert done.returncode == 1
    # A failure is the verdict and the quantities that differ.
    assert "wrong value  test_parallel.py/test_doubled/2/all=B" in text
    assert "output: differs" in text and "up.weight.grad: differs" in text and "claimed S(0)" in text
    assert "1 of 1 trials failed" in text and "wrong value  assert_conforms/MLP/2/all=B" in text
    # A plan that is refused tests nothing, so that is a failure; a known failure is an expected one.
    assert "NotImplementedError: this plan does not support meshes" in text
    assert "XFAIL test_parallel.py::test_known[2] - doubled on purpose" in text
    # The reader sees the verdict and their own test, not the harness.
    assert "run_case" not in text and "sbp/pytest_plugin.py" not in text
    assert "slowest 3 durations" in text
    cases = {entry.get("name"): entry for entry in ElementTree.parse(report).iter("testcase")}
    assert {name.replace("[4", "[2") for name in LINEAR} <= set(cases)
    assert {entry.get("classname") for entry in cases.values()} == {"test_parallel"}
    assert [name for name, entry in cases.items() if entry.find("failure") is not None] == failed
    assert all(float(entry.get("time") or 0) > 0 for name, entry in cases.items() if "[" in (name or ""))
    # Only what failed runs again.
    assert listed(run(folder, "--co", "-q", "--lf", "--sbp-ranks", "2")) == failed


@pytest.mark.distributed
def test_under_xdist_each_worker_has_ranks_of_its_own(folder: Path) -> None:
    done = run(folder, "-q", "-n", "2", "--sbp-ranks", "2", "-k", "linear or mlp or usual")
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout, done.stdout
    # All ranks are gone with the session.
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in listing
