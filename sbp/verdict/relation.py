"""How a result differs from the reference, in words, found by trying."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from sbp.placement import (
    SBP,
    Array,
    LayoutError,
    Mesh,
    disagreeing_ranks,
    parse_sbp,
    reduce_partials,
    take_local,
)

# A relation counts as found when it explains all but this part of the result's norm.
_EXPLAINED = 1e-9
# Shifts are tried up to so many places.
_LONGEST_SHIFT = 4
# Above this n, n/(n-1) says nothing: any factor near 1 is one.
_LARGEST_COUNT = 4096


def describe_difference(
    pieces: Sequence[Array | None], expected: Array, claimed: str | None, mesh: Mesh
) -> str:
    """Say how the ranks' pieces differ from ``expected`` under the placement that the subject claims.

    Args:
        pieces: each rank's piece, None where it is not known.
        expected: the whole reference tensor.
        claimed: the claimed SBP, None for a plain tensor on every rank.

    Returns: words such as ``4 x the reference (x the number of ranks) on every rank``.
    """
    sbp = parse_sbp(claimed if claimed is not None else "B", mesh)
    if any(piece is None for piece in pieces):
        return "differs"
    held = [piece for piece in pieces if piece is not None]
    try:
        held = reduce_partials(held, sbp, mesh)
    except LayoutError as error:
        return str(error)
    due = [take_local(expected, sbp, mesh, rank) for rank in range(mesh.size)]
    off = [rank for rank in range(mesh.size) if not _close(held[rank], due[rank])]
    if not off:
        return "differs by little more than rounding"
    where = " on every rank" if len(off) == mesh.size else f" on rank{'s' * (len(off) > 1)} {_list(off)}"
    words = _explain([held[rank] for rank in off], [due[rank] for rank in off], mesh)
    if words is None:
        words = _explain_from_pieces(held, due, pieces, expected, sbp, mesh, off)
    words = words or "differs, by no simple rule"
    if disagreeing_ranks(held, sbp, mesh):
        words = f"replicas differ; {words}"
    return words + where


def _explain(held: list[Array], due: list[Array], mesh: Mesh) -> str | None:
    """Relations that hold element by element, the same on all the ranks that are off."""
    one = np.concatenate([piece.reshape(-1) for piece in held])
    other = np.concatenate([piece.reshape(-1) for piece in due])
    if one.dtype.kind == "b":
        return "true and false swapped" if np.array_equal(one, ~other.astype(bool)) else None
    missing = np.isnan(one) & ~np.isnan(other)
    if missing.any():
        return f"NaN in {int(missing.sum())} of {one.size} elements, where the reference has numbers"
    endless = np.isinf(one) & np.isfinite(other)
    if endless.any():
        return f"infinite in {int(endless.sum())} of {one.size} elements, where the reference has numbers"
    one, other = one.astype(_wide(one)), other.astype(_wide(other))
    if not np.any(one):
        return "zero, where the reference is not"
    factor = _factor(one, other)
    if factor is not None:
        return _factor_words(factor, mesh)
    shift = one - other
    if np.ptp(shift.real) <= _EXPLAINED * np.abs(one).max() and abs(shift[0]) > 0:
        return f"the reference {'+' if shift[0].real > 0 else '-'} {abs(shift[0]):.6g}"
    wrong = ~np.isclose(one, other, rtol=_EXPLAINED, atol=_EXPLAINED * (np.abs(other).max() or 1.0))
    factor = _factor(one[wrong], other[wrong])
    if factor is not None and 0 < wrong.sum() < one.size:
        part = f"in {int(wrong.sum())} of {one.size} elements "
        return part + ("zero" if factor == 0 else _factor_words(factor, mesh))
    return None


def _explain_from_pieces(
    held: list[Array],
    due: list[Array],
    raw: Sequence[Array | None],
    expected: Array,
    sbp: SBP,
    mesh: Mesh,
    off: list[int],
) -> str | None:
    """Relations among the ranks: another rank's part, a piece of a sum, the total."""
    for rank in off:
        for other in range(mesh.size):
            if other != rank and due[other].shape == held[rank].shape and _close(held[rank], due[other]):
                return f"the part of another rank (rank {rank} holds that of rank {other})"
    first = off[0]
    if len({piece.shape for piece in held}) == 1:
        total = np.sum(np.stack([piece.astype(_wide(piece)) for piece in held]), axis=0)
        if total.shape == due[first].shape:
            if _close(total, due[first]):
                return "the ranks' pieces add up to the reference: P is held, but not claimed"
            if _close(total / mesh.size, due[first]):
                return "the ranks' mean is the reference: P(avg) is held, but not claimed"
    shape = held[first].shape
    square = len(shape) >= 2 and shape[-1] == shape[-2]
    if square and all(_close(np.swapaxes(held[rank], -1, -2), due[rank]) for rank in off):
        return "transposed"
    pairs = [(held[rank], due[rank]) for rank in off]
    moved = _moved(pairs)
    if moved is not None:
        return moved
    same = [np.sort(held[rank].reshape(-1)) for rank in off], [np.sort(due[rank].reshape(-1)) for rank in off]
    if all(_close(one, other) for one, other in zip(*same, strict=True)) and held[first].size > 1:
        return "the right numbers in other places"
    return _only_at_the_end(pairs)


def _moved(pairs: list[tuple[Array, Array]]) -> str | None:
    """Blocks of a dimension in another order, or all of it shifted, the same way on all the ranks."""
    shape = pairs[0][0].shape
    if any(one.shape != shape or other.shape != shape for one, other in pairs):
        return None
    for dim, extent in enumerate(shape):
        for count in (2, 3, 4):
            if extent == 0 or extent % count:
                continue
            for order in permutations(range(count)):
                if all(_close(one, _reordered(other, dim, order)) for one, other in pairs):
                    return f"the {count} blocks along dim {dim} in the order {_list(order)}"
        for step in range(1, min(extent, _LONGEST_SHIFT + 1)):
            for signed in (step, -step):
                if all(_close(one, np.roll(other, signed, dim)) for one, other in pairs):
                    return f"shifted by {signed:+d} along dim {dim}, the end put at the other side"
                kept = slice(signed, None) if signed > 0 else slice(None, signed)
                source = slice(None, -signed) if signed > 0 else slice(-signed, None)
                # One row that fits may be chance; two are not.
                if extent - step >= 2 and all(
                    _close(np.moveaxis(one, dim, 0)[kept], np.moveaxis(other, dim, 0)[source])
                    for one, other in pairs
                ):
                    return f"shifted by {signed:+d} along dim {dim}"
    return None


def _reordered(array: Array, dim: int, order: Sequence[int]) -> Array:
    blocks = np.split(array, len(order), dim)
    return np.concatenate([blocks[block] for block in order], dim)


def _only_at_the_end(pairs: list[tuple[Array, Array]]) -> str | None:
    """Whether all that is wrong lies in the last part of a dimension, where padding would be."""
    shape = pairs[0][0].shape
    if any(one.shape != shape or other.shape != shape for one, other in pairs):
        return None
    for dim, extent in enumerate(shape):
        right = 0
        while right < extent and all(
            _close(np.moveaxis(one, dim, 0)[right], np.moveaxis(other, dim, 0)[right]) for one, other in pairs
        ):
            right += 1
        if 0 < extent - right <= extent // 2:
            return f"wrong only in the last {extent - right} of {extent} along dim {dim} (padding?)"
    return None


def _factor(one: Array, other: Array) -> complex | float | None:
    """c where one = c * other throughout, else None."""
    if one.size == 0:
        return None
    weight = np.vdot(other, other)
    if weight == 0 or not np.isfinite(weight):
        return None
    with np.errstate(all="ignore"):
        factor = np.vdot(other, one) / weight
    if not np.isfinite(factor):
        return None
    if np.linalg.norm(one - factor * other) > _EXPLAINED * np.linalg.norm(one) and np.any(one):
        return None
    return complex(factor) if np.iscomplexobj(factor) else float(factor)


def _factor_words(factor: complex | float, mesh: Mesh) -> str:
    known = {mesh.size: "the number of ranks"}
    for axis, extent in enumerate(mesh.shape):
        if mesh.ndim > 1 and extent > 1:
            known.setdefault(extent, f"the ranks on mesh axis {axis}")
    value = abs(factor)
    for count, words in known.items():
        if count > 1 and abs(factor - count) < 1e-6 * count:
            return f"{count} x the reference (x {words})"
        if count > 1 and abs(factor - 1 / count) < 1e-6:
            return f"1/{count} of the reference (/ {words})"
    if abs(factor + 1) < 1e-9:
        return "the negative of the reference"
    rounded = round(value)
    if rounded and abs(value - rounded) < 1e-6 and np.real(factor) > 0:
        return f"{rounded} x the reference"
    if 1 < value < 2 and np.real(factor) > 0:
        count = round(value / (value - 1))
        if 3 <= count <= _LARGEST_COUNT and abs(value - count / (count - 1)) < 1e-9:
            return f"{count}/{count - 1} x the reference (unbiased instead of biased, over {count} values?)"
    if 0.5 < value < 1 and np.real(factor) > 0:
        count = round(1 / (1 - value))
        if 3 <= count <= _LARGEST_COUNT and abs(value - (count - 1) / count) < 1e-9:
            return f"{count - 1}/{count} of the reference (biased instead of unbiased, over {count} values?)"
    return f"{factor:.6g} x the reference"


def _wide(array: Array) -> type:
    return np.complex128 if array.dtype.kind == "c" else np.float64


def _close(one: Array, other: Array) -> bool:
    if one.shape != other.shape:
        return False
    if one.size == 0:
        return True
    one, other = one.astype(_wide(one)), other.astype(_wide(other))
    scale = np.abs(other[np.isfinite(other)]).max(initial=0.0) or 1.0
    return bool(np.allclose(one, other, rtol=1e-9, atol=1e-10 * scale, equal_nan=True))


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
