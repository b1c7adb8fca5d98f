"""Cuts torch tensors for experiments on a mesh of one axis, as placement.py says.

What is new here is how partial pieces are drawn. placement.py draws them of few bits, which serves to put them
together exactly; an operator that rounds would not notice such pieces. Here they have as many bits as the tensor
itself. Whether pieces add up is checked against ``placement.combine`` in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sbp.numbers import on_grid
from sbp.placement import B, P, Placement, S, chunk_bounds

Array = NDArray[Any]

PARTIALS = ("sum", "avg", "max", "min")
"""The partial placements that inputs are tried with."""


def choices(tensor: torch.Tensor, partials: Sequence[str] = PARTIALS) -> list[Placement]:
    """The placements of a tensor along one axis: B, S(d) for each dimension, and those of ``partials`` that its dtype
    has pieces for: none for booleans, no average for integers, no order for complex numbers."""
    found = [B, *(S(dim) for dim in range(tensor.ndim))]
    if tensor.dtype == torch.bool or not _has_numpy(tensor.dtype):
        return found
    for reduction in partials:
        if reduction in ("max", "min") and tensor.is_complex():
            continue
        if reduction in ("avg", "product") and not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        found.append(P(reduction))
    return found


def _has_numpy(dtype: torch.dtype) -> bool:
    return dtype in (
        torch.float64,
        torch.float32,
        torch.complex128,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    )


def settle(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy without its lowest bits, so that partial pieces of it add up exactly."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in (torch.float64, torch.float32, torch.complex128, torch.complex64):
        return torch.from_numpy(np.array(on_grid(tensor.numpy())))
    return tensor.clone()


def cut(
    full: torch.Tensor, placement: Placement, parts: int, random: np.random.Generator
) -> list[torch.Tensor]:
    """The pieces of ``full`` on a mesh of ``parts`` ranks. Pieces under B are one and the same tensor."""
    if placement.is_split:
        pieces = []
        for index in range(parts):
            start, stop = chunk_bounds(full.shape[placement.dim], parts, index)
            pieces.append(full.narrow(placement.dim, start, stop - start).contiguous())
        return pieces
    if placement.is_partial:
        whole = full.numpy()
        drawn = draw_partials(whole, parts, placement.reduction, random)
        return [torch.from_numpy(np.ascontiguousarray(piece).reshape(whole.shape)) for piece in drawn]
    return [full] * parts


def draw_partials(whole: Array, parts: int, reduction: str, random: np.random.Generator) -> list[Array]:
    """Pieces of the shape of ``whole`` whose ``reduction`` is ``whole``; both signs, no piece like another."""
    if reduction in ("max", "min"):
        owner = random.integers(0, parts, whole.shape)
        pieces = []
        for index in range(parts):
            noise = _noise(whole, random)
            with np.errstate(invalid="ignore"):
                loser = whole - np.abs(noise) if reduction == "max" else whole + np.abs(noise)
            if whole.dtype.kind in "iu":  # must not wrap around to the other end
                loser = np.minimum(loser, whole) if reduction == "max" else np.maximum(loser, whole)
            else:
                # A NaN or the infinity that wins need not be on every rank.
                loser = np.where(
                    np.isfinite(whole) | (whole == (-np.inf if reduction == "max" else np.inf)), loser, noise
                )
            # Zero is a value that tests for equality and truth look for, so some losers are zero.
            below = whole > 0 if reduction == "max" else whole < 0
            loser = np.where(below & (random.random(whole.shape) < 0.25), 0, loser)
            pieces.append(np.where(owner == index, whole, loser).astype(whole.dtype))
        return pieces
    place = int(random.integers(0, parts))  # the piece that makes up the rest is not always the last
    if reduction == "product":
        # Powers of two, by which a number can be divided without rounding.
        shape = whole.shape
        pieces = [
            np.asarray(2.0 ** random.integers(-2, 3, shape) * random.choice([-1.0, 1.0], shape), whole.dtype)
            for _ in range(parts - 1)
        ]
        rest = whole
        for piece in pieces:
            rest = rest / piece
    else:
        pieces = [_noise(whole, random) for _ in range(parts - 1)]
        rest = whole * whole.dtype.type(parts) if reduction == "avg" else whole
        for piece in pieces:
            rest = rest - piece
    pieces.insert(place, np.asarray(rest, dtype=whole.dtype))
    return pieces


def _noise(like: Array, random: np.random.Generator) -> Array:
    """Random values of the size of the largest in ``like``, both signs, on the same grid of numbers."""
    if like.dtype.kind in "iu":
        reach = int(np.max(np.abs(like.astype(np.float64)), initial=0)) + 3
        limits = np.iinfo(like.dtype)
        low, high = max(-reach, int(limits.min)), min(reach, int(limits.max))
        return random.integers(low, high, like.shape, dtype=like.dtype, endpoint=True)
    if like.dtype.kind == "c":
        both = [_noise(np.asarray(np.abs(like)).astype(like.real.dtype), random) for _ in range(2)]
        return np.asarray(both[0] + 1j * both[1], dtype=like.dtype)
    finite = np.abs(like[np.isfinite(like)])
    largest = float(np.max(finite, initial=0.0)) or 1.0
    values = random.uniform(0.05, 2.0, like.shape) * random.choice([-1.0, 1.0], like.shape) * largest
    return np.asarray(on_grid(np.asarray(values, dtype=like.dtype)))
