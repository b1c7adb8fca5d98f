"""Which layout makes the reference of plain tensors that claim nothing."""

import numpy as np
import pytest

from sbp.culprit.layouts import fitting_layout
from sbp.placement import parse_mesh, parse_sbp, split

WHOLE = np.random.default_rng(0).standard_normal((6, 5))


@pytest.mark.parametrize(
    ("mesh", "sbp", "words"),
    [
        ("4", "B", "B"),
        ("4", "S(0)", "S(0)"),
        ("3", "S(1)", "S(1)"),
        ("4", "P", "P"),
        ("2x2", "(S(1), P)", "S(1), P"),
        ("2x2", "(B, S(0))", "B, S(0)"),
    ],
)
def test_the_layout_is_found(mesh, sbp, words):
    mesh = parse_mesh(mesh)
    pieces = split(WHOLE, parse_sbp(sbp, mesh), mesh, np.random.default_rng(1))
    assert fitting_layout(pieces, WHOLE, mesh, 1e-9) == (words, True)


def test_a_wrong_value_fits_in_no_layout():
    mesh = parse_mesh("2")
    pieces = split(WHOLE, parse_sbp("S(0)", mesh), mesh)
    pieces[1] = pieces[1] + 1e-3
    assert fitting_layout(pieces, WHOLE, mesh, 1e-9) == (None, True)


def test_a_scale_is_allowed_only_where_it_is_said():
    mesh = parse_mesh("2")
    assert fitting_layout([2 * WHOLE, 2 * WHOLE], WHOLE, mesh, 1e-9) == (None, True)
    assert fitting_layout([2 * WHOLE, 2 * WHOLE], WHOLE, mesh, 1e-9, (1.0, 2.0)) == ("B", True)


def test_shapes_that_cannot_be_put_together_say_nothing():
    assert fitting_layout([np.zeros((2, 3)), np.zeros((2, 3))], WHOLE, parse_mesh("2"), 1e-9) == (None, False)
