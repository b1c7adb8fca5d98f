"""Targets and -k expressions."""

import pytest

from sbp.select import SelectionError, compile_expression, matches_target, short_name, suggest

ID = "modules/MSELoss(mean):8x4/4/input=S(0),target=P"


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        ("MSELoss", True),
        ("mseloss", True),
        ("input=S(0)", True),
        ("input=S(1)", False),
        ("MSELoss and target=P", True),
        ("MSELoss and not target=P", False),
        ("not MSELoss or target=P", True),
        ("(L1Loss or MSELoss) and input=S(0)", True),
        ("not (L1Loss or input=S(0))", False),
        ("L1Loss or (MSELoss and not target=B)", True),
    ],
)
def test_expressions(expression: str, matches: bool) -> None:
    assert compile_expression(expression)(ID) is matches


@pytest.mark.parametrize("expression", ["", "and", "a and", "( a", "a )", "not", "a b", "or a"])
def test_what_cannot_be_read_is_refused(expression: str) -> None:
    with pytest.raises(SelectionError, match="-k"):
        compile_expression(expression)


def test_targets_name_modules_or_whole_cases() -> None:
    assert short_name("Linear(8,12):4x8") == short_name("Linear-0:train") == "Linear"
    assert matches_target("Linear(8,12):4x8", "nn.Linear")
    assert matches_target("Linear-0", "torch.nn.linear")
    assert matches_target("Linear-0", "Linear-0")
    assert not matches_target("Bilinear-0", "Linear")
    assert not matches_target("Linear-0", "Linear-1")


def test_a_wrong_target_gets_a_suggestion() -> None:
    assert suggest("Liner", ["Linear-0", "Bilinear-0"]).startswith(
        "no case is called 'Liner'; did you mean Linear"
    )
    assert "--list" in suggest("zzz", ["Linear-0"])
