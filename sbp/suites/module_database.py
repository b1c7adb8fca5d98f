"""The one place that touches torch's private module database, ``torch.testing._internal.common_modules``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sbp.trial import stable_seed


@dataclass(frozen=True)
class DatabaseEntry:
    """One sample of the database: how to build a module and what to call it with.

    Attributes:
        module: the class's name in torch.nn, such as ``Linear``.
        index: the sample's number among those of the same class and mode.
        modes: which of ``train`` and ``eval`` there are; one of them alone where they do not differ.
    """

    module: str
    index: int
    modes: tuple[str, ...]


def entries() -> Iterator[DatabaseEntry]:
    """Every sample of every class, without the lazy classes (they are their plain class after one call)."""
    for info in _database():
        if info.is_lazy:
            continue
        samples = _samples(info, training=True)
        modes = ("train", "eval") if info.train_and_eval_differ else ("train",)
        for index in range(len(samples)):
            yield DatabaseEntry(info.module_cls.__name__, index, modes)


def arguments(
    module: str, index: int, training: bool, dtype: torch.dtype
) -> tuple[type[torch.nn.Module], tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    """One sample: the class, its constructor's positional and keyword arguments, and those of the call.

    The same values on every call: torch's generator is seeded for it.
    """
    info = next(entry for entry in _database() if entry.module_cls.__name__ == module)
    sample = _samples(info, training, dtype)[index]
    built, called = sample.constructor_input, sample.forward_input
    return info.module_cls, tuple(built.args), dict(built.kwargs), tuple(called.args), dict(called.kwargs)


def _database() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    return module_db


def _samples(info: Any, training: bool, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(stable_seed("module_db", info.module_cls.__name__, training) % 2**31)
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    # A sample without a call to make has nothing to compare.
    return [sample for sample in samples if sample.forward_input is not None]
