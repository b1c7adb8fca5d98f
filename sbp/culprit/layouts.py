"""How plain tensors lie that claim nothing: found by trying which layout makes the reference of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sbp.placement import Array, Mesh

# More than enough for two mesh axes; deeper meshes have more layouts than it is worth to try.
_MOST_TRIES = 512


def fitting_layout(
    pieces: Sequence[Array], expected: Array, mesh: Mesh, limit: float, scales: Sequence[float] = (1.0,)
) -> tuple[str | None, bool]:
    """The layout in which the ranks' pieces are ``expected``.

    Args:
        pieces: each rank's tensor.
        expected: the reference's whole tensor.
        limit: the L2 norm of a difference that is none.
        scales: by how much larger the pieces may be (a gradient of a mean over a part of the batch).

    Returns: its text (``S(0)``; ``B, P`` on two axes) and True; None and whether the shapes could be put together at
    all, so that the values are what differs.
    """
    possible = False
    for tried, (words, whole) in enumerate(_merged(list(pieces), mesh, mesh.ndim - 1)):
        if tried >= _MOST_TRIES:
            break
        if whole.shape != expected.shape:
            continue
        possible = True
        for scale in scales:
            if distance(whole, expected * scale) <= limit * scale:
                return words, True
    return None, possible


def distance(one: Array, other: Array) -> float:
    """The L2 norm of the difference; infinite where NaN or an infinity stands on one side only."""
    wide = np.complex128 if "c" in (one.dtype.kind, other.dtype.kind) else np.float64
    left, right = one.astype(wide, copy=False), other.astype(wide, copy=False)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0, left - right)
    norm = float(np.linalg.norm(apart))
    return norm if np.isfinite(norm) else float("inf")


def _merged(pieces: list[Array], mesh: Mesh, axis: int) -> Iterator[tuple[str, Array]]:
    """Every way to put the pieces together, from the last mesh axis on: the layout and the whole."""
    if axis < 0:
        yield "", pieces[0]
        return
    count = mesh.shape[axis]
    groups = [pieces[first : first + count] for first in range(0, len(pieces), count)]
    for word, merged in _along_one_axis(groups):
        for words, whole in _merged(merged, mesh, axis - 1):
            yield f"{words}, {word}" if words else word, whole


def _along_one_axis(groups: list[list[Array]]) -> Iterator[tuple[str, list[Array]]]:
    alike = all(len({piece.shape for piece in group}) == 1 for group in groups)
    if alike and all(_same(piece, group[0]) for group in groups for piece in group):
        yield "B", [group[0] for group in groups]
    for dim in range(groups[0][0].ndim):
        rest = [{piece.shape[:dim] + piece.shape[dim + 1 :] for piece in group} for group in groups]
        if all(len(shapes) == 1 for shapes in rest):
            yield f"S({dim})", [np.concatenate(group, dim) for group in groups]
    if alike and all(_is_inexact(piece) for group in groups for piece in group):
        yield "P", [np.sum(np.stack(group), axis=0) for group in groups]


def _is_inexact(piece: Array) -> bool:
    return piece.dtype.kind in "fc"


def _same(one: Array, other: Array) -> bool:
    return np.array_equal(one, other, equal_nan=_is_inexact(one))
