"""The one place that touches torch's private operator database, ``common_methods_invocations.op_db``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import random
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

    @property
    def inplace(self) -> Callable[..., Any] | None:
        """The in-place variant, called with the operand to write to first; None where there is none."""
        variant: Callable[..., Any] | None = self._info.inplace_variant
        if variant is None and _takes_inplace(self.function):
            return functools.partial(self.function, inplace=True)
        return variant

    @property
    def has_out(self) -> bool:
        """Whether the function takes ``out=``."""
        return bool(self._info.supports_out)

    @property
    def is_view(self) -> bool:
        """Whether the schemas say that a result may share memory with an operand."""
        return _is_view(self._info.name.rpartition(".")[2])

    @property
    def is_random(self) -> bool:
        """Whether torch marks it as one that draws from a seeded generator."""
        overloads = getattr(torch.ops.aten, self._info.name.rpartition(".")[2], None)
        if overloads is None:
            return False
        tags = [getattr(overloads, name).tags for name in overloads.overloads()]
        return any(torch.Tag.nondeterministic_seeded in of_one for of_one in tags)

    def samples(self, most: int | None = None) -> Iterator[OperatorSample]:
        """The sample calls, the same on every call in every process; ``most`` of them, spread over all."""
        found = self._samples(0, None)
        count = len(found) if most is None else min(most, len(found))
        for number in range(count):
            yield found[number * len(found) // count]

    def variants(self, most: int, draws: int = 2, by_sizes: bool = False) -> list[list[OperatorSample]]:
        """Sample calls of different kinds, at most so many, each with the same call in other sizes and values (drawn
        so many times) beside it. The first of each has sizes that two, three or four ranks can share evenly, the
        second has not. With ``by_sizes``, which sizes of the operands equal each other is part of the kind."""
        columns = [
            self._samples_of_sizes(seed, sizes) for seed in range(draws) for sizes in (_EVEN_SIZES, None)
        ]
        by_kind: dict[str, list[OperatorSample]] = {}
        for row in zip(*columns):
            if any(isinstance(leaf, torch.Tensor) and leaf.numel() == 0 for leaf in tree_leaves(row[0].args)):
                continue
            kind = _kind_of(row[0]) + (_equal_sizes(row[0]) if by_sizes else "")
            by_kind.setdefault(kind, list(row))
        kinds = list(by_kind.values())
        count = min(most, len(kinds))
        return [kinds[number * len(kinds) // count] for number in range(count)]

    def _samples_of_sizes(self, seed: int, sizes: Mapping[str, int] | None) -> list[OperatorSample]:
        """The samples, in the database's own sizes where some of these are fixed and do not go with others."""
        try:
            return self._samples(seed, sizes, _LOOKED_AT)
        except Exception:
            if sizes is None:
                raise
            return self._samples(seed, None, _LOOKED_AT)

    def _samples(
        self, seed: int, sizes: Mapping[str, int] | None, most: int | None = None
    ) -> list[OperatorSample]:
        number = stable_seed("op_db", self.name, *([seed] if seed else [])) % 2**31
        torch.manual_seed(number)
        with _with_sizes(sizes or {}), _python_random(number):
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
            words.append(f"{leaf.dtype}{[size == 1 for size in leaf.shape]}{_is_contiguous(leaf)}")
        else:
            words.append(repr(leaf))
    return f"{words}{sorted(sample.kwargs)}"


def _is_contiguous(tensor: torch.Tensor) -> bool | str:
    return tensor.is_contiguous() if tensor.layout == torch.strided else str(tensor.layout)


def _equal_sizes(sample: OperatorSample) -> str:
    """Which sizes of the tensors are the same, the first one being 0: ``[[0, 1], [1, 0]]`` for a matrix product."""
    numbers: dict[int, int] = {}
    leaves = tree_leaves((sample.args, sample.kwargs))
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return str([[numbers.setdefault(size, len(numbers)) for size in shape] for shape in shapes])


@contextlib.contextmanager
def _python_random(seed: int) -> Iterator[None]:
    """Some arguments that are no tensors are drawn from Python's generator, which is left as it was."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


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


def _takes_inplace(function: Callable[..., Any]) -> bool:
    try:
        return "inplace" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


@cache
def _is_view(name: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    aliases = [result.alias_info for schema in schemas for result in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


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
