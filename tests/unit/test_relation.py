"""How a result differs, in words."""

from collections.abc import Callable

import numpy as np
import pytest

from sbp.placement import Array, Mesh
from sbp.verdict.relation import describe_difference

MESH = Mesh((4,))
EXPECTED = np.random.default_rng(3).standard_normal((6, 5))


def _spoilt_end(value: Array) -> Array:
    value = value.copy()
    value[:, -2:] = np.random.default_rng(4).standard_normal((6, 2))
    return value


def _late(value: Array) -> Array:
    return np.concatenate([np.full((1, 5), 7.5), value[:-1]])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda value: value * 8 / 7, "8/7 x the reference (unbiased instead of biased, over 8 values?)"),
        (lambda value: value * 7 / 8, "7/8 of the reference (biased instead of unbiased, over 8 values?)"),
        (lambda value: value[[2, 3, 0, 1, 4, 5]], "the 3 blocks along dim 0 in the order 1, 0, 2"),
        (lambda value: np.roll(value, 2, 1), "shifted by +2 along dim 1, the end put at the other side"),
        (_late, "shifted by +1 along dim 0"),
        (_spoilt_end, "wrong only in the last 2 of 5 along dim 1 (padding?)"),
    ],
)
def test_the_words(spoil: Callable[[Array], Array], words: str) -> None:
    pieces = [spoil(EXPECTED)] * 4
    assert describe_difference(pieces, EXPECTED, "B", MESH) == f"{words} on every rank"
    one = [EXPECTED, EXPECTED, spoil(EXPECTED), EXPECTED]
    assert describe_difference(one, EXPECTED, "B", MESH) == f"replicas differ; {words} on rank 2"


def test_what_follows_no_rule_is_given_none() -> None:
    pieces = [np.random.default_rng(5).standard_normal((6, 5))] * 4
    assert describe_difference(pieces, EXPECTED, "B", MESH) == "differs, by no simple rule on every rank"


def test_an_infinity_where_a_number_is_due_is_said() -> None:
    expected = np.arange(1.0, 9.0)
    wrong = expected.copy()
    wrong[3] = np.inf
    words = describe_difference([wrong, wrong], expected, None, Mesh((2,)))
    assert "infinite in 2 of 16 elements" in words
    # Nor is the factor between numbers so far apart a number.
    assert describe_difference([expected * 1e307] * 2, expected * 1e-150, None, Mesh((2,)))
