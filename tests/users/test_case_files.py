"""Case files: how they are found, what is planned from them, and what is said when something is wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbp import Case, case
from sbp.placement import parse_mesh
from sbp.plan import PlanOptions
from sbp.planner import plan_trials
from sbp.suites import SuiteError, find_suite, is_users
from sbp.suites.users import UserSuite, collect, normalise_target
from sbp.trial import Trial

Write = Callable[..., str]
HEAD = """
import torch
from torch import nn
from sbp import case, call, Case, Train

def plan(module, mesh):
    return module

def build():
    return nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a case file and makes its folder the working directory; gives its name."""
    monkeypatch.chdir(tmp_path)
    written = 0

    def write_file(text: str, name: str = "", head: str = HEAD) -> str:
        nonlocal written
        written += 1
        # Suites are found by name and kept, so each test has names of its own.
        name = name or f"{tmp_path.name}_{written}.py"
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + textwrap.dedent(text))
        return name

    return write_file


def request(*targets: str, meshes: tuple[str, ...] = ("4", "2x2"), **settings: Any) -> dict[str, Any]:
    return {
        "suites": [],
        "targets": list(targets),
        "keyword": None,
        "meshes": list(meshes),
        "dtypes": ["float64"],
        "device": "cpu",
        "placements": {},
        "rows": 4,
        "subject": "dtensor",
        **settings,
    }


def plan(*targets: str, **settings: Any) -> tuple[list[Trial], dict[str, Any]]:
    messages = list(plan_trials(request(*targets, **settings)))
    trials = [Trial.from_dict(data) for message in messages for data in message.get("trials", [])]
    return trials, messages[-1]


# ---------------------------------------------------------------------------------------------- finding


def test_every_case_of_a_file_in_its_order(write: Write) -> None:
    name = write("""
        second = Case("second", build)
        first = case(build)
        several = [case(name=f"n{index}", plan=plan)(build) for index in (2, 1)]
        table = {"a": case(name="a", plan=plan)(build)}
        again = first
        nothing = 3
        """)
    assert list(collect(name)) == ["second", "build", "n2", "n1", "a"]


def test_a_file_says_what_is_its_own(write: Write) -> None:
    write("shared = Case('shared', build)", "basics.py")
    name = write("from basics import shared\nown = shared.variant('own')\n__all__ = ['own']", head="")
    assert list(collect(name)) == ["own"]


def test_one_case_of_a_file_or_module(write: Write) -> None:
    name = write("one = Case('one', build)\nother = Case('other', build, plan=plan)")
    trials, _ = plan(f"{name}:other")
    assert {trial.case for trial in trials} == {"other"} and {trial.suite for trial in trials} == {name}
    write(
        "def make():\n    return [Case('made', build, plan=plan), Case('made2', build, plan=plan)]",
        "pkg/cases.py",
    )
    trials, _ = plan("pkg.cases:make")
    assert [trial.id for trial in trials] == ["pkg.cases:make/made/4/all=B", "pkg.cases:make/made2/4/all=B"]


def test_names_choose_among_the_cases_of_the_files_that_are_given(write: Write) -> None:
    name = write("one = Case('one', build, plan=plan)\nother = Case('other', build, plan=plan)")
    assert {trial.case for trial in plan(name, "other")[0]} == {"other"}
    assert "no case is called 'othre'; did you mean other or one?" in plan(name, "othre")[1]["error"]


def test_a_file_in_a_package_may_import_its_neighbours(write: Write) -> None:
    write("", "box/__init__.py", head="")
    write("WIDTH = 4", "box/sizes.py", head="")
    name = write("from .sizes import WIDTH\none = Case('one', build)", "box/cases.py")
    assert list(collect(name)) == ["one"]


def test_files_in_different_folders_may_have_neighbours_of_the_same_name(write: Write) -> None:
    for folder, width in (("here", 4), ("there", 5)):
        write(f"WIDTH = {width}", f"{folder}/neighbour_sizes.py", head="")
        write("from neighbour_sizes import WIDTH\none = Case(f'wide_{WIDTH}', build)", f"{folder}/cases.py")
    assert list(collect("here/cases.py")) == ["wide_4"]
    assert list(collect("there/cases.py")) == ["wide_5"]
    write("from neighbour_sizes import WIDTH\none = Case(f'again_{WIDTH}', build)", "here/more.py")
    assert list(collect("here/more.py")) == ["again_4"]


def test_a_file_called_like_a_module_hides_nothing(write: Write) -> None:
    name = write("one = Case('one', build)", "random.py")
    assert list(collect(name)) == ["one"]
    import random

    assert hasattr(random, "shuffle")


def test_a_target_is_the_same_however_it_is_written(write: Write, tmp_path: Path) -> None:
    name = write("one = Case('one', build)", "inner/cases.py")
    assert {normalise_target(text) for text in (name, f"./{name}", str(tmp_path / name), f"{name}:one")} == {
        name
    }
    assert find_suite(name).name == name
    assert is_users("a.py") and is_users("a.py:b") and is_users("a.b:c")
    assert (
        not is_users("Linear") and not is_users("BatchNorm2d(8):4x8x2x4:train") and not is_users("nn.Linear")
    )


# --------------------------------------------------------------------------------------------- planning


def test_ids_are_stable_and_name_what_is_declared(write: Write) -> None:
    name = write("""
        one = Case("one", build, plan=plan, placements={"input": "Shard(0)", "output": "B"})
        two = Case("two", build, plan=plan, axes=("dp", "tp"), placements={"input": {"dp": "S(0)"}},
                   train=Train(optimizer=["SGD", "AdamW:foreach"]))
        cast = Case("cast", build, plan=plan, autocast="bfloat16")
        """)
    expected = [
        f"{name}/one/4/input=S(0)",
        f"{name}/two/2x2/input=(S(0),B)/train/optimizer=SGD",
        f"{name}/two/2x2/input=(S(0),B)/train/optimizer=AdamW:foreach",
        f"{name}/cast/4/all=B/float32",
    ]
    assert [trial.id for trial in plan(name)[0]] == expected == [trial.id for trial in plan(name)[0]]


def test_placements_are_tried_where_nothing_is_said(write: Write) -> None:
    name = write("one = case(name='one', placements={'weight': 'S(0)'})(build)")
    trials, _ = plan(name, meshes=("4",), rows=None)
    assert all(trial.placements["weight"] == "S(0)" for trial in trials)
    tried = {(tensor, sbp) for trial in trials for tensor, sbp in trial.placements.items()}
    assert {
        ("input", "S(0)"),
        ("input", "S(1)"),
        ("input", "P"),
        ("bias", "P"),
        ("grad_output", "S(1)"),
    } <= tried


@pytest.mark.parametrize(
    ("settings", "size", "meshes"),
    [
        ({}, ("4", "2x2"), ["4"]),
        ({"axes": ("dp", "tp")}, ("4", "2x2"), ["2x2"]),
        ({"axes": ("dp", "tp")}, ("2",), ["2x1"]),
        ({"axes": ("a", "b", "c")}, ("8", "2x4"), ["2x2x2"]),
        ({"axes": ("dp", "tp")}, ("3",), []),
        ({"meshes": ("2", "4")}, ("4", "2x2"), ["4"]),
        ({"meshes": "1x4", "axes": ("dp", "tp")}, ("4", "2x2"), ["1x4"]),
        ({"meshes": "8"}, ("4", "2x2"), []),
    ],
)
def test_a_case_runs_on_the_meshes_that_fit_it(settings: Any, size: Any, meshes: list[str]) -> None:
    import torch

    made = Case("c", lambda: (torch.nn.Linear(2, 2), torch.ones(1, 2)), plan=lambda m, mesh: m, **settings)
    suite = UserSuite("tests", {"c": made})
    trials = list(suite.plan("c", PlanOptions(tuple(parse_mesh(text) for text in size))))
    assert [trial.mesh for trial in trials] == meshes
    assert bool(suite.skipped) == (not meshes)
    if not meshes:
        assert "ranks, there are" in suite.skipped["c"]


def test_optimizers_that_the_module_cannot_have_are_left_out_of_all(write: Write) -> None:
    name = write("one = Case('one', build, plan=plan, train=Train(steps=1, optimizer='all'))")
    trials, closing = plan(name)
    tried = {trial.options["optimizer"] for trial in trials}
    assert (
        {"SGD", "AdamW:amsgrad:fused", "LBFGS"} <= tried and "Muon" not in tried and "SparseAdam" not in tried
    )
    assert "Muon only supports 2D parameters" in closing["skipped"]["one Muon"]
    assert len(tried) + sum(1 for skipped in closing["skipped"] if skipped.startswith("one ")) == 192


# -------------------------------------------------------------------------------- what a case file says wrong


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero ({path}, line 11)"),
        ("def f(:", "cannot be loaded: SyntaxError: invalid syntax ({path}, line 11)"),
        (
            "import nowhere",
            "cannot be loaded: ModuleNotFoundError: No module named 'nowhere' ({path}, line 11)",
        ),
        ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
        ("x = 1", "has no cases; put @sbp.case before a function that builds one"),
        ("case(plann=plan)(build)", "case build: no setting is called 'plann'; there are: autocast"),
        ("a = Case('a', build)\nb = Case('a', plan)", "two cases are called a; give one another name"),
        (
            "a = Case('a', lambda: 1 / 0)",
            "case a cannot be built: ZeroDivisionError: division by zero ({path}, line 11)",
        ),
        ("a = Case('a', lambda: 3)", "case a must return a module (or function) and its inputs"),
        ("a = Case('a', lambda: (3, 4))", "it returned a tuple that starts with a int"),
        (
            "a = Case('a', lambda: (nn.Linear(4, 3), torch.ones(2, 5)))",
            "case a fails on one device already: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        ),
        (
            "a = Case('a', lambda: (nn.Dropout(0.5), torch.ones(2, 5)), plan=plan)",
            "case a is random: two runs on one device differ in output; take the dropout out, or say random=True",
        ),
        (
            "a = Case('a', lambda: (nn.Linear(4, 3).requires_grad_(False), torch.zeros(0, 4)), plan=plan)",
            "case a shows nothing: every result on one device is zero or empty",
        ),
        (
            "a = Case('a', build, plan=plan, placements={'inptu': 'S(0)'})",
            "case a places 'inptu', but has no such tensor; it has input, weight, bias, output",
        ),
        (
            "a = Case('a', build, placements={'weight': 'S(7)'})",
            "case a: weight: S(7) does not fit a tensor of 2 dimensions",
        ),
        (
            "a = Case('a', build, plan=plan, placements={'input': 'Q'})",
            "case a: input: 'Q' is not a placement",
        ),
        (
            "a = Case('a', build, plan=plan, placements={'input': '(S(0), B)'})",
            "case a: input: '(S(0), B)' has 2 placements, but mesh 4 has 1 axes",
        ),
        (
            "a = Case('a', build, plan=plan, train=Train(optimizer='Adan'))",
            "case a: Train.optimizer: there is no optimizer 'Adan'; did you mean Adam",
        ),
        (
            "a = Case('a', build, plan=plan, train=Train(optimizer='Muon'))",
            "case a fails on one device already: ValueError: Muon only supports 2D",
        ),
    ],
)
def test_an_error_in_the_file_is_one_clear_line_and_nothing_runs(
    write: Write, tmp_path: Path, text: str, words: str
) -> None:
    fine = write("fine = Case('fine', build, plan=plan)")
    name = write(text)
    for targets in ((name,), (fine, name)):
        [message] = list(plan_trials(request(*targets)))
        assert words.replace("{path}", str(tmp_path / name)) in message["error"]
        assert message["error"].startswith(name) and "\n" not in message["error"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.py", "there is no file nowhere.py"),
        ("no.module:make", "no.module cannot be loaded: ModuleNotFoundError: No module named 'no'"),
        ("os:nothing", "os has no nothing"),
        ("os:sep", "os:sep is neither a case nor a function that returns cases"),
        ("os:getcwd", "os:getcwd is neither a case nor a function that returns cases"),
    ],
)
def test_a_target_that_is_not_there_is_one_line(target: str, words: str) -> None:
    [message] = list(plan_trials(request(target)))
    assert words in message["error"] and "\n" not in message["error"]


def test_a_case_that_is_asked_for_by_a_wrong_name(write: Write) -> None:
    suite = UserSuite(write("one = case(build)"))
    with pytest.raises(SuiteError, match="has no case 'two'; it has build"):
        suite.case("two")


def test_the_decorator_is_the_name_of_the_package() -> None:
    import sbp.trial  # noqa: F401

    assert callable(case)


def test_a_run_for_which_there_are_too_few_ranks_says_so(write: Write) -> None:
    name = write("one = case(name='one', plan=plan, axes=('a', 'b', 'c'))(build)")
    [message] = list(plan_trials(request(name, meshes=("2",))))
    assert message["error"] == "case one needs a multiple of 4 ranks, there are 2"
