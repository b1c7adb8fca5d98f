"""The meaning of placements: cutting and putting together are inverses, and pieces lie as torch.chunk lays them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp.numbers import on_grid
from sbp.placement import (
    SBP,
    B,
    LayoutError,
    Mesh,
    P,
    Placement,
    PlacementError,
    S,
    chunk_bounds,
    combine,
    disagreeing_ranks,
    local_shape,
    parse,
    parse_mesh,
    parse_sbp,
    reduce_partials,
    same_bits,
    show,
    split,
    take_local,
)

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda shape: Mesh(tuple(shape)))
shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def placements_for(ndim: int) -> st.SearchStrategy[Placement]:
    kinds = [st.just(B), st.sampled_from(["sum", "avg", "max", "min"]).map(P)]
    if ndim:
        kinds.append(st.builds(S, st.integers(-ndim, ndim - 1), st.sampled_from([1, 1, 2, 3])))
    return st.one_of(kinds)


@st.composite
def placed(draw: st.DrawFn) -> tuple[np.ndarray, SBP, Mesh, int]:
    mesh, shape = draw(meshes), draw(shapes)
    sbp = tuple(draw(placements_for(len(shape))) for _ in range(mesh.ndim))
    seed = draw(st.integers(0, 2**32))
    return np.random.default_rng(seed).standard_normal(shape), sbp, mesh, seed


@given(placed())
@settings(max_examples=300, deadline=None)
def test_combine_is_the_inverse_of_split(case: tuple[np.ndarray, SBP, Mesh, int]) -> None:
    full, sbp, mesh, seed = case
    full = on_grid(full)
    pieces = split(full, sbp, mesh, np.random.default_rng(seed))
    back = combine(pieces, sbp, mesh, full.shape)
    # Dividing by a number of ranks that is not a power of two is the one step that rounds.
    exact = not any(p.reduction == "avg" and n == 3 for p, n in zip(sbp, mesh.shape, strict=True))
    assert same_bits(back, full) if exact else np.allclose(back, full, rtol=0, atol=1e-14)


@given(placed(), st.sampled_from([np.int64, np.int32, np.uint8, np.complex128, np.float32]))
@settings(max_examples=200, deadline=None)
def test_other_dtypes_come_back_exactly(case: tuple[np.ndarray, SBP, Mesh, int], dtype: type) -> None:
    full, sbp, mesh, seed = case
    kind = np.dtype(dtype).kind
    sbp = tuple(P() if p.is_partial and (kind == "c" or (p.reduction == "avg")) else p for p in sbp)
    full = on_grid((full * 20).astype(dtype) if kind != "u" else np.abs(full * 20).astype(dtype))
    pieces = split(full, sbp, mesh, np.random.default_rng(seed))
    assert all(piece.dtype == full.dtype for piece in pieces)
    found = combine(pieces, sbp, mesh, full.shape)
    # Three partial axes of 2, 4 and 4 ranks: the pieces are too large to keep all bits of a float32.
    axes = [(p, n) for p, n in zip(sbp, mesh.shape) if p.is_partial and n > 1]
    growth = math.prod(2 ** math.ceil(math.log2(2 * n - 1)) if p == P() else 8 for p, n in axes)
    if kind in "iu" or growth <= 2**7:
        assert same_bits(found, full)
    else:
        largest = growth * float(np.abs(full).max(initial=0.0))
        assert np.abs(found - full).max(initial=0.0) <= largest * np.finfo(dtype).eps


@given(placed())
@settings(max_examples=200, deadline=None)
def test_replicas_are_equal_and_shapes_are_as_announced(case: tuple[np.ndarray, SBP, Mesh, int]) -> None:
    full, sbp, mesh, seed = case
    pieces = split(full, sbp, mesh, np.random.default_rng(seed))
    assert disagreeing_ranks(pieces, sbp, mesh) == []
    assert [piece.shape for piece in pieces] == [
        local_shape(full.shape, sbp, mesh, rank) for rank in range(mesh.size)
    ]
    if not any(placement.is_partial for placement in sbp):
        for rank, piece in enumerate(pieces):
            assert same_bits(
                piece, np.ascontiguousarray(take_local(full, sbp, mesh, rank)).reshape(piece.shape)
            )


@given(st.integers(0, 30), st.integers(1, 9))
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    ours = [chunk_bounds(size, parts, index) for index in range(parts)]
    theirs = [len(chunk) for chunk in torch.arange(size).chunk(parts)] if size else []
    theirs += [0] * (parts - len(theirs))  # torch leaves trailing empty chunks out
    assert [stop - start for start, stop in ours] == theirs


def test_no_partial_piece_resembles_the_whole() -> None:
    full = on_grid(np.random.default_rng(0).standard_normal((6, 5)))
    pieces = split(full, (P(),), Mesh((4,)), np.random.default_rng(1))
    for piece in pieces:
        assert np.all(piece != 0)
        assert abs(np.corrcoef(piece.ravel(), full.ravel())[0, 1]) < 0.8
        assert np.linalg.norm(piece - full / 4) > 0.5 * np.linalg.norm(full)


def test_partial_pieces_depend_on_the_generator_alone() -> None:
    full = np.arange(6.0)
    first, second = (split(full, (P(),), Mesh((3,)), np.random.default_rng(7)) for _ in range(2))
    assert all(same_bits(one, other) for one, other in zip(first, second, strict=True))


def test_partial_keeps_nan_and_infinity() -> None:
    full = np.array([1.0, np.nan, np.inf, -np.inf])
    for reduction in ("sum", "avg", "max", "min"):
        pieces = split(full, (P(reduction),), Mesh((4,)), np.random.default_rng(0))
        assert np.array_equal(combine(pieces, (P(reduction),), Mesh((4,)), (4,)), full, equal_nan=True)


def test_two_splits_of_one_dimension_nest_from_the_first_axis() -> None:
    pieces = split(np.arange(8), (S(0), S(0)), Mesh((2, 2)))
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # A strided split is what the first axis sees when the second has split before it.
    pieces = split(np.arange(8), (S(0, factor=2), S(0)), Mesh((2, 2)))
    assert [piece.tolist() for piece in pieces] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_mixed_partial_and_split_on_two_axes() -> None:
    full = on_grid(np.random.default_rng(3).standard_normal((4, 3)))
    mesh = Mesh((2, 3))
    pieces = split(full, (S(0), P()), mesh, np.random.default_rng(4))
    assert np.array_equal(pieces[0] + pieces[1] + pieces[2], full[:2])
    assert np.array_equal(pieces[3] + pieces[4] + pieces[5], full[2:])


def test_other_reductions_can_be_combined() -> None:
    mesh = Mesh((2,))
    pieces = [np.array([3.0]), np.array([4.0])]
    assert reduce_partials(pieces, (P("norm2"),), mesh)[0] == 5.0
    assert reduce_partials(pieces, (P("product"),), mesh)[1] == 12.0
    with pytest.raises(PlacementError, match="can be read but not drawn"):
        split(np.ones(2), (P("norm2"),), mesh, np.random.default_rng(0))


def test_replicas_that_differ_are_named() -> None:
    pieces = [np.zeros(2), np.zeros(2), np.array([0.0, -0.0]), np.zeros(2)]
    assert disagreeing_ranks(pieces, (B,), Mesh((4,))) == [2]
    assert disagreeing_ranks(pieces, (S(0), B), Mesh((2, 2))) == [3]


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("S(0)", S(0)),
        ("S(-1)", S(-1)),
        ("s1", S(1)),
        ("Shard(dim=2)", S(2)),
        ("Shard(1)", S(1)),
        ("oneflow.sbp.split(0)", S(0)),
        ("_StridedShard(dim=0, sf=2)", S(0, 2)),
        ("S(0, factor=2)", S(0, 2)),
        ("B", B),
        ("R", B),
        ("Replicate()", B),
        ("flow.sbp.broadcast", B),
        ("P", P()),
        ("Partial()", P()),
        ("Partial(sum)", P()),
        ("Partial('max')", P("max")),
        ("P(avg)", P("avg")),
        ("oneflow.sbp.partial_sum", P()),
    ],
)
def test_spellings(text: str, placement: Placement) -> None:
    assert parse(text) == placement


@given(placed())
def test_what_is_printed_can_be_read(case: tuple[np.ndarray, SBP, Mesh, int]) -> None:
    _, sbp, mesh, _ = case
    assert parse_sbp(show(sbp), mesh) == sbp
    assert parse_mesh(str(mesh)) == mesh


@pytest.mark.parametrize("text", ["", "S", "S()", "S(x)", "Q", "P(median)", "Shard(0", "S(0))"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(PlacementError):
        parse(text)


@pytest.mark.parametrize("text", ["", "0", "2x", "x2", "2y2", "-4", "2x0", "4.0", "9999999"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(PlacementError):
        parse_mesh(text)


def test_errors_say_what_would_fit() -> None:
    with pytest.raises(PlacementError, match="2 axes; write one for each"):
        parse_sbp("S(0)", Mesh((2, 2)))
    assert parse_sbp("B", Mesh((2, 2))) == (B, B)
    with pytest.raises(PlacementError, match="does not fit a tensor of 1 dimensions"):
        split(np.ones(3), (S(1),), Mesh((2,)))
    with pytest.raises(PlacementError, match="does not fit a tensor of 0 dimensions"):
        split(np.float64(3.0), (S(0),), Mesh((2,)))
    with pytest.raises(PlacementError, match="boolean"):
        split(np.ones(3, dtype=bool), (P(),), Mesh((2,)), np.random.default_rng(0))
    with pytest.raises(LayoutError, match=r"rank 1 holds a piece of shape \(3,\)"):
        combine([np.ones(2), np.ones(3)], (S(0),), Mesh((2,)), (4,))


def test_scalars_and_empty_tensors() -> None:
    mesh = Mesh((4,))
    for sbp in ((B,), (P(),)):
        pieces = split(np.float64(2.5), sbp, mesh, np.random.default_rng(0))
        assert combine(pieces, sbp, mesh, ()) == 2.5
    assert [piece.shape for piece in split(np.zeros((0, 3)), (S(0),), mesh)] == [(0, 3)] * 4
    assert [piece.shape for piece in split(np.zeros((5, 2)), (S(0),), mesh)] == [
        (2, 2),
        (2, 2),
        (1, 2),
        (0, 2),
    ]
