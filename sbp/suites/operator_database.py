"""The one place that touches torch's private operator database, ``common_methods_invocations.op_db``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from sbp.trial import stable_seed

# The dtype in which an operator is sampled is the first of these that it takes: float64 where a value can be compared
# best, then what is left.
_DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class OperatorSample:
    """One call of an operator: ``function(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Operator:
    """One entry of the database.

    Attributes:
        name: unique, such as ``softmax`` or ``norm.fro`` (operator and variant).
        function: what is called.
        dtype: of its samples.
        differentiable: whether its gradient can be taken in that dtype.
    """

    name: str
    function: Callable[..., Any]
    dtype: torch.dtype
    differentiable: bool
    _info: Any = field(repr=False, compare=False)

    def samples(self, most: int | None = None) -> Iterator[OperatorSample]:
        """The sample calls, the same on every call in every process; ``most`` of them, spread over all."""
        torch.manual_seed(stable_seed("op_db", self.name) % 2**31)
        found = [
            OperatorSample((sample.input, *sample.args), dict(sample.kwargs))
            for sample in self._info.sample_inputs("cpu", self.dtype, requires_grad=False)
        ]
        count = len(found) if most is None else min(most, len(found))
        for number in range(count):
            yield found[number * len(found) // count]


def operators() -> Iterator[Operator]:
    """All entries of the database."""
    for info in _database():
        name = info.name if not info.variant_test_name else f"{info.name}.{info.variant_test_name}"
        supported = info.supported_dtypes("cpu")
        dtype = next((dtype for dtype in _DTYPES if dtype in supported), None)
        if dtype is None:
            continue
        differentiable = bool(info.supports_autograd) and (dtype.is_floating_point or dtype.is_complex)
        yield Operator(name, info.op, dtype, differentiable, info)


def operator_names() -> list[str]:
    """The names, in the database's order."""
    return [operator.name for operator in operators()]


def _database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


@cache
def _by_name() -> dict[str, Operator]:
    return {operator.name: operator for operator in operators()}


def find_operator(name: str) -> Operator:
    """The entry of that name. Raises KeyError."""
    return _by_name()[name]


def load() -> None:
    """Import the database now: it takes seconds."""
    _by_name()
