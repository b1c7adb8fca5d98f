"""Verdicts from what the ranks compared."""

from collections.abc import Callable

import numpy as np
import pytest

from sbp.placement import Mesh, parse_sbp, split
from sbp.verdict.compare import Observed, Row, compare_all, compare_piece, difference
from sbp.verdict.judge import Judgement, judge_rows
from sbp.verdict.relation import describe_difference

MESH = Mesh((4,))
EXPECTED = np.round(np.random.default_rng(0).standard_normal((8, 3)) * 1024) / 1024


class Due:
    def __init__(self, value: np.ndarray | None, kind: str = "value") -> None:
        self.kind, self.value, self.dtype = kind, value, "" if value is None else str(value.dtype)
        self.noise = (0.0, 0.0)
        self.norm = 0.0 if value is None else float(np.linalg.norm(np.nan_to_num(value)))


def judge(
    pieces: list[np.ndarray | None],
    claimed: str | list[str | None] | None,
    expected: np.ndarray | None = EXPECTED,
    kind: str = "value",
    mesh: Mesh = MESH,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Judgement:
    rows = []
    for rank, piece in enumerate(pieces):
        claim = claimed[rank] if isinstance(claimed, list) else claimed
        full_shape = shape or (expected.shape if expected is not None else ())
        name = dtype or (str(piece.dtype) if piece is not None else "")
        observed = {"output": Observed("output", kind, claim, full_shape, name, piece)}
        rows.append(
            [
                Row.from_list(row.to_list())
                for row in compare_all(observed, {"output": Due(expected, kind)}, mesh, rank, True)
            ]
        )
    return judge_rows(rows, mesh)


def cut(full: np.ndarray, sbp: str, mesh: Mesh = MESH) -> list[np.ndarray]:
    return split(full, parse_sbp(sbp, mesh), mesh, np.random.default_rng(5))


@pytest.mark.parametrize("sbp", ["B", "S(0)", "S(1)", "P", "P(max)", "P(avg)"])
def test_right_pieces_pass(sbp: str) -> None:
    assert judge(cut(EXPECTED, sbp), sbp).verdict == "pass"


@pytest.mark.parametrize("sbp", ["(S(0), P)", "(P, B)", "(B, S(1))", "(P, P)"])
def test_right_pieces_pass_on_two_axes(sbp: str) -> None:
    mesh = Mesh((2, 2))
    assert judge(cut(EXPECTED, sbp, mesh), sbp, mesh=mesh).verdict == "pass"


@pytest.mark.parametrize("sbp", ["B", "S(0)", "S(1)", "P", "P(avg)"])
@pytest.mark.parametrize(
    ("kind", "word"), [("value", "wrong value"), ("gradient", "wrong gradient"), ("state", "wrong state")]
)
def test_a_wrong_factor_is_found_under_each_placement(sbp: str, kind: str, word: str) -> None:
    judgement = judge([piece * (1 + 1e-6) for piece in cut(EXPECTED, sbp)], sbp, kind=kind)
    assert judgement.verdict == word
    assert judgement.findings[0].relative_error == pytest.approx(1e-6, rel=1e-3)
    # With three columns the last rank has none.
    assert judgement.findings[0].ranks == ((0, 1, 2) if sbp == "S(1)" else (0, 1, 2, 3))


def test_rounding_is_no_fault() -> None:
    judgement = judge([piece * (1 + 1e-14) for piece in cut(EXPECTED, "S(0)")], "S(0)")
    assert judgement.verdict == "pass"
    assert 0 < judgement.largest_error < 1e-10


def test_one_wrong_rank_is_named() -> None:
    pieces = cut(EXPECTED, "S(0)")
    pieces[2] = pieces[2] + 1
    finding = judge(pieces, "S(0)").findings[0]
    assert (finding.rank, finding.ranks, finding.claimed) == (2, (2,), "S(0)")


def test_replicas_must_agree_in_every_bit() -> None:
    pieces = cut(EXPECTED, "B")
    pieces[3] = pieces[3] * (1 + 2.3e-16)
    judgement = judge(pieces, "B")
    assert judgement.verdict == "ranks disagree"
    assert judgement.findings[0].ranks == (3,)
    assert "right within rounding" in judgement.findings[0].relation


def test_claims_must_agree() -> None:
    judgement = judge(cut(EXPECTED, "B"), ["B", "B", "P", "B"])
    assert judgement.verdict == "ranks disagree"
    assert "rank 2 P" in judgement.findings[0].relation


def test_layout_faults() -> None:
    pieces = cut(EXPECTED, "S(0)")
    assert judge(pieces, "B").verdict == "wrong layout"
    assert judge(pieces, "S(0)", shape=(2, 3)).verdict == "wrong layout"
    assert judge([piece.astype(np.float32) for piece in pieces], "S(0)").verdict == "wrong layout"
    assert judge(pieces, "S(5)").verdict == "wrong layout"
    assert "local shape is (2, 3)" in judge(pieces, "B").findings[0].relation


def test_a_gradient_on_one_side_only_is_a_failure() -> None:
    missing = judge([None] * 4, None, kind="gradient")
    assert missing.verdict == "wrong gradient"
    assert missing.findings[0].relation.startswith("missing")
    extra = judge(cut(EXPECTED, "B"), "B", None, kind="gradient")
    assert extra.verdict == "wrong gradient"
    assert judge([None] * 4, None, None, kind="gradient").verdict == "pass"


def test_a_plain_tensor_must_be_whole_on_every_rank() -> None:
    assert judge(cut(EXPECTED, "B"), None).verdict == "pass"
    assert judge(cut(EXPECTED, "S(0)"), None).verdict == "wrong layout"


def test_nan_is_compared_by_place() -> None:
    expected = EXPECTED.copy()
    expected[0, 0] = np.nan
    assert judge(cut(expected, "S(0)"), "S(0)", expected).verdict == "pass"
    assert judge(cut(EXPECTED, "S(0)"), "S(0)", expected).verdict == "wrong value"
    assert difference(np.array([np.inf]), np.array([np.inf])) == (0.0, 0.0)
    assert difference(np.array([np.inf]), np.array([1.0]))[0] == np.inf


def test_what_was_not_reached_is_not_missing() -> None:
    due = {"output": Due(EXPECTED), "input.grad": Due(EXPECTED, "gradient")}
    observed = {"output": Observed("output", "value", "B", EXPECTED.shape, "float64", EXPECTED)}
    assert [row.name for row in compare_all(observed, due, MESH, 0, reached=False)] == ["output"]
    assert len(compare_all(observed, due, MESH, 0, reached=True)) == 2


def test_integers_are_compared_exactly() -> None:
    expected = np.arange(8)
    assert judge(cut(expected, "S(0)"), "S(0)", expected).verdict == "pass"
    assert (
        judge([piece + (piece == 3) for piece in cut(expected, "S(0)")], "S(0)", expected).verdict
        == "wrong value"
    )


def test_compare_piece_takes_the_part_of_its_rank() -> None:
    observed = Observed("x", "value", "S(0)", (8, 3), "float64", EXPECTED[2:4])
    assert compare_piece(observed, "x", "value", EXPECTED, "float64", 1.0, MESH, 1).difference_norm == 0
    assert compare_piece(observed, "x", "value", EXPECTED, "float64", 1.0, MESH, 2).difference_norm > 0


WAYS: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "4 x the reference (x the number of ranks) on every rank": lambda p: [x * 4 for x in p],
    "1/4 of the reference (/ the number of ranks) on every rank": lambda p: [x / 4 for x in p],
    "3 x the reference on every rank": lambda p: [x * 3 for x in p],
    "the negative of the reference on every rank": lambda p: [-x for x in p],
    "zero, where the reference is not on every rank": lambda p: [x * 0 for x in p],
    "zero, where the reference is not on rank 2": lambda p: [x * (r != 2) for r, x in enumerate(p)],
    "the reference + 0.5 on every rank": lambda p: [x + 0.5 for x in p],
    "NaN in 1 of 6 elements, where the reference has numbers on rank 1": lambda p: [
        np.where((np.arange(6).reshape(2, 3) == 0) & (r == 1), np.nan, x) for r, x in enumerate(p)
    ],
    "the part of another rank (rank 0 holds that of rank 3) on every rank": lambda p: p[::-1],
    "differs, by no simple rule on every rank": lambda p: [np.sin(x) for x in p],
}


@pytest.mark.parametrize("words", WAYS)
def test_how_it_differs_is_said_in_words(words: str) -> None:
    assert describe_difference(WAYS[words](cut(EXPECTED, "S(0)")), EXPECTED, "S(0)", MESH) == words


def test_a_sum_that_is_held_but_not_claimed() -> None:
    words = describe_difference(cut(EXPECTED, "P"), EXPECTED, "B", MESH)
    assert words == (
        "replicas differ; the ranks' pieces add up to the reference: P is held, but not claimed on every rank"
    )
