"""Plans: every pair of choices occurs, the same on every run."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from sbp.placement import Mesh, parse_sbp
from sbp.plan import covering_array, placement_rows

TENSORS = {"input": (2, "f"), "weight": (2, "f"), "bias": (1, "f"), "mask": (1, "b")}


@given(st.lists(st.integers(1, 5), max_size=7).map(tuple))
@settings(max_examples=60, deadline=None)
def test_every_pair_of_values_of_every_two_factors_occurs(levels: tuple[int, ...]) -> None:
    rows = covering_array(levels)
    assert covering_array(levels, most=3) == rows[:3]
    assert all(0 <= value < count for row in rows for value, count in zip(row, levels, strict=True))
    for one, other in itertools.combinations(range(len(levels)), 2):
        seen = {(row[one], row[other]) for row in rows}
        assert seen == set(itertools.product(range(levels[one]), range(levels[other])))
    if levels:
        assert rows[0] == (0,) * len(levels)


def test_covering_arrays_stay_small() -> None:
    assert len(covering_array((4,) * 4)) <= 22
    assert len(covering_array((4,) * 20)) <= 45


def test_small_products_are_tried_whole() -> None:
    rows, how = placement_rows({"input": (2, "f"), "scale": (0, "f")}, Mesh((4,)))
    assert how == "all"
    assert len(rows) == 4 * 2
    assert rows[0] == {}


def test_large_products_begin_with_one_tensor_at_a_time() -> None:
    rows, how = placement_rows(TENSORS, Mesh((4,)))
    assert how == "pairs"
    assert rows[0] == {}
    alone = [row for row in rows if len(row) == 1]
    assert rows[1 : 1 + len(alone)] == alone
    assert {"input": "S(0)"} in alone and {"bias": "P"} in alone and {"mask": "S(0)"} in alone
    assert not any(row.get("mask") == "P" for row in rows), "a boolean has no partial pieces"
    assert len({tuple(row.items()) for row in rows}) == len(rows)
    assert placement_rows(TENSORS, Mesh((4,)), most=14)[0] == rows[:14]


def test_each_mesh_axis_chooses_for_itself() -> None:
    rows, _ = placement_rows(TENSORS, Mesh((2, 2)))
    placements = {row["input"] for row in rows if "input" in row}
    assert {"(S(0), B)", "(B, S(0))"} <= placements
    assert all(len(parse_sbp(sbp)) == 2 for row in rows for sbp in row.values())


def test_fixed_tensors_lie_as_asked() -> None:
    rows, _ = placement_rows(TENSORS, Mesh((4,)), fixed={"input": "S(1)"})
    assert all(row["input"] == "S(1)" for row in rows)
    assert any(row.get("weight") == "P" for row in rows)


def test_no_tensors_give_the_one_empty_row() -> None:
    assert placement_rows({}, Mesh((4,))) == ([{}], "all")
