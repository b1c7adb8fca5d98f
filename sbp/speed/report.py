"""What was measured, as data, as lines and as JSON. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The name of what the plans are compared with.
SINGLE = "single device"
FORMAT = 1


@dataclass(frozen=True)
class Measured:
    """One model at one batch size, on one device or under one plan.

    Attributes:
        seconds: of each round's step; where several ranks took part, as the slowest of them had it.
        collectives: of one step on the first rank, by name.
        collective_bytes: of these, the whole tensors' sizes added up (of an all-gather what comes out, of a
            reduce-scatter what goes in).
        peak_bytes: the most that a rank had in tensors at once, over its parameters, their gradients and what the step
            keeps; of the rank with the most.
        loss: the mean over the ranks.
        skipped: why the plan was not measured; empty where it was.
    """

    name: str
    seconds: tuple[float, ...] = ()
    collectives: Mapping[str, int] | None = None
    collective_bytes: int = 0
    peak_bytes: int = 0
    loss: float = 0.0
    skipped: str = ""

    @property
    def median(self) -> float:
        """The median step in seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """One model at one (global) batch size; the first of ``measured`` is the single device."""

    case: str
    batch: int
    measured: tuple[Measured, ...]


def gather(name: str, answers: Sequence[Mapping[str, Any] | None]) -> Measured:
    """One measurement from what each rank that took part answered (None for the others)."""
    there = [answer for answer in answers if answer is not None]
    rounds = zip(*(answer["seconds"] for answer in there), strict=True)
    return Measured(
        name,
        tuple(max(step) for step in rounds),
        there[0]["collectives"],
        there[0]["collective_bytes"],
        max(answer["peak_bytes"] for answer in there),
        statistics.fmean(answer["loss"] for answer in there),
    )


def milliseconds(seconds: float) -> str:
    """``43.7 ms``: three digits or more."""
    value = seconds * 1000
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def mebibytes(count: int) -> str:
    """``1.5 MiB``."""
    return f"{count / (1 << 20):.2f} MiB"


def lines(comparison: Comparison) -> Iterator[str]:
    """One comparison as text. The relative speed is above 1 where the plan is faster than the single device."""
    single, *plans = comparison.measured
    yield f"{comparison.case}, batch {comparison.batch}"
    yield f"  {SINGLE}: {_time(single)}; peak memory {mebibytes(single.peak_bytes)}"
    for plan in plans:
        if plan.skipped:
            yield f"  {plan.name}: skipped, {plan.skipped}"
            continue
        yield f"  {plan.name}: {_time(plan)}"
        yield (
            f"    relative speed: {single.median / plan.median:.2f} "
            f"(= {milliseconds(single.median)} / {milliseconds(plan.median)})"
        )
        counts = plan.collectives or {}
        words = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        total = sum(counts.values())
        what = f"{total} collective{'s' * (total != 1)}" + (f" ({words})" if words else "")
        yield (
            f"    {what}, {mebibytes(plan.collective_bytes)}; peak memory {mebibytes(plan.peak_bytes)} a rank"
        )


def _time(measured: Measured) -> str:
    fastest, slowest = milliseconds(min(measured.seconds)), milliseconds(max(measured.seconds))
    return f"{milliseconds(measured.median)}, the median of {len(measured.seconds)} ({fastest} to {slowest})"


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """One comparison as JSON data; seconds and bytes."""
    single, *plans = comparison.measured

    def record(measured: Measured) -> dict[str, Any]:
        if measured.skipped:
            return {"plan": measured.name, "skipped": measured.skipped}
        return {
            "plan": measured.name,
            "median_seconds": measured.median,
            "seconds": list(measured.seconds),
            "relative_speed": single.median / measured.median,
            "collectives": dict(measured.collectives or {}),
            "collective_bytes": measured.collective_bytes,
            "peak_bytes": measured.peak_bytes,
            "loss": measured.loss,
        }

    return {
        "case": comparison.case,
        "batch": comparison.batch,
        "single": record(single),
        "plans": [record(plan) for plan in plans],
    }
