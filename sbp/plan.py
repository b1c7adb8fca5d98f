"""Which placements are tried: all combinations where these are few, else one tensor at a time and all pairs.

With one tensor at a time off B, a fault points at that tensor. The pairs come from a covering array, which has
every pair of choices of every two tensors in at least one row: most faults of sharding rules depend on one or two
operands, and its size grows with the logarithm of the number of tensors instead of exponentially.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sbp.placement import SBP, B, Mesh, P, S, show
from sbp.trial import stable_seed


@dataclass(frozen=True)
class PlanOptions:
    """What the command line says about planning.

    Attributes:
        meshes: the meshes to try, all of the world's size.
        dtypes, device: of the floating tensors.
        full_product_up_to: how many combinations are still tried one by one.
        placements: tensor name -> SBP text for tensors that are to lie so and not otherwise.
        partial: which partial placements are among the choices.
        rows: at most so many combinations of a case on a mesh; None for as many as the covering array has.
        subject: the system under test.
        optimizers: the training trials to plan; empty for none.
    """

    meshes: tuple[Mesh, ...]
    dtypes: tuple[str, ...] = ("float64",)
    device: str = "cpu"
    full_product_up_to: int = 16
    placements: Mapping[str, str] | None = None
    partial: tuple[str, ...] = ("sum",)
    rows: int | None = None
    subject: str = "dtensor"
    optimizers: tuple[str, ...] = ("SGD", "AdamW")

    @property
    def quick(self) -> bool:
        """Whether few placements are wanted even of cases that have few."""
        return self.rows is not None and self.rows < 4


def choices_of(ndim: int, kind: str, partial: Sequence[str] = ("sum",)) -> list[tuple[str, SBP]]:
    """The placements of one tensor along one mesh axis: B, S(d) for every dimension, then the partial ones.

    ``kind`` is numpy's letter for the dtype; booleans have no partial pieces.
    """
    single: list[SBP] = [(B,), *((S(dim),) for dim in range(ndim))]
    if kind != "b":
        single += [(P(reduction),) for reduction in partial if reduction == "sum" or kind == "f"]
    return [(show(sbp), sbp) for sbp in single]


def placement_rows(
    tensors: Mapping[str, tuple[int, str]],
    mesh: Mesh,
    full_product_up_to: int = 16,
    partial: Sequence[str] = ("sum",),
    fixed: Mapping[str, str] | None = None,
    most: int | None = None,
) -> tuple[list[dict[str, str]], str]:
    """Combinations of placements for named tensors.

    Args:
        tensors: name -> (number of dimensions, numpy's letter for the kind of dtype).
        mesh: each of its axes chooses for itself.
        full_product_up_to: larger products give way to a covering array of pairs.
        partial: the partial placements among the choices.
        fixed: tensors that lie as this says.
        most: only so many rows; the same ones that come first without it.

    Returns: the rows, each naming only the tensors that are not B on every axis, the row with all B first; and
        how they were chosen: ``all``, or ``pairs`` for one tensor at a time and all pairs.
    """
    fixed = fixed or {}
    free = [name for name in tensors if name not in fixed]
    factors: list[list[SBP]] = []
    for name in free:
        ndim, kind = tensors[name]
        factors += [[sbp for _, sbp in choices_of(ndim, kind, partial)]] * mesh.ndim
    product = int(np.prod([len(factor) for factor in factors], dtype=np.float64)) if factors else 1
    if product <= full_product_up_to:
        # Those with few tensors off B come first: they tell most, and a bounded run has only the first ones.
        everything = itertools.product(*(range(len(factor)) for factor in factors))
        indices: Iterable[tuple[int, ...]] = sorted(everything, key=lambda row: sum(map(bool, row)))
        how = "all"
    else:
        levels = [len(factor) for factor in factors]
        alone = [
            tuple(value if place == position else 0 for place in range(len(levels)))
            for position, count in enumerate(levels)
            for value in range(1, count)
        ]
        wanted = None if most is None else max(1, most - len(alone))
        covering = covering_array(tuple(levels), most=wanted)
        indices = [covering[0], *alone, *covering[1:]]
        how = "pairs"
    rows: list[dict[str, str]] = []
    for row in indices:
        if most is not None and len(rows) >= most:
            break
        placed = dict(fixed)
        for position, name in enumerate(free):
            sbp: SBP = ()
            for axis in range(mesh.ndim):
                factor = position * mesh.ndim + axis
                sbp += factors[factor][row[factor]]
            if any(placement != B for placement in sbp):
                placed[name] = show(sbp)
        if placed not in rows:
            rows.append({name: placed[name] for name in tensors if name in placed})
    return rows, how


@lru_cache(maxsize=1024)
def covering_array(
    levels: tuple[int, ...], most: int | None = None, candidates: int = 12
) -> list[tuple[int, ...]]:
    """Rows in which every pair of values of every two factors occurs (greedy, after the AETG scheme).

    Args:
        levels: the number of values of each factor.
        most: stop after so many rows; they then cover only some of the pairs.
        candidates: how many random rows compete for each place.

    Returns: the rows, all zeros first; the same on every call. With one factor, each of its values once.

    Source: Cohen, Dalal, Fredman, Patton, "The AETG system", IEEE Trans. Software Eng. 23(7), 1997.
    """
    count = len(levels)
    if count == 0:
        return [()]
    if count == 1:
        alone: list[tuple[int, ...]] = [(value,) for value in range(levels[0])]
        return alone[:most]
    random = np.random.default_rng(stable_seed("covering", levels))
    offsets = np.concatenate([[0], np.cumsum(levels)]).astype(int)
    total = int(offsets[-1])
    # open_pairs[a, b]: value a of one factor and value b of another have not stood in one row yet.
    open_pairs = np.ones((total, total), dtype=bool)
    for factor in range(count):
        open_pairs[offsets[factor] : offsets[factor + 1], offsets[factor] : offsets[factor + 1]] = False
    rows: list[tuple[int, ...]] = []

    def take(row: np.ndarray) -> None:
        places = offsets[:-1] + row
        open_pairs[np.ix_(places, places)] = False
        rows.append(tuple(int(value) for value in row))

    take(np.zeros(count, dtype=int))
    while open_pairs.any() and (most is None or len(rows) < most):
        best, gain = None, -1
        remaining = open_pairs.sum(axis=1)
        seeds = np.flatnonzero(remaining == remaining.max())
        for _ in range(candidates):
            row = np.full(count, -1)
            start = int(random.choice(seeds))
            first = int(np.searchsorted(offsets, start, side="right") - 1)
            row[first] = start - offsets[first]
            chosen = [start]
            for factor in random.permutation(count):
                if row[factor] >= 0:
                    continue
                block = open_pairs[offsets[factor] : offsets[factor + 1]][:, chosen].sum(axis=1)
                # Among equals the value with the most open pairs left, so that later rows stay few.
                left = remaining[offsets[factor] : offsets[factor + 1]]
                score = block * (total + 1) + left
                value = int(random.choice(np.flatnonzero(score == score.max())))
                row[factor] = value
                chosen.append(int(offsets[factor]) + value)
            gained = int(open_pairs[np.ix_(chosen, chosen)].sum())
            if gained > gain:
                best, gain = row, gained
        assert best is not None
        take(best)
    return rows
