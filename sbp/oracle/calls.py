"""One call of a single-device operator: what it is called with, and how it is called again with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class Call:
    """A function with its arguments, which may nest tensors in tuples, lists and dicts.

    Attributes:
        name: the operator's, for people.
        function: called as ``function(*args, **kwargs)``.
        written: which of :attr:`tensors` the function writes to; they are copied before every call.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    written: tuple[int, ...] = ()

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the arguments, in the order of the call."""
        found: list[torch.Tensor] = []
        _collect((self.args, self.kwargs), found)
        return tuple(found)

    @cached_property
    def run(self) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Calls the function with other tensors in place of :attr:`tensors`."""
        return _compile(self)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Call:
        """The same call with other tensors in place of :attr:`tensors`."""
        supply = iter(tensors)
        args, kwargs = _rebuild((self.args, dict(self.kwargs)), lambda _: next(supply))
        return replace(self, args=args, kwargs=kwargs)

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """What of the call does not depend on sizes: equal for calls that the same signatures are asked of."""
        return tuple((tensor.ndim, tensor.dtype) for tensor in self.tensors)

    def __str__(self) -> str:
        words = [show_argument(value) for value in self.args]
        words += [f"{name}={show_argument(value)}" for name, value in self.kwargs.items()]
        return f"{self.name}({', '.join(words)})"


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            _collect(item, found)


def _rebuild(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_rebuild(item, function) for item in tree))
    if isinstance(tree, (tuple, list)) and not isinstance(tree, torch.Size):
        return type(tree)([_rebuild(item, function) for item in tree])
    if isinstance(tree, Mapping):
        return {name: _rebuild(item, function) for name, item in tree.items()}
    return tree


def _compile(call: Call) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Most calls have their tensors directly among the positional arguments: these need no walk through the tree."""
    function, count = call.function, len(call.tensors)
    kwargs = dict(call.kwargs)
    if call.written:
        written = frozenset(call.written)
        inner = _compile(replace(call, written=()))

        def run_on_copies(tensors: Sequence[torch.Tensor]) -> Any:
            return inner([t.clone() if index in written else t for index, t in enumerate(tensors)])

        return run_on_copies
    places = [place for place, value in enumerate(call.args) if isinstance(value, torch.Tensor)]
    if len(places) == count:
        if places == list(range(len(call.args))):
            if kwargs:
                return lambda tensors: function(*tensors, **kwargs)
            return lambda tensors: function(*tensors)
        template = list(call.args)

        def run_positional(tensors: Sequence[torch.Tensor]) -> Any:
            arguments = template.copy()
            for place, tensor in zip(places, tensors):
                arguments[place] = tensor
            return function(*arguments, **kwargs)

        return run_positional

    def run_nested(tensors: Sequence[torch.Tensor]) -> Any:
        supply = iter(tensors)
        args, named = _rebuild((call.args, kwargs), lambda _: next(supply))
        return function(*args, **named)

    return run_nested


def results(output: Any) -> list[torch.Tensor]:
    """The results of a call as a flat list: tensors, and numbers as tensors without dimensions. What has no value
    to compare (None, a dtype, a size) is left out."""
    if isinstance(output, torch.Tensor):
        return [output]
    found: list[torch.Tensor] = []
    _collect_results(output, found)
    return found


def _collect_results(output: Any, found: list[torch.Tensor]) -> None:
    if isinstance(output, torch.Tensor):
        found.append(output)
    elif isinstance(output, (bool, int, float, complex)):
        found.append(torch.tensor(output, dtype=torch.float64 if isinstance(output, float) else None))
    elif isinstance(output, (tuple, list)) and not isinstance(output, torch.Size):
        for item in output:
            _collect_results(item, found)


def show_tensor(tensor: torch.Tensor) -> str:
    """Such as ``f64[6, 12]``."""
    short = SHORT_DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return f"{short}[{', '.join(map(str, tensor.shape))}]"


def show_argument(value: Any) -> str:
    """An argument as a person would write it, tensors by dtype and shape."""
    if isinstance(value, torch.Tensor):
        return show_tensor(value)
    if isinstance(value, torch.Size):
        return show_argument(tuple(value))
    if isinstance(value, (tuple, list)):
        inside = ", ".join(show_argument(item) for item in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {show_argument(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return repr(value)
