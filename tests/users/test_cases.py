"""Case, call, Train: what is accepted, and what is said of what is not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from sbp import Call, Case, CaseError, Train, call, case


def build() -> Any:
    return abs, 1


def plan(module: Any, mesh: Any) -> Any:
    return module


def test_the_decorator_makes_a_case_that_can_still_be_called() -> None:
    @case
    def bare() -> Any:
        return abs, 1

    @case(plan=plan, axes="tp", name="other")
    def dressed() -> Any:
        return abs, 2

    assert bare == Case("bare", bare.build) and bare() == (abs, 1) and not bare.is_parallel
    assert dressed.name == "other" and dressed.axes == ("tp",) and dressed.is_parallel
    assert dressed.subject == "dtensor" and Case("c", build, spmd=plan).subject == "spmd"


def test_a_variant_changes_only_what_it_names() -> None:
    one = Case("one", build, plan=plan, placements={"x": "S(0)"})
    other = one.variant("other", placements={})
    assert (other.name, other.plan, other.placements, other.build) == ("other", plan, {}, build)
    assert one.name == "one"


def test_call_keeps_arguments_keywords_and_targets() -> None:
    made = call(abs, 1, 2, mask=3).against(4, 5)
    assert made == Call(abs, (1, 2), {"mask": 3}, (4, 5))
    # Keywords of any name can be given on.
    assert call(abs, function=1).kwargs == {"function": 1}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "a b"}, "'a b' is not a case's name"),
        ({"name": "a/b"}, "is not a case's name"),
        ({"plan": plan, "spmd": plan}, "give plan or spmd, not both"),
        ({"parameters": {"a": "b"}}, "parameters has a meaning with spmd only"),
        ({"plan": plan, "numpy": True}, "numpy has a meaning with spmd only"),
        ({"spmd": plan, "dtensor_inputs": True}, "dtensor_inputs has a meaning with plan only"),
        ({"mean_over": "dp"}, "mean_over needs a plan or spmd"),
        ({"compile": "aot_eager"}, "compile needs a plan or spmd"),
        ({"plan": plan, "mean_over": "dp"}, "names the axis 'dp'; the axes are ('ranks',)"),
        ({"plan": plan, "placements": {"x": {"dp": "B"}}}, "x is placed on the axis 'dp'"),
        ({"train": Train(save_after=1)}, "Train.save_after needs a plan or spmd"),
        ({"plan": plan, "gradients": False, "train": Train()}, "training needs gradients"),
        ({"build": 3}, "build must be a function"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(CaseError) as raised:
        Case(**{"name": "c", "build": build, **settings})
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_an_unknown_setting_is_answered_with_those_that_exist() -> None:
    with pytest.raises(CaseError, match=r"no setting is called 'plann'; there are: .*plan, .*train"):
        case(plann=plan)(build)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "must be at least 1"),
        ({"accumulate": 0}, "must be at least 1"),
        ({"save_after": 4}, "save_after=4 is not one of the 3 steps"),
        ({"load_on": "2x2"}, "need save_after"),
    ],
)
def test_training_that_makes_no_sense_is_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(CaseError, match=words):
        Train(**settings)


def test_importing_sbp_loads_nothing_and_its_names_no_torch() -> None:
    code = """
import sys
import sbp
assert not {"torch", "numpy", "sbp.cases"} & set(sys.modules), sorted(sys.modules)
from sbp import case, call, Case, Train, Parallel, World, fused, packed, padded, transposed
assert not {"torch", "numpy"} & set(sys.modules)
from sbp import assert_conforms
assert "torch" not in sys.modules
import sbp.trial, sbp.cases
assert sbp.case is case and set(sbp.__all__) <= set(dir(sbp))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
