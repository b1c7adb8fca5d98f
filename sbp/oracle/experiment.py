"""One call, cut over one mesh with one draw of partial pieces: which output placements are right for which inputs.

The local operator runs once for each combination of input placements on each rank's pieces; all output placements
are then judged from these results, and those of equal shapes all together. What it means for an output placement to
be right is said by ``placement.combine``, with which the tests compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sbp.oracle.calls import results
from sbp.oracle.pieces import cut
from sbp.oracle.tolerance import relative_limit
from sbp.placement import B, P, Placement, S, chunk_bounds

Array = NDArray[Any]
# Which placement each input has, as an index into its choices.
Combination = tuple[int, ...]
# For each output the right placements, bit k standing for the k-th of its candidates; None where a rank raised.
Right = tuple[int, ...] | None
Run = Callable[[Sequence[torch.Tensor]], Any]

# A result smaller than this is compared as if it were of this size: what rounding leaves of a zero is no fault.
_SMALLEST_SCALE = 1e-2
# At most so many numbers are compared at once.
_AT_ONCE = 1 << 22

OUTPUT_PARTIALS = ("sum", "avg", "max", "min", "product", "norm2.0")


def candidates(output: torch.Tensor, partials: Sequence[str] = OUTPUT_PARTIALS) -> list[Placement]:
    """The placements that an output is judged by: B, S(d) for each dimension, and those of ``partials`` that its
    dtype has a meaning for."""
    found = [B, *(S(dim) for dim in range(output.ndim))]
    for reduction in partials:
        if output.is_complex() and reduction not in ("sum", "avg", "product"):
            continue
        if output.dtype == torch.bool and reduction not in ("max", "min"):
            continue
        if not (output.is_floating_point() or output.is_complex()) and reduction not in (
            "sum",
            "max",
            "min",
            "product",
        ):
            continue
        found.append(P(reduction))
    return found


@dataclass(frozen=True)
class Truth:
    """One output of the call on one device, ready to be compared with.

    Attributes:
        value: in numpy; floating dtypes that numpy lacks as float32.
        placements: what it is judged by; ``shapes[k]`` are the ranks' shapes under the k-th of them.
    """

    value: Array
    dtype: torch.dtype
    placements: Sequence[Placement]
    by_shapes: dict[tuple[Any, ...], list[int]]
    tolerance: float
    finite: bool


def make_truth(output: torch.Tensor, placements: Sequence[Placement], parts: int) -> Truth:
    """Prepare an output for comparison on a mesh of ``parts`` ranks."""
    value = to_array(output)
    by_shapes: dict[tuple[Any, ...], list[int]] = {}
    for index, placement in enumerate(placements):
        shapes = tuple(local_shape(value.shape, placement, parts, rank) for rank in range(parts))
        by_shapes.setdefault(shapes, []).append(index)
    inexact = value.dtype.kind in "fc"
    finite = bool(np.isfinite(value).all()) if inexact else True
    largest = float(np.max(np.abs(value), initial=0.0, where=np.isfinite(value))) if inexact else 0.0
    limit = relative_limit(str(output.dtype).removeprefix("torch."))
    return Truth(value, output.dtype, placements, by_shapes, limit * max(largest, _SMALLEST_SCALE), finite)


def local_shape(shape: Sequence[int], placement: Placement, parts: int, rank: int) -> tuple[int, ...]:
    """The shape of a rank's piece on a mesh of one axis."""
    if not placement.is_split:
        return tuple(shape)
    start, stop = chunk_bounds(shape[placement.dim], parts, rank)
    return (*shape[: placement.dim], stop - start, *shape[placement.dim + 1 :])


def to_array(tensor: torch.Tensor) -> Array:
    """The values in numpy, without a copy where that can be."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32):
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    return tensor.numpy()


class Experiment:
    """A call's inputs, cut over ``parts`` ranks.

    Args:
        run: calls the operator with tensors in place of ``inputs``.
        inputs: the whole tensors.
        choices: for each input the placements it may have.
        outputs: the single-device results, by which everything is judged.
        placements: for each output those that it may have.
        parts: the number of ranks.
        random: what partial pieces are drawn from.
    """

    def __init__(
        self,
        run: Run,
        inputs: Sequence[torch.Tensor],
        choices: Sequence[Sequence[Placement]],
        outputs: Sequence[torch.Tensor],
        placements: Sequence[Sequence[Placement]],
        parts: int,
        random: np.random.Generator,
    ) -> None:
        self.run = run
        self.inputs = inputs
        self.choices = choices
        self.parts = parts
        self.random = random
        self.truths = [make_truth(o, p, parts) for o, p in zip(outputs, placements, strict=True)]
        self._pieces: list[list[list[torch.Tensor] | None]] = [[None] * len(some) for some in choices]
        # Calls of the local operator, for the record.
        self.runs = 0

    def pieces(self, place: int, choice: int) -> list[torch.Tensor]:
        """The ranks' pieces of one input under one of its choices; drawn once."""
        kept = self._pieces[place][choice]
        if kept is None:
            kept = cut(self.inputs[place], self.choices[place][choice], self.parts, self.random)
            self._pieces[place][choice] = kept
        return kept

    @cached_property
    def unevenness(self) -> list[list[int]]:
        """For each input and choice: 0 for pieces of equal sizes, 1 for unequal ones, 2 where some rank has none."""
        found = []
        for tensor, some in zip(self.inputs, self.choices):
            found.append([unevenness(tensor.shape, placement, self.parts) for placement in some])
        return found

    def evaluate(self, combinations: Sequence[Combination], run: Sequence[Run] | None = None) -> list[Right]:
        """Which output placements are right for each combination.

        Args:
            combinations: of input placements.
            run: how each rank calls the operator, where not as usual.
        """
        right: list[list[int] | None] = []
        runs = [self.run] * self.parts if run is None else list(run)
        ranks = range(self.parts)
        pieces, single = self.pieces, len(self.truths) == 1
        # output -> shapes on the ranks -> (which combinations, their results rank by rank)
        found: list[dict[tuple[Any, ...], tuple[list[int], list[torch.Tensor]]]] = [{} for _ in self.truths]
        dtypes = [truth.dtype for truth in self.truths]
        places = range(len(self.inputs))
        for number, combination in enumerate(combinations):
            held = [pieces(place, combination[place]) for place in places]
            local = []
            try:
                for rank in ranks:
                    output = runs[rank]([piece[rank] for piece in held])
                    local.append([output] if single and type(output) is torch.Tensor else results(output))
            except Exception:
                right.append(None)
                continue
            right.append([0] * len(self.truths))
            for index, dtype in enumerate(dtypes):
                if any(len(outputs) != len(dtypes) for outputs in local):
                    break  # a rank has another number of results than the whole
                tensors = [outputs[index] for outputs in local]
                if any(tensor.dtype != dtype for tensor in tensors):
                    continue
                shapes = tuple([tensor.shape for tensor in tensors])
                if shapes in self.truths[index].by_shapes:
                    group = found[index].setdefault(shapes, ([], []))
                    group[0].append(number)
                    group[1].extend(tensors)
        self.runs += len(combinations) * self.parts
        for index, groups in enumerate(found):
            for shapes, (numbers, tensors) in groups.items():
                for which, bits in self._judge(self.truths[index], shapes, tensors):
                    for offset, mask in enumerate(bits.tolist()):
                        row = right[numbers[which + offset]]
                        assert row is not None
                        row[index] |= mask
        return [None if row is None else tuple(row) for row in right]

    def _judge(
        self, truth: Truth, shapes: tuple[Any, ...], tensors: list[torch.Tensor]
    ) -> list[tuple[int, Array]]:
        """The masks of right placements for results of the same shapes, a stretch of combinations at a time."""
        parts = self.parts
        count = len(tensors) // parts
        largest = max(int(np.prod(shape)) for shape in shapes)
        step = max(1, _AT_ONCE // max(1, largest * parts))
        found = []
        for start in range(0, count, step):
            stop = min(count, start + step)
            by_rank = [stack(tensors[start * parts + rank : stop * parts : parts]) for rank in range(parts)]
            bits = np.zeros(stop - start, dtype=np.int64)
            for index in truth.by_shapes[shapes]:
                good = is_right(by_rank, truth, truth.placements[index])
                bits |= good.astype(np.int64) << index
            found.append((start, bits))
        return found


def unevenness(shape: Sequence[int], placement: Placement, parts: int) -> int:
    """0 where the pieces are of equal sizes, 1 where they are not, 2 where some rank has none."""
    if not placement.is_split:
        return 0
    size = shape[placement.dim]
    if size % parts == 0:
        return 0
    start, stop = chunk_bounds(size, parts, parts - 1)
    return 1 if stop > start else 2


def stack(tensors: Sequence[torch.Tensor]) -> Array:
    """Tensors of one shape as one array with a new first axis."""
    return to_array(torch.stack(list(tensors)))


def is_right(by_rank: Sequence[Array], truth: Truth, placement: Placement) -> NDArray[np.bool_]:
    """For each of many combinations whether the ranks' results make up ``truth`` under ``placement``.

    Args:
        by_rank: for each rank its results, the first axis running over the combinations; of the shapes that the
            placement gives the ranks.
    """
    if placement.is_partial:
        return close(reduce_ranks(by_rank, placement.reduction), truth.value, truth)
    good = np.ones(len(by_rank[0]), dtype=bool)
    parts = len(by_rank)
    for rank, values in enumerate(by_rank):
        expected = truth.value
        if placement.is_split:
            start, stop = chunk_bounds(expected.shape[placement.dim], parts, rank)
            expected = expected[(slice(None),) * placement.dim + (slice(start, stop),)]
        good &= close(values, expected, truth)
    return good


def reduce_ranks(by_rank: Sequence[Array], reduction: str) -> Array:
    """What partial pieces stand for together, element by element, as ``placement.reduce_partials`` has it."""
    first = by_rank[0]
    if reduction in ("max", "min"):
        choose = np.maximum if reduction == "max" else np.minimum
        total = first
        for values in by_rank[1:]:
            total = choose(total, values)
        return total
    with np.errstate(all="ignore"):
        if reduction == "product":
            total = first
            for values in by_rank[1:]:
                total = total * values
            return total
        if reduction.startswith("norm"):
            order = float(reduction.removeprefix("norm"))
            return np.asarray(sum(np.abs(values) ** order for values in by_rank) ** (1 / order))
        total = first
        for values in by_rank[1:]:
            total = total + values
        return total / len(by_rank) if reduction == "avg" else total


def close(values: Array, expected: Array, truth: Truth) -> NDArray[np.bool_]:
    """For each index of the first axis whether all elements agree with ``expected`` but for rounding. A NaN or
    infinity agrees with the same."""
    axes = tuple(range(1, values.ndim))
    if values.dtype.kind in "biu":
        return np.asarray((values == expected).all(axis=axes))
    with np.errstate(all="ignore"):
        agree = np.abs(values - expected) <= truth.tolerance
        if not truth.finite:
            agree |= (values == expected) | (np.isnan(values) & np.isnan(expected))
    return np.asarray(agree.all(axis=axes))
