"""Cases on real ranks: what is right passes, what has a fault is found and named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbp.ranks import failure_text
from sbp.suites.users import collect, load_module

Run = Callable[..., dict[str, dict[str, Any]]]
pytestmark = pytest.mark.distributed
HERE = Path(__file__).resolve().parent
CASES = HERE / "cases"
EXAMPLES = HERE.parents[1] / "examples"


def cases_of(*files: Path) -> list[Any]:
    return [pytest.param(file, name, id=name) for file in files for name in collect(str(file))]


@pytest.mark.parametrize(("file", "name"), cases_of(CASES / "right.py"))
def test_correct_code_of_every_kind_passes(run: Run, file: Path, name: str) -> None:
    for record in run(file, name).values():
        assert record["verdict"] == "pass", failure_text(record)


def test_code_that_imports_mpi_by_itself_finds_the_ranks(run: Run) -> None:
    [record] = run(CASES / "mpi_at_the_top.py", "mean").values()
    assert record["verdict"] == "pass", failure_text(record)


PLANTED = load_module(str(CASES / "planted.py"))


@pytest.mark.parametrize("name", PLANTED.__all__)
def test_a_planted_fault_is_found_and_named(run: Run, name: str) -> None:
    expected = PLANTED.EXPECTED.get(getattr(PLANTED, name).name, ("pass", ""))
    for record in run(CASES / "planted.py", getattr(PLANTED, name).name).values():
        found = record["findings"][0]["quantity"] if record["findings"] else ""
        assert (record["verdict"], found) == expected, failure_text(record)


def test_the_words_say_what_is_wrong(run: Run) -> None:
    """The planted faults' relations, as people read them."""
    words = {
        "one_gradient_scaled": "4 x the reference (x the number of ranks) on every rank",
        "averaged_sum": "1/4 of the reference (/ the number of ranks) on every rank",
        "not_reduced": "the ranks' mean is the reference: P(avg) is held, but not claimed",
        "fault_in_gradient": "the ranks' pieces add up to the reference: P is held, but not claimed",
        "split_otherwise": "it claims S(0), the case declares S(1)",
        "dropout_repeated": "the random pattern of rank 0 again on ranks 1, 2, 3",
        "dropout_of_replicas": "replicas are not the same bits on ranks 1, 2, 3",
        "nothing_declared": "case nothing_declared: up.weight has shape (4, 8) on rank 0, but up.weight as B gives it",
    }
    for name, text in words.items():
        [record] = run(CASES / "planted.py", name).values()
        assert text in record["findings"][0]["relation"], name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name"), cases_of(*sorted(EXAMPLES.glob("*_*.py")), EXAMPLES / "training.py")
)
def test_every_example_passes(run: Run, file: Path, name: str) -> None:
    if name == "tied_vocabulary_2":
        pytest.skip("is for two ranks")
    for record in run(file, name).values():
        assert record["verdict"] == "pass", failure_text(record)


def test_a_file_with_an_error_ends_a_run_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "broken.py").write_text("from sbp import case\n\n@case\ndef one():\n    return 1 / 0\n")
    done = subprocess.run(
        [sys.executable, "-m", "sbp.run", "-n", "2", "broken.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("sbp")]
    where = f"({tmp_path / 'broken.py'}, line 5)"
    assert f"broken.py: case one cannot be built: ZeroDivisionError: division by zero {where}" in line
    assert "Traceback" not in done.stderr and not done.stdout.strip()
