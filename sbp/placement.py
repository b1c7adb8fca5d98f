"""What S, B and P mean: how a tensor is cut into the ranks' pieces, and put together again.

This is the meaning of a placement, written once. Inputs are cut here and results are judged by it, so
nothing in this module may come from a system under test. It needs numpy alone.

Three words:

* a *placement* says how a tensor lies along one mesh axis: ``S(d)`` split along dimension d, ``B``
  broadcast (every rank has all of it), ``P`` partial (the value is the sum of the ranks' pieces; also
  ``P(avg)``, ``P(max)``, ``P(min)``);
* an *SBP* is a tuple of placements, one for each mesh axis;
* a *mesh* is the ranks as a grid, numbered row by row (the last axis runs fastest).

An uneven split follows ``torch.chunk``: pieces of ``ceil(n / k)``, then one smaller, then empty ones. Several
splits of one dimension apply from the first mesh axis to the last.

>>> mesh = parse_mesh("2x2")
>>> sbp = parse_sbp("(S(0), P)", mesh)
>>> pieces = split(np.arange(6.0).reshape(3, 2), sbp, mesh, np.random.default_rng(0))
>>> [piece.shape for piece in pieces]
[(2, 2), (2, 2), (1, 2), (1, 2)]
>>> combine(pieces, sbp, mesh, (3, 2)).tolist()
[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

REDUCTIONS = ("sum", "avg", "max", "min")
"""What a partial placement may be, to be cut by :func:`split`. A result may also be ``product`` or ``norm2``
(the root of the sum of squares; any other order likewise), which can be combined but not drawn."""

_RESULT_REDUCTION = re.compile(r"sum|avg|max|min|product|norm(\d+(?:\.\d+)?)")


class PlacementError(ValueError):
    """A placement, SBP or mesh that cannot be read or does not fit the tensor; says what would fit."""


class LayoutError(ValueError):
    """A rank's piece does not have the shape that the placement gives it."""


@dataclass(frozen=True)
class Placement:
    """How a tensor lies along one mesh axis. Build with :func:`S`, :data:`B`, :func:`P` or :func:`parse`.

    ``factor`` is above 1 for DTensor's strided split only: the dimension is first cut into ``factor`` chunks,
    then each of them is split among the ranks (what a later, inner split looks like to an outer axis).
    Hand-written code may cut otherwise: ``balanced`` as numpy.array_split does (the first pieces are one longer),
    or into pieces of ``sizes``.
    """

    kind: str  # "S", "B" or "P"
    dim: int = 0
    reduction: str = "sum"
    factor: int = 1
    balanced: bool = False
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind == "S":
            how = f", factor={self.factor}" if self.factor != 1 else ""
            how += ", balanced" if self.balanced else ""
            how += f", sizes={'+'.join(map(str, self.sizes))}" if self.sizes else ""
            return f"S({self.dim}{how})"
        if self.kind == "P":
            return "P" if self.reduction == "sum" else f"P({self.reduction})"
        return "B"

    __repr__ = __str__

    @property
    def is_split(self) -> bool:
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"


def S(dim: int, factor: int = 1, *, balanced: bool = False, sizes: Sequence[int] = ()) -> Placement:
    """Split along dimension ``dim`` (negative counts from the end)."""
    return Placement("S", dim=dim, factor=factor, balanced=balanced, sizes=tuple(sizes))


def P(reduction: str = "sum") -> Placement:
    """Partial: the value is the ``reduction`` (sum, avg, max or min) of the ranks' pieces."""
    if not _RESULT_REDUCTION.fullmatch(reduction):
        raise PlacementError(f"P({reduction}) is not a placement; use P, P(avg), P(max) or P(min)")
    return Placement("P", reduction=reduction)


B = Placement("B")
"""Broadcast: every rank along the axis holds all of the tensor."""

SBP = tuple[Placement, ...]


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid of ``shape``; rank r stands at ``numpy.unravel_index(r, shape)``."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or any(extent < 1 for extent in self.shape):
            raise PlacementError(f"a mesh needs at least one rank on each axis, got {self.shape}")

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` stands on each axis."""
        return _coordinates(self.shape)[rank]

    def ranks_along(self, axes: Iterable[int], rank: int) -> list[int]:
        """The ranks that differ from ``rank`` on ``axes`` only, in order, ``rank`` among them."""
        free = set(axes)
        here = self.coordinates(rank)
        return [
            other
            for other, there in enumerate(_coordinates(self.shape))
            if all(axis in free or there[axis] == here[axis] for axis in range(self.ndim))
        ]


@lru_cache(maxsize=256)
def _coordinates(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(i) for i in np.unravel_index(rank, shape)) for rank in range(prod(shape)))


# ------------------------------------------------------------------------------------------- reading

_SPLIT = re.compile(r"(?:S|Shard|split)\(\s*(?:dim\s*=\s*|axis\s*=\s*)?(-?\d{1,9})\s*\)", re.IGNORECASE)
_STRIDED = re.compile(
    r"(?:S|_StridedShard)\(\s*(?:dim\s*=\s*)?(-?\d{1,9})\s*,\s*(?:factor|sf|split_factor)\s*=\s*(\d{1,9})\s*\)",
    re.IGNORECASE,
)
_OWN_SPLIT = re.compile(
    r"S\(\s*(?:dim\s*=\s*)?(-?\d{1,9})\s*,\s*"
    r"(?:(balanced)|sizes\s*=\s*(\d{1,9}(?:\s*\+\s*\d{1,9})*))\s*\)",
    re.IGNORECASE,
)
_SHORT_SPLIT = re.compile(r"S(\d{1,9})", re.IGNORECASE)
_PARTIAL = re.compile(
    r"(?:_?Partial|P)(?:\(\s*(?:reduce_op\s*=\s*)?['\"]?([a-z]+[\d.]*)?['\"]?\s*\))?", re.IGNORECASE
)
_BROADCAST = {"b", "r", "replicate()", "replicate", "broadcast", "broadcast()", "b()", "r()"}


def parse(text: str) -> Placement:
    """Read one placement: the short form (``S(0)``, ``B``, ``P``, ``P(max)``), DTensor's (``Shard(dim=0)``,
    ``Replicate()``, ``Partial(sum)``) or OneFlow's (``split(0)``, ``broadcast``, ``partial_sum``).

    Raises PlacementError.
    """
    word = text.strip().removeprefix("oneflow.sbp.").removeprefix("flow.sbp.")
    if match := _SPLIT.fullmatch(word) or _SHORT_SPLIT.fullmatch(word):
        return S(int(match[1]))
    if match := _STRIDED.fullmatch(word):
        return S(int(match[1]), int(match[2]))
    if match := _OWN_SPLIT.fullmatch(word):
        sizes = tuple(int(size) for size in match[3].split("+")) if match[3] else ()
        return S(int(match[1]), balanced=bool(match[2]), sizes=sizes)
    if word.lower() in _BROADCAST:
        return B
    if word.lower().removesuffix("()") == "partial_sum":
        return P()
    if match := _PARTIAL.fullmatch(word):
        return P((match[1] or "sum").lower())
    raise PlacementError(f"{text!r} is not a placement; use S(0), B, P, or Shard(0), Replicate(), Partial()")


def parse_sbp(text: str, mesh: Mesh | None = None) -> SBP:
    """Read an SBP such as ``S(0)``, ``(S(0), B)`` or ``[Shard(0), Replicate()]``.

    With a ``mesh``, the number of placements must be its number of axes; a single ``B`` stands for all of
    them. Raises PlacementError.
    """
    word = text.strip()
    if word[:1] in "([" and word[-1:] in ")]":
        word = word[1:-1]
    parts = [part for part in _split_commas(word) if part.strip()]
    if not parts:
        raise PlacementError(f"{text!r} is not an SBP; write one placement for each mesh axis: (S(0), B)")
    sbp = tuple(parse(part) for part in parts)
    if mesh is not None and len(sbp) != mesh.ndim:
        if sbp == (B,):
            return (B,) * mesh.ndim
        raise PlacementError(
            f"{text!r} has {len(sbp)} placements, but mesh {mesh} has {mesh.ndim} axes; write one for each"
        )
    return sbp


def _split_commas(text: str) -> list[str]:
    """Split at the commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def parse_mesh(text: str) -> Mesh:
    """Read a mesh: ``4``, ``2x2``, ``(2, 2)``. Raises PlacementError."""
    numbers = re.split(r"\s*[x,×]\s*", text.strip().strip("()[]").strip().rstrip(","))
    if not all(re.fullmatch(r"\d{1,6}", number) for number in numbers):
        raise PlacementError(f"{text!r} is not a mesh; write the ranks on each axis, such as 4 or 2x2")
    return Mesh(tuple(int(number) for number in numbers))


def show(sbp: Sequence[Placement]) -> str:
    """Print an SBP: ``S(0)`` on one axis, ``(S(0), B)`` on several."""
    words = ", ".join(map(str, sbp))
    return words if len(sbp) == 1 else f"({words})"


def normalise(sbp: SBP, ndim: int) -> SBP:
    """The same SBP with dimensions counted from the front.

    Raises PlacementError where a dimension is not one of a tensor of ``ndim`` dimensions.
    """
    if not any(placement.is_split for placement in sbp):
        return sbp
    result = []
    for placement in sbp:
        if placement.is_split:
            if not -ndim <= placement.dim < ndim:
                raise PlacementError(f"{placement} does not fit a tensor of {ndim} dimensions")
            placement = replace(placement, dim=placement.dim % ndim)
        result.append(placement)
    return tuple(result)


# ------------------------------------------------------------------------------- where the pieces lie


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of piece ``index`` when ``size`` elements are cut into ``parts`` as torch.chunk does."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def _bounds(placement: Placement, size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of piece ``index`` under a split of ``size`` elements."""
    if placement.balanced:
        return _balanced(size, parts, index), _balanced(size, parts, index + 1)
    if not placement.sizes:
        return chunk_bounds(size, parts, index)
    if len(placement.sizes) != parts or sum(placement.sizes) < size:
        raise PlacementError(f"{placement} does not cut {size} elements into {parts} pieces")
    start = sum(placement.sizes[:index])
    return min(start, size), min(start + placement.sizes[index], size)


def _balanced(size: int, parts: int, index: int) -> int:
    """Where piece ``index`` starts when the first ``size % parts`` pieces are one longer than the rest."""
    return index * (size // parts) + min(index, size % parts)


@lru_cache(maxsize=65536)
def local_indices(shape: tuple[int, ...], sbp: SBP, mesh: Mesh, rank: int) -> tuple[slice | Array, ...]:
    """Which part of the full tensor ``rank`` holds: for each dimension a slice (an index array for a strided
    split). Partial axes hold the whole."""
    result: list[slice | Array] = [slice(0, size) for size in shape]
    coordinates = mesh.coordinates(rank)
    for axis, placement in enumerate(normalise(sbp, len(shape))):
        if not placement.is_split:
            continue
        held, parts, index = result[placement.dim], mesh.shape[axis], coordinates[axis]
        if placement.factor == 1 and isinstance(held, slice):
            start, stop = _bounds(placement, held.stop - held.start, parts, index)
            result[placement.dim] = slice(held.start + start, held.start + stop)
            continue
        numbers = np.arange(held.start, held.stop) if isinstance(held, slice) else held
        chosen = []
        for outer in range(placement.factor):
            first, last = chunk_bounds(len(numbers), placement.factor, outer)
            start, stop = _bounds(placement, last - first, parts, index)
            chosen.append(numbers[first + start : first + stop])
        result[placement.dim] = np.concatenate(chosen)
    return tuple(result)


@lru_cache(maxsize=65536)
def local_shape(shape: tuple[int, ...], sbp: SBP, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The shape of the piece of ``rank``."""
    return tuple(
        part.stop - part.start if isinstance(part, slice) else len(part)
        for part in local_indices(shape, sbp, mesh, rank)
    )


def take_local(full: Array, sbp: SBP, mesh: Mesh, rank: int) -> Array:
    """The part of ``full`` that ``rank`` holds, as a view where it can be one. Partial axes count as B."""
    parts = local_indices(full.shape, sbp, mesh, rank)
    if all(isinstance(part, slice) for part in parts):
        return full[parts]
    for dim, part in enumerate(parts):
        full = full[(slice(None),) * dim + (part,)]
    return full


# ------------------------------------------------------------------------------------- cut and combine


def split(full: Array, sbp: SBP, mesh: Mesh, random: np.random.Generator | None = None) -> list[Array]:
    """Cut ``full`` into one contiguous piece for each rank.

    Partial pieces are drawn from ``random`` (needed for P only) so that no piece resembles the whole; ranks
    that differ only along B axes get equal pieces. A partial axis of n ranks makes pieces up to 2 n - 1 times as large
    as what they are pieces of. ``combine`` gives ``full`` back exactly for integers, and for floats while they have
    the bits for that: those on the grid of ``numbers.on_grid`` are exact up to 2**12 times (float64) or 2**7 times
    (float32) their size. Others come back within a few units in the last place of the largest piece.

    Raises PlacementError where ``sbp`` does not fit the tensor or the mesh, or where P is asked of booleans.
    """
    _check_axes(sbp, mesh)
    full = np.asarray(full)
    sbp = normalise(sbp, full.ndim)
    pieces: list[Array | None] = [None] * mesh.size

    def cut(part: Array, axis: int, ranks: NDArray[np.int64]) -> None:
        """Give ``part`` to ``ranks``, a grid over the axes from ``axis`` on, each axis cut in turn."""
        if axis == mesh.ndim:
            for rank in ranks.reshape(-1):
                pieces[int(rank)] = np.ascontiguousarray(part).reshape(part.shape)
            return
        placement, extent = sbp[axis], mesh.shape[axis]
        if placement.kind == "B":
            # One draw serves all replicas: the axes behind are cut once, for all of them together.
            cut_for_replicas(part, axis, ranks)
        elif placement.is_partial:
            for index, piece in enumerate(_draw_partials(part, extent, placement.reduction, random)):
                cut(piece, axis + 1, ranks[:, index])
        else:
            single = Mesh((extent,))
            for index in range(extent):
                cut(take_local(part, (placement,), single, index), axis + 1, ranks[:, index])

    def cut_for_replicas(part: Array, axis: int, ranks: NDArray[np.int64]) -> None:
        merged = np.moveaxis(ranks, 1, 0)
        cut(part, axis + 1, merged.reshape(-1, *ranks.shape[2:]))

    # A leading axis of length one holds the replicas that receive the same piece.
    cut(full, 0, np.arange(mesh.size).reshape(1, *mesh.shape))
    return [piece for piece in pieces if piece is not None]


def _draw_partials(
    whole: Array, parts: int, reduction: str, random: np.random.Generator | None
) -> list[Array]:
    """Pieces of the shape of ``whole`` whose ``reduction`` is ``whole``."""
    if random is None:
        raise PlacementError("cutting a tensor into partial pieces needs a random generator")
    if whole.dtype.kind == "b":
        raise PlacementError("a boolean tensor has no partial pieces; use B or S for it")
    if reduction in ("max", "min"):
        if whole.dtype.kind == "c":
            raise PlacementError(f"P({reduction}) needs an order, and complex numbers have none; use P")
        owner = random.integers(0, parts, whole.shape)
        away = _noise(whole, random)
        pieces = []
        for index in range(parts):
            # Redrawn for each piece, so that the losing pieces differ from each other as well.
            shift = np.abs(away) + np.abs(_noise(whole, random))
            loser = whole - shift if reduction == "max" else whole + shift
            if whole.dtype.kind in "iu":  # an unsigned piece must not wrap around to the other end
                loser = np.minimum(loser, whole) if reduction == "max" else np.maximum(loser, whole)
            pieces.append(np.where(owner == index, whole, loser).astype(whole.dtype))
        return pieces
    if reduction not in REDUCTIONS:
        raise PlacementError(f"P({reduction}) can be read but not drawn; use P, P(avg), P(max) or P(min)")
    if reduction == "avg" and whole.dtype.kind in "iu":
        raise PlacementError("integers have no exact P(avg) pieces; use P")
    pieces = [_noise(whole, random) for _ in range(parts - 1)]
    rest = whole * whole.dtype.type(parts) if reduction == "avg" else whole
    for piece in pieces:
        rest = rest - piece
    place = int(random.integers(0, parts))  # the piece that makes up the rest is not always the last
    pieces.insert(place, np.asarray(rest, dtype=whole.dtype))
    return pieces


def _noise(like: Array, random: np.random.Generator) -> Array:
    """Random values of the size of the largest in ``like``, both signs, few bits: so that sums are exact."""
    if like.dtype.kind in "iu":
        reach = int(np.max(np.abs(like.astype(np.float64)), initial=0)) + 3
        information = np.iinfo(like.dtype)
        low, high = max(-reach, information.min), min(reach, information.max)
        return random.integers(low, high, like.shape, dtype=like.dtype, endpoint=True)
    if like.dtype.kind == "c":
        part = like.real.dtype
        both = [_noise(np.abs(like).astype(part), random) for _ in range(2)]
        return np.asarray(both[0] + 1j * both[1], dtype=like.dtype)
    magnitudes = np.abs(like[np.isfinite(like)]) if like.ndim else np.abs(like[None][np.isfinite(like[None])])
    largest = float(np.max(magnitudes, initial=0.0))
    # The next power of two keeps the grid of the draws a multiple of the grid of the values.
    scale = 2.0 ** np.ceil(np.log2(largest)) if largest > 0 else 1.0
    bits = 2 if like.dtype.itemsize == 2 else 5
    steps = random.integers(1, 2 ** (bits + 1), like.shape) * random.choice(np.array([-1, 1]), like.shape)
    return np.asarray(steps * (scale / 2**bits), dtype=like.dtype)


def reduce_partials(pieces: Sequence[Array], sbp: SBP, mesh: Mesh) -> list[Array]:
    """Each rank's piece after the partial axes were summed up (or averaged, ...): what the piece would be
    with B in place of P. Pieces of the ranks along a partial axis must have one shape.

    Raises LayoutError where they have not.
    """
    _check_axes(sbp, mesh)
    current = [np.asarray(piece) for piece in pieces]
    for axis in reversed(range(mesh.ndim)):
        placement = sbp[axis]
        if not placement.is_partial:
            continue
        reduced: dict[int, Array] = {}
        for rank in range(mesh.size):
            if rank in reduced:
                continue
            group = mesh.ranks_along([axis], rank)
            members = [current[member] for member in group]
            shapes = [member.shape for member in members]
            if len(set(shapes)) > 1:
                raise LayoutError(f"partial pieces of ranks {group} have different shapes: {shapes}")
            total = _reduce(members, placement.reduction)
            reduced.update(dict.fromkeys(group, total))
        current = [reduced[rank] for rank in range(mesh.size)]
    return current


def _reduce(members: list[Array], reduction: str) -> Array:
    if reduction in ("max", "min"):
        choose = np.maximum if reduction == "max" else np.minimum
        return np.asarray(choose.reduce(members))
    if reduction == "product":
        return np.asarray(np.multiply.reduce(members), dtype=members[0].dtype)
    if match := re.fullmatch(r"norm(.+)", reduction):
        order = float(match[1])
        return np.asarray(sum(np.abs(member) ** order for member in members) ** (1 / order))
    total = members[0]
    for member in members[1:]:
        total = total + member
    if reduction == "avg":
        total = total / len(members)
    return np.asarray(total, dtype=members[0].dtype)


def combine(pieces: Sequence[Array], sbp: SBP, mesh: Mesh, shape: Sequence[int]) -> Array:
    """Put the ranks' pieces together to the full tensor of ``shape``; the inverse of :func:`split`.

    Where several ranks hold the same part (B), the first one's counts; see :func:`disagreeing_ranks`.
    Raises LayoutError where a piece is not of the shape that the SBP gives its rank.
    """
    _check_axes(sbp, mesh)
    shape = tuple(shape)
    if len(pieces) != mesh.size:
        raise LayoutError(f"{len(pieces)} pieces for a mesh of {mesh.size} ranks")
    sbp = normalise(sbp, len(shape))
    for rank, piece in enumerate(pieces):
        due = local_shape(shape, sbp, mesh, rank)
        if tuple(piece.shape) != due:
            raise LayoutError(
                f"rank {rank} holds a piece of shape {tuple(piece.shape)}, "
                f"but {show(sbp)} of {shape} gives it {due}"
            )
    reduced = reduce_partials(pieces, sbp, mesh)
    full = np.zeros(shape, dtype=reduced[0].dtype)
    for rank in reversed(range(mesh.size)):  # backwards, so that the first replica is the one that stays
        parts = local_indices(shape, sbp, mesh, rank)
        if all(isinstance(part, slice) for part in parts):
            full[parts] = reduced[rank]
        else:
            numbers = [np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in parts]
            full[np.ix_(*numbers)] = reduced[rank]
    return full


def disagreeing_ranks(pieces: Sequence[Array], sbp: SBP, mesh: Mesh) -> list[int]:
    """The ranks whose piece is not bit for bit that of the first rank with the same part (along B axes)."""
    _check_axes(sbp, mesh)
    axes = [axis for axis, placement in enumerate(sbp) if placement.kind == "B"]
    result = []
    for rank, piece in enumerate(pieces):
        first = pieces[mesh.ranks_along(axes, rank)[0]]
        if first is not piece and not same_bits(first, piece):
            result.append(rank)
    return result


def same_bits(one: Array, other: Array) -> bool:
    """Equal shape, dtype and bits (NaN equals the same NaN, 0.0 differs from -0.0)."""
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _check_axes(sbp: SBP, mesh: Mesh) -> None:
    if len(sbp) != mesh.ndim:
        raise PlacementError(f"{show(sbp)} has {len(sbp)} placements for the {mesh.ndim} axes of mesh {mesh}")
