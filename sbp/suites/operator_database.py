"""The one place that touches torch's private operator database, ``common_methods_invocations.op_db``."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sbp.trial import stable_seed

# The dtype in which an operator is sampled is the first of these that it takes: float64 where a value can be compared
# best, then what is left.
_DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32, torch.bfloat16)


# The sizes of most of the database's samples are named S, M, L and XS: 5, 10, 20 and 3.
_EVEN_SIZES = {"S": 6, "M": 12, "L": 24, "XS": 4}
# How many samples of an operator are looked at in search of different kinds.
_LOOKED_AT = 100


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
        found = self._samples(0, None)
        count = len(found) if most is None else min(most, len(found))
        for number in range(count):
            yield found[number * len(found) // count]

    def variants(self, most: int) -> list[list[OperatorSample]]:
        """Sample calls of different kinds, at most so many, each with the same call in other sizes and values beside
        it. The first of each has sizes that two, three or four ranks can share evenly, the second has not."""
        columns = [
            self._samples(seed, sizes, _LOOKED_AT) for seed in range(2) for sizes in (_EVEN_SIZES, None)
        ]
        by_kind: dict[str, list[OperatorSample]] = {}
        for row in zip(*columns):
            if any(isinstance(leaf, torch.Tensor) and leaf.numel() == 0 for leaf in tree_leaves(row[0].args)):
                continue
            by_kind.setdefault(_kind_of(row[0]), list(row))
        kinds = list(by_kind.values())
        count = min(most, len(kinds))
        return [kinds[number * len(kinds) // count] for number in range(count)]

    def _samples(
        self, seed: int, sizes: Mapping[str, int] | None, most: int | None = None
    ) -> list[OperatorSample]:
        torch.manual_seed(stable_seed("op_db", self.name, *([seed] if seed else [])) % 2**31)
        with _with_sizes(sizes or {}):
            samples = self._info.sample_inputs("cpu", self.dtype, requires_grad=False, set_seed=False)
            return [
                OperatorSample((sample.input, *sample.args), dict(sample.kwargs))
                for sample in itertools.islice(samples, most)
            ]


def _kind_of(sample: OperatorSample) -> str:
    """What a call is but for its sizes: numbers of dimensions, where a dimension has one element, other arguments."""
    words = []
    for leaf in tree_leaves((sample.args, sample.kwargs)):
        if isinstance(leaf, torch.Tensor):
            words.append(f"{leaf.dtype}{[size == 1 for size in leaf.shape]}{leaf.is_contiguous()}")
        else:
            words.append(repr(leaf))
    return f"{words}{sorted(sample.kwargs)}"


@contextlib.contextmanager
def _with_sizes(sizes: Mapping[str, int]) -> Iterator[None]:
    """Have the database draw its samples in other sizes: they are global names in its modules."""
    changed = []
    for module in _modules():
        for word, size in sizes.items():
            if type(getattr(module, word, None)) is int:
                changed.append((module, word, getattr(module, word)))
                setattr(module, word, size)
    try:
        yield
    finally:
        for module, word, size in changed:
            setattr(module, word, size)


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


@cache
def _database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    # Many random entries set torch's seed before each call, and would pass for functions of their arguments.
    for module in _modules():
        if hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = _call
    return op_db


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _modules() -> list[Any]:
    """The modules that the database consists of."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal.opinfo") or name.endswith("common_methods_invocations"):
            found.append(module)
    return found


@cache
def _by_name() -> dict[str, Operator]:
    return {operator.name: operator for operator in operators()}


def find_operator(name: str) -> Operator:
    """The entry of that name. Raises KeyError."""
    return _by_name()[name]


def load() -> None:
    """Import the database now: it takes seconds."""
    _by_name()
