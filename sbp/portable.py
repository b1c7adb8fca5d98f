"""A program as plain data: what it calls and with what, so that a framework other than torch can run the same.

The program is run once in torch with real tensors and each call of a public function, method or module is noted.
What comes out, a *recipe*, holds no torch object: a step names ``torch.nn.functional.gelu``, ``Tensor.add_``,
``operator.imul`` or a module that is built from the constructor's own arguments, and refers to tensors by names.
Control flow that depends on values is not in it; shapes are those of the case.
"""

from __future__ import annotations

import enum
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.hooks import RemovableHandle

from sbp.oracle.reference import copy_program
from sbp.program import Program, to_numpy
from sbp.trees import map_tensors, named_tensors

_SIGN_NAMES = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift", "neg",
    "pos", "invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "iadd", "isub", "imul", "itruediv",
    "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
)  # fmt: skip
# What Python calls for an operator sign -> the function of the operator module that does the same.
_SIGNS = {f"__{name}__": name for name in _SIGN_NAMES}
_REFLECTED = {f"__r{name}__": name for name in _SIGN_NAMES[:11]}
_RENAMED = {"__div__": "truediv", "__idiv__": "itruediv"}
# Modules of torch that only hold others: what is called is inside.
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


class NotPortable(ValueError):
    """The program cannot be written down as a recipe; says why."""


class _Built(threading.local):
    arguments: dict[int, tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]] | None = None


_built = _Built()


def _new(cls: type[torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
    made: torch.nn.Module = object.__new__(cls)
    if _built.arguments is not None:
        _built.arguments[id(made)] = made, args, kwargs
    return made


@contextmanager
def noting_constructors() -> Iterator[None]:
    """Within this context, what each module is constructed with is remembered for :func:`record`."""
    # For good, since a class whose __new__ was taken away again cannot be constructed any more (a quirk of CPython).
    torch.nn.Module.__new__ = staticmethod(_new)
    _built.arguments = {}
    try:
        yield
    finally:
        _built.arguments = None


def record(program: Program, offered: Collection[str] | None = None) -> dict[str, Any]:
    """The recipe of ``program``. It is built, and recorded, within one :func:`noting_constructors`.

    Args:
        program: is run once, as a copy.
        offered: the names of the modules that the other framework has; others are noted as what they do inside.
            None for all of them.

    Returns:
        ``modules`` (path -> class, arguments, training), ``steps`` in their order, ``output`` (a tree of
        references), ``constants`` (tensors that are neither inputs nor state) and ``needs`` (all names that a
        framework must have). A reference is ``{"ref": name}`` with ``in NAME`` for inputs,
        ``state NAME`` for parameters and buffers, and numbers for results.

    Raises NotPortable.
    """
    if len(program.batches) > 1 or program.recipe.loss is not None or program.recipe.autocast is not None:
        raise NotPortable("several batches, a loss of its own or autocast")
    modules = _leaf_modules(program, offered)
    copied = copy_program(program)
    state = {**copied.parameters(), **copied.buffers()}
    recorder = _Recorder(copied, modules)
    for name, tensor in copied.inputs().items():
        recorder.know(tensor, f"in {name}")
    for name, tensor in state.items():
        recorder.know(tensor, f"state {name}")
    with recorder.watching(), recorder:
        batch = copied.batches[0]
        result = copied.function(*batch.args, **batch.kwargs)
    names = named_tensors(result, "output")
    outputs = {name: recorder.reference(tensor) for name, tensor in names.items()}
    return {
        "modules": {
            path: {**described, "training": module.training} for path, (module, described) in modules.items()
        },
        "steps": recorder.steps,
        "outputs": outputs,
        "constants": recorder.constants,
        "needs": sorted(recorder.needs | {f"nn.{entry['class']}" for _, entry in modules.values()}),
    }


def _leaf_modules(
    program: Program, offered: Collection[str] | None
) -> dict[str, tuple[torch.nn.Module, dict[str, Any]]]:
    """The torch.nn modules that are noted as a whole, by path."""
    if program.module is None:
        return {}
    found: dict[str, tuple[torch.nn.Module, dict[str, Any]]] = {}

    def walk(module: torch.nn.Module, path: str) -> None:
        cls = type(module)
        ours = getattr(torch.nn, cls.__name__, None) is cls and not isinstance(module, _CONTAINERS)
        if ours and (offered is None or cls.__name__ in offered):
            arguments = (_built.arguments or {}).get(id(module))
            if arguments is None:
                raise NotPortable(f"it is not known what {cls.__name__} was constructed with")
            args, kwargs = (plain(part) for part in arguments[1:])
            found[path] = module, {"class": cls.__name__, "args": args, "kwargs": kwargs}
            return
        for name, child in module.named_children():
            walk(child, f"{path}.{name}" if path else name)

    walk(program.module, "")
    return found


def plain(value: Any, refer: Callable[[torch.Tensor], dict[str, Any]] | None = None) -> Any:
    """Arguments as data. Tensors become what ``refer`` says, or their values.

    Raises NotPortable for anything that has no meaning outside torch.
    """

    def inner(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return refer(item) if refer is not None else {"array": to_numpy(item)}
        if item is None or (isinstance(item, (bool, int, float, str)) and not isinstance(item, enum.Enum)):
            return item
        if isinstance(item, torch.dtype):
            return {"dtype": str(item).removeprefix("torch.")}
        if item is Ellipsis:
            return {"ellipsis": True}
        if isinstance(item, slice):
            return {"slice": [inner(part) for part in (item.start, item.stop, item.step)]}
        if isinstance(item, tuple):
            return tuple(inner(part) for part in item)
        if isinstance(item, list):
            return [inner(part) for part in item]
        if isinstance(item, dict):
            return {"dict": [[inner(key), inner(part)] for key, part in item.items()]}
        if isinstance(item, torch.device):
            return {"device": item.type}
        raise NotPortable(f"an argument is a {type(item).__name__}")

    return inner(value)


@dataclass
class _Recorder(TorchFunctionMode):
    program: Program
    modules: Mapping[str, tuple[torch.nn.Module, dict[str, Any]]]
    steps: list[dict[str, Any]] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []
        self._inside = 0
        copies = dict(self.program.module.named_modules()) if self.program.module is not None else {}
        self._paths = {id(copies[path]): path for path in self.modules}

    # ------------------------------------------------------------------------------------------- tensors

    def know(self, tensor: torch.Tensor, name: str) -> dict[str, Any]:
        self._names[id(tensor)] = name
        self._alive.append(tensor)
        return {"ref": name}

    def reference(self, tensor: torch.Tensor) -> dict[str, Any]:
        if id(tensor) not in self._names:
            name = f"constant {len(self.constants)}"
            self.constants[name] = to_numpy(tensor)
            self.know(tensor, name)
        return {"ref": self._names[id(tensor)]}

    # --------------------------------------------------------------------------------------------- calls

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Module calls are noted within this context."""
        hooks: list[RemovableHandle] = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._enter),
            torch.nn.modules.module.register_module_forward_hook(self._leave, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) in self._paths or self._inside:
            self._inside += 1

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not self._inside:
            return
        self._inside -= 1
        if not self._inside:
            self._note("module", self._paths[id(module)], *self._positional(module, args, kwargs), result)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._inside:
            return result
        changes = getattr(func, "__name__", "") in ("__setitem__", "__set__")
        if changes or named_tensors(result, "result"):
            self._note(*_name_of(func), args, kwargs, result)
        return result

    def _positional(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A module's arguments with as few names as possible: frameworks agree on the order, less on the names."""
        rest = dict(kwargs)
        for name in list(inspect.signature(module.forward).parameters)[len(args) :]:
            if name not in rest:
                break
            args = (*args, rest.pop(name))
        return args, rest

    def _note(self, do: str, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if do == "reflected":
            do, args = "operator", tuple(reversed(args))
        step: dict[str, Any] = {
            "do": do,
            "name": name,
            "args": plain(tuple(args), self.reference),
            "kwargs": plain(dict(kwargs), self.reference)["dict"],
        }
        if do != "module":
            self.needs.add(f"{do} {name}")
        # ``x += y`` and ``x = f(x)`` bind x anew: what a framework returns is x from here on. Where a method returns
        # its own object, that stands for itself.
        binds = do != "method"

        def into(path: str, tensor: torch.Tensor) -> dict[str, Any]:
            if id(tensor) in self._names and not binds:
                return {"ref": self._names[id(tensor)], "same": True}
            return self.know(tensor, f"{len(self.steps)}{path}")

        step["into"] = plain_results(map_tensors(result, into, ""))
        self.steps.append(step)


def plain_results(tree: Any) -> Any:
    """A result whose tensors are references by now; anything else in it is dropped."""
    if isinstance(tree, dict) and "ref" in tree:
        return tree
    if isinstance(tree, (tuple, list)):
        return [plain_results(part) for part in tree]
    return None


def _name_of(func: Any) -> tuple[str, str]:
    """How a recipe calls a function that torch called: the kind of call and a name."""
    full = resolve_name(func) or getattr(func, "__name__", "") or repr(func)
    parts = full.split(".")
    last = parts[-1]
    if last in ("__get__", "__set__"):
        return "get" if last == "__get__" else "set", parts[-2]
    if last in _SIGNS:
        return "operator", _SIGNS[last]
    if last in _REFLECTED:
        return "reflected", _REFLECTED[last]
    if last in _RENAMED:
        return "operator", _RENAMED[last]
    if "Tensor" in parts or "TensorBase" in parts:
        return "method", last
    space = "nn.functional." if ("functional" in parts and "nn" in parts) or "_nn" in parts else ""
    for part in ("linalg", "fft", "special"):
        if part in parts or f"_{part}" in parts:
            space, last = f"{part}.", last.removeprefix(f"{part}_")
    return "function", space + last


def optimizer_as_data(
    program: Program, make: Callable[[Any], torch.optim.Optimizer] | None
) -> dict[str, Any] | None:
    """An optimizer's class and options; None without one. Raises NotPortable."""
    if make is None:
        return None
    optimizer = make(list(copy_program(program).parameters().items()))
    if len(optimizer.param_groups) != 1:
        raise NotPortable("an optimizer with several groups of parameters")
    options = {}
    for name, value in optimizer.defaults.items():
        if name not in _WAYS_TO_COMPUTE:
            options[name] = plain(value)
    return {"class": type(optimizer).__name__, "options": options}


# They say how torch computes a step, not what.
_WAYS_TO_COMPUTE = ("foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay")
