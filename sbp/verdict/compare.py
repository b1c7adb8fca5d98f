"""One rank's piece of one quantity against its own part of the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sbp.placement import Array, Mesh, PlacementError, local_shape, parse_mesh, parse_sbp, take_local

parse_sbp_cached = lru_cache(maxsize=4096)(parse_sbp)
# Two random patterns with so many zeros and other elements are the same by chance less than once in 10,000 times.
_TELLING_ZEROS = 8
# A buffer, or a tensor after a write, may well be zero; it was not before, or shows nothing else.
_SHOULD_SPEAK = ("value", "gradient")
parse_mesh_cached = lru_cache(maxsize=64)(parse_mesh)


@dataclass(frozen=True)
class Observed:
    """What one rank holds of one quantity, as the subject has it.

    Attributes:
        name, kind: see sbp.program (``value``, ``gradient`` or ``state``).
        claimed: the SBP that the subject claims, as text; None for a plain tensor, which claims nothing and
            must then be whole on every rank.
        shape, dtype: of the global tensor, as claimed; the shape is None where the subject does not say it.
        local: the local piece, or None where the subject has no such result (no gradient).
        mesh: the mesh of the claim, where it is not the trial's.
        like: the name of the reference's quantity that it is compared with, where that is not its own name.
        problem: what is wrong with the claim itself.
    """

    name: str
    kind: str
    claimed: str | None = None
    shape: tuple[int, ...] | None = ()
    dtype: str = ""
    local: Array | None = None
    mesh: str | None = None
    like: str | None = None
    problem: str = ""


@dataclass(frozen=True)
class Row:
    """The comparison of one rank's piece; small, since it crosses from each rank to the judge.

    Attributes:
        claimed: the claimed SBP, None for a plain tensor.
        problem: why the layout is wrong (shape, dtype, presence), else empty.
        max_abs_error, difference_norm: of this rank's part against the reference's; 0 where ``data`` is sent.
        expected_norm: the L2 norm of the whole expected tensor.
        digest: a fingerprint of the piece's bits, by which replicas are compared.
        data: the piece itself where it means nothing alone (P).
        expected: the reference's whole tensor, from the first rank only and only beside ``data``.
        dtype: the expected dtype, or the one that the computation ran in where that is a lower one (autocast).
        mesh: the mesh of the claim, where it is not the trial's.
        zeros: only of random results, whose values are not compared: a fingerprint of where the piece is zero, ``-``
            where that tells nothing.
        promise: of a random result, what it keeps in any case; ``data`` is sent then.
        noise: what rounding explains of a difference, as an L2 norm and as the largest element; zeros where unknown.
        silent: whether the reference is zero throughout, so that a wrong factor could not show.
    """

    name: str
    kind: str
    claimed: str | None
    problem: str = ""
    max_abs_error: float = 0.0
    difference_norm: float = 0.0
    expected_norm: float = 0.0
    digest: str = ""
    dtype: str = ""
    data: Array | None = None
    expected: Array | None = None
    mesh: str | None = None
    zeros: str = ""
    promise: str = ""
    noise: tuple[float, float] = (0.0, 0.0)
    silent: bool = False

    def to_list(self) -> list[Any]:
        """For the wire."""
        return [getattr(self, name) for name in _ROW_FIELDS]

    @staticmethod
    def from_list(values: Sequence[Any]) -> Row:
        return Row(**dict(zip(_ROW_FIELDS, values, strict=True)))


_ROW_FIELDS = tuple(Row.__dataclass_fields__)


def compare_piece(
    observed: Observed | None,
    name: str,
    kind: str,
    expected: Array | None,
    expected_dtype: str,
    expected_norm: float,
    mesh: Mesh,
    rank: int,
    random: bool = False,
    promise: str = "",
    noise: tuple[float, float] = (0.0, 0.0),
) -> Row:
    """Compare what ``rank`` holds with its part of ``expected`` under the placement that the subject claims.

    ``observed`` is None, or has no local piece, where the subject has no such result; ``expected`` is None where
    the reference has none. The values of a ``random`` result are not compared.
    """
    claimed = observed.claimed if observed is not None else None
    if observed is None or observed.local is None:
        problem = "" if expected is None else "missing: the reference has one, the subject has none"
        return Row(name, kind, claimed, problem, expected_norm=expected_norm, dtype=expected_dtype)
    local = observed.local
    digest = fingerprint(local)
    if expected is None:
        problem = "unexpected: the subject has one, the reference has none"
        return Row(name, kind, claimed, problem, digest=digest)

    if observed.mesh is not None:
        mesh = parse_mesh_cached(observed.mesh)

    def wrong_layout(problem: str) -> Row:
        return Row(
            name, kind, claimed, problem, 0.0, 0.0, expected_norm, digest, expected_dtype, mesh=observed.mesh
        )

    if observed.problem:
        return wrong_layout(observed.problem)
    if observed.dtype != expected_dtype:
        return wrong_layout(f"dtype is {observed.dtype}, the reference's is {expected_dtype}")
    if claimed is not None and observed.shape is not None and tuple(observed.shape) != expected.shape:
        return wrong_layout(f"shape is {tuple(observed.shape)}, the reference's is {expected.shape}")
    sbp = parse_sbp_cached(claimed if claimed is not None else "B", mesh)
    try:
        due = local_shape(expected.shape, sbp, mesh, rank)
    except PlacementError as error:
        return wrong_layout(str(error))
    if local.shape != due:
        what = f"{claimed} of {expected.shape} gives it" if claimed is not None else "the reference's is"
        return wrong_layout(f"local shape is {local.shape}, {what} {due}")
    row = Row(
        name,
        kind,
        claimed,
        "",
        0.0,
        0.0,
        expected_norm,
        digest,
        expected_dtype,
        mesh=observed.mesh,
        noise=noise,
        silent=not random and kind in _SHOULD_SPEAK and expected.size > 0 and not expected.any(),
    )
    if random:
        data = local if promise and kind == "value" else None
        return replace(row, zeros=_pattern_of_zeros(local), data=data, promise=promise)
    if any(placement.is_partial for placement in sbp):
        return replace(row, data=local, expected=expected if rank == 0 else None)
    largest, norm = difference(local, take_local(expected, sbp, mesh, rank))
    return replace(row, max_abs_error=largest, difference_norm=norm)


def difference(actual: Array, expected: Array) -> tuple[float, float]:
    """The largest absolute difference and the L2 norm of the difference; infinite where NaN or an infinity
    stands on one side only."""
    if actual.size == 0:
        return 0.0, 0.0
    if actual.dtype.kind in "biu" and expected.dtype.kind in "biu":
        if np.array_equal(actual, expected):
            return 0.0, 0.0
        apart = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
        return float(apart.max()), float(np.linalg.norm(apart))
    wide = np.complex128 if "c" in (actual.dtype.kind, expected.dtype.kind) else np.float64
    one, other = actual.astype(wide, copy=False), expected.astype(wide, copy=False)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(one - other)
    largest = float(apart.max())
    if np.isfinite(largest):
        return largest, float(np.linalg.norm(apart))
    # The same NaN or infinity on both sides is agreement.
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    apart = np.where(same, 0.0, apart)
    apart = np.where(np.isnan(apart), np.inf, apart)
    return float(apart.max()), float(np.linalg.norm(apart)) if np.isfinite(apart).all() else float("inf")


def fingerprint(piece: Array) -> str:
    """Equal for equal bits, shapes and dtypes."""
    label = f"{piece.dtype.str}{piece.shape}".encode()
    return hashlib.blake2b(label + piece.tobytes(), digest_size=8).hexdigest()


def computed_in(rows: Sequence[Row], dtype: str) -> list[Row]:
    """The rows of a run that computed in ``dtype``, whatever its results are stored in: they are no more exact."""
    return [replace(row, dtype=dtype) if "float" in row.dtype else row for row in rows]


def _pattern_of_zeros(piece: Array) -> str:
    """What tells two random pieces apart whatever they were multiplied with: equal for equal places of the zeros, or
    without zeros for equal values; ``-`` where too few elements could be one thing or the other."""
    zeros = piece == 0
    count = int(np.count_nonzero(zeros))
    if min(count, piece.size - count) >= _TELLING_ZEROS:
        return fingerprint(zeros)
    return fingerprint(piece) if len(np.unique(piece)) >= _TELLING_ZEROS else "-"


def compare_all(
    observed: Mapping[str, Observed],
    expected: Mapping[str, Any],
    mesh: Mesh,
    rank: int,
    reached: bool,
    random: bool = False,
    promise: str = "",
) -> list[Row]:
    """The rows of one rank, in the reference's order.

    ``expected`` maps names to objects with ``kind``, ``value``, ``dtype``, ``norm`` and ``noise``. Where the subject
    ended early (``reached`` is False), what it did not get to is left out instead of being called missing.
    """
    rows = []
    for name, due in expected.items():
        if name not in observed and not reached:
            continue
        rows.append(
            compare_piece(
                observed.get(name),
                name,
                due.kind,
                due.value,
                due.dtype,
                due.norm,
                mesh,
                rank,
                random,
                promise,
                due.noise,
            )
        )
    for name, extra in observed.items():
        if name in expected:
            continue
        due = expected.get(extra.like) if extra.like is not None else None
        if due is not None:
            rows.append(
                compare_piece(
                    extra,
                    name,
                    due.kind,
                    due.value,
                    due.dtype,
                    due.norm,
                    mesh,
                    rank,
                    random,
                    promise,
                    due.noise,
                )
            )
        else:
            rows.append(compare_piece(extra, name, extra.kind, None, "", 0.0, mesh, rank))
    return rows
