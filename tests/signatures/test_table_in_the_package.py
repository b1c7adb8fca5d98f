"""The table of torch 2.13 that the package holds."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

import pytest

from sbp.signatures_cli import main
from sbp.signatures_table import SHIPPED, read_table
from sbp.suites.operator_database import operator_names

# Operators that cannot be judged: they end the interpreter, or one of their calls takes too long.
MOST_FAILED = 20


@pytest.fixture(scope="module")
def operators() -> dict[str, Any]:
    return dict(read_table(SHIPPED)["operators"])


def signatures(calls: list[dict[str, Any]], text: str) -> set[str]:
    """The signatures of the first output of the call with that text."""
    (call,) = [call for call in calls if call["call"] == text]
    return {f"{', '.join(inputs)} -> {to}" for inputs, output, to, needs in call["signatures"] if output == 0}


def test_it_is_part_of_the_package() -> None:
    assert importlib.resources.files("sbp").joinpath("data", SHIPPED.name).is_file()


def test_it_has_all_operators(operators: dict[str, Any]) -> None:
    assert sorted(operators) == sorted(operator_names())
    failed = {name: entry["error"] for name, entry in operators.items() if "error" in entry}
    assert len(failed) <= MOST_FAILED
    # Only what the operator itself does: no error of ours.
    assert not [
        e for e in failed.values() if not e.startswith(("the interpreter died", "not done within"))
    ], failed


def test_what_it_says_of_some(operators: dict[str, Any]) -> None:
    matmul = signatures(operators["matmul"]["calls"], "matmul(f64[12], f64[12, 6])")
    assert {"S(0), S(0) -> P", "B, S(1) -> S(0)", "P, B -> P"} <= matmul
    assert not {"P, P -> P", "S(0), B -> S(0)", "S(0), S(0) -> B"} & matmul
    gradients = operators["matmul"]["gradients"]["input 0"]
    gradient = signatures(gradients, "grad of matmul(f64[6], f64[12], f64[12, 6])")
    # The cotangent comes first. What is reduced over the split columns of the other operand is partial.
    assert {"S(0), B, S(1) -> P", "B, S(0), S(0) -> S(0)", "P, B, B -> P"} <= gradient
    assert "c128" in operators["fft.fft"]["calls"][0]["outputs"][0]


def test_it_is_what_is_found_now(
    operators: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    assert main(["add", "cumsum", "--gradient", "--json", "--processes", "1"]) == 0
    now = json.loads(capsys.readouterr().out)["operators"]
    assert now == {name: operators[name] for name in now}
    assert main(["--diff", "shipped", "shipped"]) == 0
