"""Records every torch function and module that is called, with its results and their gradients."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from sbp.subjects.parallel import clean_module_names
from sbp.trees import named_tensors

# The parallel machinery's own work (hooks of plans, redistribution) has no counterpart on one device.
_PARALLEL = os.sep + os.path.join("torch", "distributed") + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RECORDER = _OWN + "culprit" + os.sep
_RUNNER = _OWN + "execute.py"
# Python functions of torch hand over to the mode from inside.
_HANDING_OVER = (_TORCH + "overrides.py", _TORCH + os.path.join("nn", "functional.py"))
# A run that calls more than this is recorded up to here.
_MOST_EVENTS = 20_000
# They change a tensor and return nothing.
_CHANGES = ("__setitem__", "__set__")


@dataclass(frozen=True)
class Event:
    """One call of a torch function, or of a module as a whole.

    Attributes:
        key: the same on both sides: the forward pass, the module's path, the operator and which call of it.
        module: the path of the innermost module, without what wrappers add; kind: its class.
        operator: ``nn.functional.linear``; empty for the module as a whole.
        line: ``file.py:12``, of the user's code where there is any.
        inputs: what the tensor arguments are: ``state fc.weight``, ``in input``, or a name in ``outputs``.
        outputs: the names of the results.
    """

    key: str
    module: str
    kind: str
    operator: str
    line: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Told of each result as soon as it is there: its name, whether it is a gradient, the tensor.
Observe = Callable[[str, bool, torch.Tensor], None]
# Called instead of nothing before the function of the wanted key runs: the function, its arguments.
Before = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]


class Recorder(TorchFunctionMode):
    """Notes what is called within :meth:`around`.

    Args:
        observe: see above.
        stop_at: the key of the event before which ``before`` is called.
    """

    def __init__(self, observe: Observe, stop_at: str = "", before: Before | None = None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.gradients: list[str] = []
        self._observe = observe
        self._stop_at = stop_at
        self._before = before
        self._names: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []
        self._hooked: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._paths: dict[int, str] = {}
        self._stack: list[tuple[str, str]] = []
        self._busy = False
        self._calls = 0

    @contextmanager
    def around(
        self, inputs: Mapping[str, torch.Tensor], state: Sequence[tuple[str, torch.Tensor | None]]
    ) -> Iterator[None]:
        """The context of one forward pass, or of its loss; see sbp.execute.AROUND_CALLS."""
        for name, tensor in state:
            if tensor is not None:
                self._know(tensor, f"state {name}")
        for name, tensor in inputs.items():
            self._know(tensor, f"in {name}")
        self._calls += 1
        self._counts.clear()
        self._stack.clear()
        hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._enter),
            torch.nn.modules.module.register_module_forward_hook(self._leave, with_kwargs=True),
        ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    # ------------------------------------------------------------------------------------------- modules

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) not in self._paths and not self._stack:
            root = "" if not self._paths else type(module).__name__
            paths = clean_module_names(module)
            for path, inner in module.named_modules(remove_duplicate=False):
                words = ".".join(part for part in (root, paths[path]) if part)
                self._paths.setdefault(id(inner), words)
        above = self._stack[-1][0] if self._stack else ""
        self._stack.append((self._paths.get(id(module), above), type(module).__name__))

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        path, kind = self._stack.pop() if self._stack else ("", type(module).__name__)
        if id(module) not in self._paths or self._busy:
            return
        self._note(path, kind, "", _line_of_forward(module), self._inputs((args, kwargs)), result)

    # ----------------------------------------------------------------------------------------- functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        line = None if self._busy else _line(sys._getframe(1))
        if line is None:
            return func(*args, **kwargs)
        operator = _name_of(func)
        path, kind = self._stack[-1] if self._stack else ("", "")
        if self._before is not None and self._key(path, operator) == self._stop_at:
            before, self._before = self._before, None
            with self._quietly():
                before(func, args, kwargs)
        given = self._inputs((args, kwargs))
        result = func(*args, **kwargs)
        changed = args[0] if getattr(func, "__name__", "") in _CHANGES and args else result
        self._note(path, kind, operator, line, given, changed)
        return result

    def _key(self, path: str, operator: str) -> str:
        return f"{self._calls}|{path}|{operator}|{self._counts[f'{path}|{operator}']}"

    def _note(
        self, path: str, kind: str, operator: str, line: str, inputs: tuple[str, ...], result: Any
    ) -> None:
        with self._quietly():
            tensors = named_tensors(result, "")
            if not tensors or len(self.events) >= _MOST_EVENTS:
                return
            key = self._key(path, operator)
            self._counts[f"{path}|{operator}"] += 1
            names = tuple(f"{key}{name}" for name in tensors)
            self.events.append(Event(key, path, kind, operator, line, inputs, names))
            for name, tensor in zip(names, tensors.values(), strict=True):
                self._observe(name, False, tensor)
                if operator or id(tensor) not in self._names:
                    self._know(tensor, name)
                    self._watch_gradient(name, tensor)

    def _watch_gradient(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.requires_grad or tensor.grad_fn is None:
            return

        def arrived(gradient: torch.Tensor | None) -> None:
            # A tensor that is used several times is told of once, with the sum; a retained graph may come again.
            if gradient is not None and name not in self._hooked:
                self._hooked.add(name)
                self.gradients.append(name)
                with self._quietly():
                    self._observe(name, True, gradient)

        tensor.register_hook(arrived)

    # ------------------------------------------------------------------------------------------- tensors

    def _know(self, tensor: torch.Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        self._alive.append(tensor)

    def _inputs(self, arguments: Any) -> tuple[str, ...]:
        with self._quietly():
            found = named_tensors(arguments, "")
            return tuple(self._names.get(id(tensor), "") for tensor in found.values())

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before


def _line(frame: Any) -> str | None:
    """Where a call stands: the nearest line of a user's code, else of torch; None inside the parallel machinery."""
    inside = None
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
        if file.startswith(_RECORDER) or file in _HANDING_OVER:
            continue
        if _PARALLEL in file:
            return None
        if file == _RUNNER:
            break
        if file.startswith((_TORCH, "<")):
            inside = inside or f"{_shorter(file)}:{line}"
            continue
        return f"{_shorter(file)}:{line}"
    return inside or ""


def _line_of_forward(module: torch.nn.Module) -> str:
    """Where the forward of a module begins; empty where that is not Python."""
    code = getattr(type(module).forward, "__code__", None)
    return f"{_shorter(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""


def _shorter(file: str) -> str:
    if file.startswith(_TORCH):
        return os.path.join("torch", file.removeprefix(_TORCH))
    if file.startswith(_OWN):
        return os.path.join("sbp", file.removeprefix(_OWN))
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def _name_of(func: Any) -> str:
    """``nn.functional.linear``, ``Tensor.add_``, ``matmul``."""
    full = resolve_name(func) or getattr(func, "__name__", "") or repr(func)
    for start in ("torch._C._nn.", "torch._C.", "torch._tensor."):
        if full.startswith(start):
            full = full.removeprefix(start)
    return full.removeprefix("torch.").replace("TensorBase.", "Tensor.").removesuffix(".__get__")
