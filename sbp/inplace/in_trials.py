"""The watch in every trial of a run: which writes are told, and each of them once.

The harness compares a trial's results with one device's anyhow, so the watch does not compare while a trial runs; it
tells lines, placements, and writes that were lost or changed a placement. Where a trial failed and a person's own code
writes in place, it is run again with comparison, so that the line that went wrong is named.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# What two records of the same write have in common.
_IDENTITY = ("file", "line", "module", "operator", "placements", "outcome")


@contextmanager
def watching(wanted: bool, compare: bool, into: list[dict[str, Any]]) -> Iterator[None]:
    """Watch a trial and put what is to be told of it into ``into``, also where the trial raises.

    Args:
        wanted: whether to watch at all.
        compare: whether to run the out-of-place forms.
        into: gets the records as dictionaries.
    """
    if not wanted:
        yield
        return
    import torch

    from sbp.inplace.watch import watch

    inside = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    seen = watch(compare=compare, patience=2.0, search=False)
    try:
        with seen:
            yield
    finally:
        for record in seen.records:
            own = not record.family and not record.file.startswith(inside)
            if record.file and (own or record.is_fault):
                into.append(record.to_dict())


def join(by_rank: Iterable[Sequence[Mapping[str, Any]]], trial: str) -> list[dict[str, Any]]:
    """The ranks' records of one trial: each write once, as the first rank that has it tells it."""
    joined: dict[tuple[Any, ...], dict[str, Any]] = {}
    for records in by_rank:
        for record in records:
            joined.setdefault(identity(record), {**record, "trial": trial})
    return list(joined.values())


def identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a write the same in another trial: place, operator, placements and outcome."""
    return tuple(record.get(name) for name in _IDENTITY)
