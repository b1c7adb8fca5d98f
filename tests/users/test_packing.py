"""Parameters that hold several of the reference's: packing and its inverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp import Case, CaseError, fused, packed, padded, transposed
from sbp.packing import fuse, pad, transpose, unfuse
from sbp.placement import B, Mesh, parse_sbp, take_local
from sbp.program import Program
from sbp.subjects.parallel import Grid
from sbp.subjects.pieces import PieceCache
from sbp.subjects.spmd import Loader, Part

MESH = Mesh((4,))


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 1), st.booleans()
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_fusing_can_be_undone(blocks: list[int], turns: int, dim: int, interleave: bool) -> None:
    random = np.random.default_rng(0)
    shapes = [(block * turns, 2) if dim == 0 else (2, block * turns) for block in blocks]
    pieces = [random.standard_normal(shape) for shape in shapes]
    chosen = tuple(blocks) if interleave else ()
    whole = fuse(*pieces, dim=dim, blocks=chosen)
    assert whole.shape[dim] == sum(blocks) * turns
    for piece, back in zip(pieces, unfuse(whole, shapes, dim=dim, blocks=chosen), strict=True):
        assert np.array_equal(piece, back)
    again = fuse(*map(torch.from_numpy, pieces), dim=dim, blocks=chosen)
    assert np.array_equal(whole, again.numpy())


def test_blocks_lie_in_turns() -> None:
    q, k = np.arange(4), 10 + np.arange(2)
    assert fuse(q, k, dim=0, blocks=(2, 1)).tolist() == [0, 1, 10, 2, 3, 11]
    with pytest.raises(ValueError, match=r"blocks of \(3, 1\) do not fit pieces of \[4, 2\] rows"):
        fuse(q, k, dim=0, blocks=(3, 1))
    with pytest.raises(ValueError, match="1 block sizes for 2 parts"):
        fuse(q, k, dim=0, blocks=(3,))


def test_transposing_and_padding() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert transpose(tensor, dim0=0, dim1=1).is_contiguous()
    assert pad(tensor, {0: 4, 1: 3}).tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0], [0, 0, 0]]
    assert pad(tensor.numpy(), {1: 4}).shape == (2, 4)
    with pytest.raises(ValueError, match=r"cannot pad dimension 0 of \(2, 3\) to 1: it is longer"):
        pad(tensor, {0: 1})


# ------------------------------------------------------------------------------- the loader of one rank


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(4, 8, bias=False)
        self.k = torch.nn.Linear(4, 4, bias=False)
        self.table = torch.nn.Embedding(10, 3)
        self.tied = torch.nn.Linear(3, 10, bias=False)
        self.tied.weight = self.table.weight


def loader(rank: int, **settings: Any) -> Loader:
    case = Case("c", Model, spmd=lambda module, world: module, **settings)
    grid = Grid(MESH, case.axis_names, None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return Loader(Program(Model()), "c", case, grid, PieceCache(rank))


def pieces_of(part: Part, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {leaf.name: piece for leaf, piece in part.unpack(tensor)}


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_has_its_rows_of_every_fused_part(rank: int) -> None:
    made = loader(rank, placements={"q.weight": "S(0)", "k.weight": "S(0)"})
    full = made.full
    q = full["q.weight"][2 * rank : 2 * rank + 2]
    k = full["k.weight"][rank : rank + 1]
    # q is (2, 4), the transposed k (4, 1): they cannot lie in one tensor along dim 0.
    with pytest.raises(CaseError, match="case c: qk: Sizes of tensors must match"):
        made.load("qk", fused("q.weight", transposed("k.weight")))
    part, value = made.load("qk", fused("q.weight", "k.weight"))
    assert torch.equal(value, torch.cat([q, k])) and part.shape == (3, 4)
    back = pieces_of(part, value * 2)
    assert torch.equal(back["q.weight"], 2 * q) and torch.equal(back["k.weight"], 2 * k)


@pytest.mark.parametrize("rank", range(4))
def test_padding_is_loaded_but_not_given_back(rank: int) -> None:
    made = loader(rank, placements={"table.weight": "S(0)"})
    # A tied weight is known by each of its names.
    part, value = made.load("table", padded("tied.weight", to=16))
    full = made.full["table.weight"]
    rows = full[4 * rank : 4 * rank + 4]
    assert value.shape == (4, 3) and torch.equal(value[: len(rows)], rows) and not value[len(rows) :].any()
    [(leaf, piece)] = part.unpack(value)
    assert leaf.name == "table.weight" and torch.equal(piece, rows)
    # What is claimed is what placement.py cuts.
    assert np.array_equal(take_local(full.detach().numpy(), leaf.sbp, MESH, rank), rows.detach().numpy())


def test_any_other_packing() -> None:
    def pack(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.stack([q[:4], k])

    def unpack(whole: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        assert shapes == [(8, 4), (4, 4)]
        return [torch.cat([whole[0], whole[0]]), whole[1]]

    part, value = loader(0).load("both", packed("q.weight", "k.weight", pack=pack, unpack=unpack))
    assert part.shape == (2, 4, 4) and {leaf.sbp for leaf, _ in part.unpack(value)} == {(B,)}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "nothing",
            r"the per-rank module has x, which is none of the reference's \(q.weight, k.weight, table",
        ),
        (padded("table.weight", to=4), "cannot pad dimension 0"),
        (fused("q.weight", "k.weight", blocks=(3, 3)), "blocks of"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(spec: Any, words: str) -> None:
    with pytest.raises(CaseError, match=words) as raised:
        loader(0).load("x", spec)
    assert "\n" not in str(raised.value)


def test_an_unpacking_that_gives_other_shapes_is_noticed() -> None:
    wrong = packed("q.weight", pack=lambda q: q, unpack=lambda whole, shapes: [whole.T])
    part, value = loader(0).load("q", wrong)
    with pytest.raises(CaseError, match=r"piece of shape \(4, 8\) for q.weight, pack was given \(8, 4\)"):
        list(part.unpack(value))


def test_balanced_and_sized_splits() -> None:
    full = np.arange(10)
    pieces = [take_local(full, parse_sbp("S(0, balanced)"), MESH, rank) for rank in range(4)]
    assert [p.tolist() for p in pieces] == [p.tolist() for p in np.array_split(full, 4)]
    sized = [take_local(full, parse_sbp("S(0, sizes=1+4+2+3)"), MESH, rank).tolist() for rank in range(4)]
    assert sized == [[0], [1, 2, 3, 4], [5, 6], [7, 8, 9]]
    assert str(parse_sbp("S(-1, balanced)")[0]) == "S(-1, balanced)"
    assert str(parse_sbp("S(0,sizes = 1 + 2)")[0]) == "S(0, sizes=1+2)"
    for text in ("S(0, sizes=1+2)", "S(0, sizes=1+2+3+3)"):
        with pytest.raises(ValueError, match="does not cut 10 elements into 4 pieces"):
            take_local(full, parse_sbp(text), MESH, 0)
