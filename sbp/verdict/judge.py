"""All ranks' comparisons of one trial, put together to a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbp.oracle.promises import broken
from sbp.oracle.tolerance import L2_FACTOR, LARGEST_FACTOR, is_low, relative_limit
from sbp.placement import Array, LayoutError, Mesh, reduce_partials, take_local
from sbp.verdict.compare import Row, difference, parse_mesh_cached, parse_sbp_cached

_WRONG = {
    "value": "wrong value",
    "gradient": "wrong gradient",
    "state": "wrong state",
    "write": "lost write",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one quantity.

    Attributes:
        verdict: the word for it.
        quantity: its name, such as ``layers.0.bn.running_var``; empty for the trial as a whole.
        rank: the first rank on which it shows; ranks: all of them.
        claimed: the placement that the subject claims (of the first rank).
        max_abs_error, relative_error: the error's largest element, and its L2 norm over the reference's.
        relation: how it differs, in words.
    """

    verdict: str
    quantity: str
    rank: int = 0
    ranks: tuple[int, ...] = ()
    claimed: str | None = None
    max_abs_error: float = 0.0
    relative_error: float = 0.0
    relation: str = ""
    # The mesh of the claim, where it is not the trial's.
    mesh: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the results file has it; what is not a finite number is written as null or text."""
        return {
            "verdict": self.verdict,
            "quantity": self.quantity,
            "rank": self.rank,
            "ranks": list(self.ranks),
            "claimed": self.claimed,
            "max_abs_error": _finite(self.max_abs_error),
            "relative_error": _finite(self.relative_error),
            "relation": self.relation,
        }


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


@dataclass(frozen=True)
class Judgement:
    """A trial's verdict with all that was found, in the order of the run; the first finding gives the verdict."""

    verdict: str
    findings: list[Finding] = field(default_factory=list)
    # The largest relative error among the quantities that passed, to show how far from the limit they are.
    largest_error: float = 0.0
    # Of quantities that are judged by their noise and passed: the relative error, and the noise relative to the norm.
    noise: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Of those, the relative error that would have been found in any of them.
    sensitivity: float = 0.0
    # Quantities that are zero on both sides, or nothing but rounding, so that a wrong factor could not show.
    silent: tuple[str, ...] = ()


def judge_rows(rows_by_rank: Sequence[Sequence[Row]], mesh: Mesh) -> Judgement:
    """Judge the quantities of one trial. ``rows_by_rank[r]`` is what rank r compared; a rank that got less far
    than others is judged by what it has."""
    names: dict[str, None] = {}
    for rows in rows_by_rank:
        names.update(dict.fromkeys(row.name for row in rows))
    by_rank = [{row.name: row for row in rows} for rows in rows_by_rank]
    findings: list[Finding] = []
    largest = sensitivity = 0.0
    noise: dict[str, tuple[float, float]] = {}
    silent, heard, explained = [], 0, False
    for name in names:
        present = {rank: rows[name] for rank, rows in enumerate(by_rank) if name in rows}
        found, error = _judge_quantity(name, present, mesh)
        findings += found
        if found:
            continue
        first = present[min(present)]
        level = first.noise[0] / (first.expected_norm or 1.0)
        # Nor could a factor show in what is smaller than what rounding may make of it.
        mute = first.silent or L2_FACTOR * level >= 1
        if mute:
            silent.append(name)
        heard += not mute
        if 0 < level < math.inf:
            noise[name] = (error, level)
            if is_low(first.dtype) and not mute:
                sensitivity = max(sensitivity, L2_FACTOR * level)
            elif error > relative_limit(first.dtype):
                explained = True
                continue
        largest = max(largest, error)
    # In the order of the run: the first quantity that is wrong is the nearest to the cause.
    word = findings[0].verdict if findings else "noise" if explained else "pass"
    if word == "pass" and silent and not heard:
        word = "no signal"
    return Judgement(word, findings, largest, noise, sensitivity, tuple(silent))


def _judge_quantity(name: str, rows: dict[int, Row], mesh: Mesh) -> tuple[list[Finding], float]:
    first = rows[min(rows)]
    if first.mesh is not None:
        mesh = parse_mesh_cached(first.mesh)
    wrong = _WRONG[first.kind]
    everyone = len(rows) == mesh.size

    claims = {rank: row.claimed for rank, row in rows.items() if not row.problem.startswith("missing")}
    if len(set(claims.values())) > 1:
        words = ", ".join(f"rank {rank} {claim or 'a plain tensor'}" for rank, claim in claims.items())
        odd = tuple(rank for rank, claim in claims.items() if claim != first.claimed)
        relation = f"the ranks claim different placements: {words}"
        return [
            Finding("ranks disagree", name, min(odd, default=0), odd, first.claimed, relation=relation)
        ], 0.0

    faulty = {rank: row for rank, row in rows.items() if row.problem}
    if faulty:
        rank = min(faulty)
        problem = faulty[rank].problem
        missing = problem.startswith(("missing", "unexpected"))
        relation = problem + _on_ranks(tuple(faulty), mesh.size)
        word = wrong if missing else "wrong layout"
        return [Finding(word, name, rank, tuple(faulty), faulty[rank].claimed, relation=relation)], 0.0
    if first.claimed is None and not first.digest:
        return [], 0.0  # neither side has it

    limit = relative_limit(first.dtype)
    errors = {rank: (row.max_abs_error, row.difference_norm) for rank, row in rows.items()}
    sbp = parse_sbp_cached(first.claimed if first.claimed is not None else "B", mesh)
    partial = any(placement.is_partial for placement in sbp) and not first.zeros
    if partial:
        if not everyone or rows[0].expected is None:
            return [], 0.0  # some pieces of the sum are not known
        pieces = [rows[rank].data for rank in range(mesh.size)]
        try:
            reduced = reduce_partials([piece for piece in pieces if piece is not None], sbp, mesh)
        except LayoutError as error:
            return [Finding("wrong layout", name, 0, (), first.claimed, relation=str(error))], 0.0
        whole = rows[0].expected
        errors = {
            rank: difference(reduced[rank], take_local(whole, sbp, mesh, rank)) for rank in range(mesh.size)
        }
    if first.promise and everyone and not _odd_replicas(rows, sbp, mesh):
        found = _judge_promise(first, wrong, [row.data for row in rows.values()], sbp, mesh)
        if found:
            return found, 0.0
    if first.zeros:
        repeated = _repeated_parts(rows, sbp, mesh)
        if repeated:
            relation = f"the random pattern of rank {repeated[0]} again{_on_ranks(repeated[1:], mesh.size)}"
            return [Finding(wrong, name, repeated[1], repeated[1:], first.claimed, relation=relation)], 0.0
    scale = first.expected_norm or 1.0
    relative = {rank: norm / scale for rank, (_, norm) in errors.items()}
    overall = _overall(errors, sbp, mesh) / scale
    noise, most = first.noise
    if math.isinf(noise):
        off: tuple[int, ...] = ()
    elif noise > 0 and math.isfinite(overall):
        # The limit is for the whole tensor; where it is passed, the ranks that are off are those that pass their share.
        allowed = max(L2_FACTOR * noise / scale, 0.0 if is_low(first.dtype) else limit)
        above = {rank for rank, (biggest, _) in errors.items() if not biggest <= LARGEST_FACTOR * most}
        if not is_low(first.dtype):
            above = set()
        if overall > allowed:
            share = max(relative.values()) / 2
            above |= {rank for rank, error in relative.items() if error >= share}
        off = tuple(sorted(above))
    else:
        off = tuple(rank for rank, error in relative.items() if not error <= limit)
    odd = () if partial else _odd_replicas(rows, sbp, mesh)
    if not off and not odd:
        if math.isinf(noise):
            return [], 0.0
        return [], overall if noise > 0 else max(relative.values(), default=0.0)
    worst = max(relative, key=lambda rank: relative[rank])
    relation = ""
    if odd and not off:
        relation = f"replicas are not the same bits{_on_ranks(odd, mesh.size)}"
        if not first.zeros:
            relation += ", though each is right within rounding"
    finding = Finding(
        "ranks disagree" if odd else wrong,
        name,
        min(off or odd),
        off or odd,
        first.claimed,
        errors[worst][0],
        overall,
        relation,
        first.mesh,
    )
    return [finding], overall


def _overall(errors: dict[int, tuple[float, float]], sbp: Any, mesh: Mesh) -> float:
    """The L2 norm of the whole tensor's error: each part counts once, from the first rank that holds it."""
    whole_axes = [axis for axis, placement in enumerate(sbp) if not placement.is_split]
    holders = [rank for rank in errors if mesh.ranks_along(whole_axes, rank)[0] == rank]
    together = math.hypot(*(errors[rank][1] for rank in holders))
    return max(together, max((norm for _, norm in errors.values()), default=0.0))


def _judge_promise(
    first: Row, wrong: str, pieces: Sequence[Array | None], sbp: Any, mesh: Mesh
) -> list[Finding]:
    """Whether a random result keeps what it promises, as a whole."""
    held = [piece for piece in pieces if piece is not None]
    if len(held) < mesh.size:
        return []
    whole_axes = [axis for axis, placement in enumerate(sbp) if not placement.is_split]
    parts = [
        piece.reshape(-1)
        for rank, piece in enumerate(reduce_partials(held, sbp, mesh))
        if mesh.ranks_along(whole_axes, rank)[0] == rank
    ]
    relation = broken(first.promise, np.concatenate(parts))
    if not relation:
        return []
    return [Finding(wrong, first.name, 0, tuple(range(mesh.size)), first.claimed, relation=relation)]


def _odd_replicas(rows: dict[int, Row], sbp: Any, mesh: Mesh) -> tuple[int, ...]:
    """The ranks whose piece differs in its bits from that of the first rank with the same part."""
    axes = [axis for axis, placement in enumerate(sbp) if placement.kind == "B"]
    if not axes:
        return ()
    odd = []
    for rank, row in rows.items():
        first = next(member for member in mesh.ranks_along(axes, rank) if member in rows)
        if row.digest != rows[first].digest:
            odd.append(rank)
    return tuple(odd)


def _repeated_parts(rows: dict[int, Row], sbp: Any, mesh: Mesh) -> tuple[int, ...]:
    """Ranks that hold different parts of a random result with zeros in the same places; the first one has them
    first. Empty where there are none."""
    axes = [axis for axis, placement in enumerate(sbp) if placement.kind == "B"]
    seen: dict[str, int] = {}
    for rank, row in rows.items():
        first = next(member for member in mesh.ranks_along(axes, rank) if member in rows)
        if row.zeros == "-" or first != rank:
            continue
        if row.zeros in seen:
            return (
                seen[row.zeros],
                *(other for other in rows if other >= rank and rows[other].zeros == row.zeros),
            )
        seen.setdefault(row.zeros, rank)
    return ()


def _on_ranks(ranks: tuple[int, ...], size: int) -> str:
    """`` on every rank``, `` on rank 2`` ..."""
    if len(ranks) == size:
        return " on every rank"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
