"""The experiments' own cutting and judging against placement.py, which says what a placement means."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from sbp.oracle.calls import Call, results
from sbp.oracle.experiment import Experiment, candidates
from sbp.oracle.pieces import choices, cut, settle
from sbp.oracle.signatures import EVEN, LOCAL_SIZES, CannotJudge, find_signatures, with_sizes
from sbp.placement import LayoutError, Mesh, P, Placement, combine, split

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape) * 7
    if dtype.is_complex:
        return torch.from_numpy(np.asarray(values + 1j * values[::-1])).to(dtype)
    return torch.from_numpy(np.asarray(values)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_pieces_are_those_of_placement(dtype: torch.dtype, parts: int) -> None:
    full = settle(draw((5, 6), dtype))
    mesh = Mesh((parts,))
    for placement in choices(full):
        pieces = [piece.numpy() for piece in cut(full, placement, parts, np.random.default_rng(3))]
        together = combine(pieces, (placement,), mesh, (5, 6))
        if placement == P("avg"):  # the division rounds once
            np.testing.assert_allclose(together, full.numpy(), rtol=1e-5 if dtype == torch.float32 else 1e-14)
        else:
            np.testing.assert_array_equal(together, full.numpy())
        if not placement.is_partial:
            for mine, due in zip(pieces, split(full.numpy(), (placement,), mesh), strict=True):
                np.testing.assert_array_equal(mine, due)


@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min", "product"])
def test_partial_pieces_have_both_signs_and_many_bits(reduction: str) -> None:
    full = settle(draw((40,), torch.float64))
    pieces = cut(full, P(reduction), 3, np.random.default_rng(1))
    for piece in pieces:
        assert (piece > 0).any() and (piece < 0).any()
        assert not torch.equal(piece, full)
    if reduction in ("sum", "avg"):
        assert all((piece * 2**20 % 1 != 0).sum() > 30 for piece in pieces)


def _by_combining(
    experiment: Experiment, combination: tuple[int, ...], placement: Placement, whole: torch.Tensor
) -> bool:
    held = [experiment.pieces(place, k) for place, k in enumerate(combination)]
    try:
        local = [
            results(experiment.run([piece[rank] for piece in held]))[0] for rank in range(experiment.parts)
        ]
    except Exception:
        return False
    mesh = Mesh((experiment.parts,))
    arrays = [piece.numpy() for piece in local]
    try:
        together = combine(arrays, (placement,), mesh, tuple(whole.shape))
    except LayoutError:
        return False
    if placement.kind == "B" and not all(np.allclose(piece, arrays[0], atol=1e-9) for piece in arrays):
        return False
    return bool(np.allclose(together, whole.numpy(), rtol=0, atol=1e-9))


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    "function", [torch.add, torch.mul, torch.mm, torch.maximum, lambda x, y: torch.cat([x, y], 1), torch.le]
)
def test_judgement_is_that_of_combine(function: Any, parts: int) -> None:
    inputs = [settle(draw((6, 6), torch.float64, seed)) for seed in (1, 2)]
    whole = results(function(*inputs))
    some = [choices(tensor) for tensor in inputs]
    placements = candidates(whole[0])
    experiment = Experiment(
        Call("f", function, tuple(inputs)).run,
        inputs,
        some,
        whole,
        [placements],
        parts,
        np.random.default_rng(0),
    )
    combinations = list(itertools.product(*(range(len(each)) for each in some)))
    right = 0
    for combination, masks in zip(combinations, experiment.evaluate(combinations), strict=True):
        for bit, placement in enumerate(placements):
            mine = masks is not None and bool(masks[0] >> bit & 1)
            assert mine == _by_combining(experiment, combination, placement, whole[0]), (
                combination,
                placement,
            )
            right += mine
    assert right > 3


def test_sizes_as_arguments_are_made_local() -> None:
    call = Call("reshape", torch.reshape, (torch.arange(24.0), [4, -1]))
    assert str(with_sizes(call, (4, 6), (2, 6))) == "reshape(f32[24], [2, 6])"
    variants = [
        Call("reshape", torch.reshape, (draw((rows * 6,), torch.float64), [rows, 6])) for rows in (12, 7)
    ]
    needs = {(s.inputs, s.placement): s.needs for s in find_signatures(variants).signatures}
    assert needs[("S(0)",), "S(0)"] == (EVEN, LOCAL_SIZES)
    assert (("S(0)",), "S(1)") not in needs


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (torch.rand_like, "random"),
        (torch.empty_like, "random|uninitialised"),
        (lambda x: x.add_(1), "writes to its arguments"),
        (lambda x: torch.linalg.cholesky(x), "raises"),
        (lambda x: None, "no tensor among the results"),
    ],
)
def test_what_cannot_be_judged_is_said(function: Any, reason: str) -> None:
    with pytest.raises(CannotJudge, match=reason):
        find_signatures([Call("f", function, (draw((6, 8), torch.float64),))])


def test_a_write_to_an_argument_happens_to_a_copy() -> None:
    variants = [Call("fill_", lambda x: x.fill_(3.0), (draw((6, 12), torch.float64),), written=(0,))]
    found = {f"{s.inputs[0]} -> {s.placement}" for s in find_signatures(variants).signatures}
    assert "S(0) -> S(0)" in found and "P -> P" not in found


def test_several_outputs_are_judged_each_on_its_own() -> None:
    variants = [Call("max", lambda x: torch.max(x, 1), (draw((6, 12), torch.float64),))]
    found = {(s.inputs[0], s.output, s.placement) for s in find_signatures(variants).signatures}
    assert ("S(1)", 0, "P(max)") in found
    assert not any(inputs == "S(1)" and output == 1 for inputs, output, _ in found)


def test_too_many_inputs_are_tried_in_part_and_that_is_said() -> None:
    tensors = [draw((4, 4), torch.float64, seed) for seed in range(6)]
    findings = find_signatures([Call("cat", lambda x: torch.cat(x), (tensors,))], limit=100)
    assert findings.how.startswith("at most 1 of 6 inputs off B, and all alike")
    assert any(s.inputs == ("S(1)",) * 6 and s.placement == "S(1)" for s in findings.signatures)
