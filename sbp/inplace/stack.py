"""Who wrote: the line of the user's code, the module it stands in, and whether a known part of torch did it."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import weakref
from types import FrameType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SBP = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What runs the trials is at the bottom of each stack there, and is nobody's code either.
_LAUNCH = os.path.join(os.path.dirname(os.path.dirname(_SBP)), "launch") + os.sep
_PYTHON = os.path.abspath(sysconfig.get_paths()["stdlib"]) + os.sep
_PACKAGES = tuple(
    os.path.abspath(path) + os.sep for path in {sysconfig.get_paths()[key] for key in ("purelib", "platlib")}
)

# Parts of torch that write by their nature: summed up, not listed, while nothing is wrong.
FAMILIES = {
    "optim": "optimizer",
    "nn/init": "nn.init",
    "nn/utils/clip_grad": "gradient clipping",
    "amp": "gradient scaler",
    "cuda/amp": "gradient scaler",
    "distributed/fsdp": "FSDP",
    "distributed/_composable": "FSDP",
    "nn/parallel": "DDP",
    "distributed/checkpoint": "checkpoint",
    "distributed/tensor": "DTensor itself",
}
LOADING = "load_state_dict"
BACKWARD = "backward pass"

_USER, _SKIP, _PLUMBING, _INSIDE = "user", "skip", "plumbing", "inside torch"
# Between an operator and who called it; never the line that anybody looks for.
_PLUMBING_PARTS = ("utils/", "_ops.py", "overrides.py", "_library/", "_dynamo/", "_compile.py", "_tensor.py")
_kinds: dict[str, tuple[str, str | None]] = {}


class Site(NamedTuple):
    """One place that writes.

    ``file`` is empty where no Python frame is to be seen (a backward thread). ``family`` is the known part of torch
    that wrote, None for the user's own writes. ``module`` is the nn.Module whose forward this is in.
    """

    file: str
    line: int
    function: str
    family: str | None
    module: torch.nn.Module | None

    @property
    def source(self) -> str:
        """The line's text, without the white space around it."""
        return linecache.getline(self.file, self.line).strip()


def _kind(filename: str) -> tuple[str, str | None]:
    """What a file is, and the family of a file of torch."""
    if filename.startswith(_TORCH):
        part = filename[len(_TORCH) :].replace(os.sep, "/")
        for prefix, family in FAMILIES.items():
            if part.startswith((prefix + "/", prefix + ".py")):
                return _INSIDE, family
        return (_PLUMBING if part.startswith(_PLUMBING_PARTS) else _INSIDE), None
    if filename.startswith(("<frozen", _SBP, _LAUNCH)):
        return _SKIP, None
    if filename.startswith(_PYTHON) and not filename.startswith(_PACKAGES):
        return _SKIP, None
    return _USER, None


def kind_of(filename: str) -> tuple[str, str | None]:
    """:func:`_kind`, remembered."""
    found = _kinds.get(filename)
    if found is None:
        found = _kinds[filename] = _kind(filename)
    return found


_CALL = torch.nn.Module._call_impl.__code__
_LOAD = torch.nn.Module.load_state_dict.__code__
_ENGINE = os.path.join(_TORCH, "autograd", "graph.py")


def here(depth: int = 1, with_module: bool = True) -> Site:
    """The place that the current operator was called from.

    It is the innermost frame of the user's code: not torch's, not Python's own library, not this package. Where
    there is none, the innermost one of torch that says something.

    Args:
        depth: how many frames to leave out, besides this one.
        with_module: look for the module as well, which may mean to look through the whole stack.
    """
    frame: FrameType | None = sys._getframe(depth)
    kinds = _kinds
    user: FrameType | None = None
    inside: FrameType | None = None
    family: str | None = None
    module: torch.nn.Module | None = None
    called = False
    while frame is not None:
        code = frame.f_code
        found = kinds.get(code.co_filename)
        kind, known = found if found is not None else kind_of(code.co_filename)
        if kind is _USER:
            if user is None:
                user = frame
                if not with_module:
                    break
        elif kind is _INSIDE:
            if user is None:
                if inside is None:
                    inside = frame
                    if code.co_filename == _ENGINE:
                        family = BACKWARD
                if family is None:
                    family = LOADING if code is _LOAD else known
            if code is _CALL and module is None:
                module = frame.f_locals["self"]
        elif not called:
            called = not code.co_filename.startswith(_OWN)
        if user is not None and module is not None:
            break
        frame = frame.f_back
    place = user if user is not None else inside
    if place is None:
        # Autograd's own threads have no Python frames at all.
        return Site("", 0, "", family if called else BACKWARD, module)
    if user is not None and family is None and _is_optimizer_step(user):
        family = FAMILIES["optim"]
    code = place.f_code
    return Site(code.co_filename, place.f_lineno or 0, code.co_name, family, module)


def _is_optimizer_step(frame: FrameType) -> bool:
    """Whether the frame is a method of somebody's own optimizer."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return False
    return isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


class ModulePaths:
    """Names modules by their path from the outermost module that was seen: ``layers.3.mlp``."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def learn(self, root: torch.nn.Module) -> None:
        """Name all modules under ``root``, unless ``root`` itself stands in a larger one that is known."""
        if root not in self._paths:
            for name, module in root.named_modules():
                self._paths[module] = name

    def path(self, module: torch.nn.Module | None) -> str:
        """The module's path; its class for the outermost module itself or one that belongs to none."""
        if module is None:
            return ""
        if module not in self._paths:
            for root in _modules_in_call():
                self.learn(root)
        return self._paths.get(module, "") or type(module).__name__


def _modules_in_call() -> list[torch.nn.Module]:
    """The modules whose forward calls are on the stack, the outermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


def relative(file: str) -> str:
    """The file as people want it printed: relative where it lies under the working directory."""
    if not file or file.startswith("<"):
        return file
    try:
        shorter = os.path.relpath(file)
    except (ValueError, OSError):
        return file
    return file if shorter.startswith("..") else shorter
