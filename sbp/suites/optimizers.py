"""torch's optimizers by name, as its own tests know them: the only place that reads the database of optimizers."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sbp.cases import CaseError


@dataclass(frozen=True)
class Variant:
    """An optimizer under one choice of its options.

    Attributes:
        name: ``AdamW``, ``AdamW:amsgrad``, ``AdamW:amsgrad:foreach``.
        make: the optimizer's class.
        options: its keyword arguments.
    """

    name: str
    make: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any]

    def __call__(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        # A learning rate that is a tensor belongs to one optimizer: schedulers write to it.
        return self.make(named, **copy.deepcopy(dict(self.options)))


# How torch computes a step: over each parameter in turn, over lists of them, or in one kernel. The differentiable
# one is for gradients through a step, not for training.
IMPLEMENTATIONS = ("foreach", "fused")


@cache
def variants() -> dict[str, Variant]:
    """Every variant of every optimizer, by name, in the database's order. The variant without options has the
    optimizer's bare name."""
    from torch.testing._internal.common_optimizers import optim_db

    found: dict[str, Variant] = {}
    for entry in optim_db:
        cls = entry.optim_cls
        kinds = [kind for kind in IMPLEMENTATIONS if kind in entry.supported_impls]
        if "fused" in kinds and "cpu" not in entry.supports_fused_on:
            kinds.remove("fused")
        for sample in entry.optim_inputs_func("cpu"):
            name = cls.__name__
            words = re.sub(r"[^a-z0-9.]+", "_", sample.desc.lower()).strip("_")
            if words != "default":
                name += f":{words}"
            for kind in ("", *kinds):
                # Without a word torch chooses by the device, so the plain loop is asked for.
                options = dict(sample.kwargs)
                if "foreach" in entry.supported_impls:
                    options["foreach"] = kind == "foreach"
                if kind == "fused":
                    options["fused"] = True
                label = f"{name}:{kind}" if kind else name
                found[label] = Variant(label, cls, options)
    return found


def choose(wanted: Any) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """The optimizers that ``Train.optimizer`` asks for, by the name that stands in ids. Raises CaseError."""
    items = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
    chosen: dict[str, Callable[[Any], torch.optim.Optimizer]] = {}
    for item in items:
        if item == "all":
            chosen.update(variants())
        elif isinstance(item, str):
            variant = _simple(item) or variants().get(item)
            if variant is None:
                raise CaseError(_unknown(item))
            chosen[item] = variant
        elif callable(item):
            chosen[_label(item, chosen)] = item
        else:
            raise CaseError(f"Train.optimizer: {item!r} is neither a name nor a function")
    if not chosen:
        raise CaseError("Train.optimizer names no optimizer")
    return chosen


def _simple(name: str) -> Variant | None:
    """``AdamW``, ``AdamW:foreach`` or ``AdamW:fused`` without the database, which takes seconds to import."""
    bare, _, kind = name.partition(":")
    cls = getattr(torch.optim, bare, None)
    if kind not in ("", *IMPLEMENTATIONS) or not isinstance(cls, type) or cls is torch.optim.Optimizer:
        return None
    if not issubclass(cls, torch.optim.Optimizer):
        return None
    known = inspect.signature(cls).parameters
    if kind and kind not in known:
        return None
    options: dict[str, Any] = {"foreach": kind == "foreach"} if "foreach" in known else {}
    if kind == "fused":
        options["fused"] = True
    return Variant(name, cls, options)


def _label(function: Any, taken: Mapping[str, Any]) -> str:
    inner = function
    while hasattr(inner, "func"):  # a partial
        inner = inner.func
    word = re.sub(r"\W+", "_", getattr(inner, "__name__", type(inner).__name__)).strip("_")
    label, number = word, 1
    while label in taken:
        number += 1
        label = f"{word}-{number}"
    return label


def _unknown(name: str) -> str:
    import difflib

    known = {variant.lower(): variant for variant in variants()}
    near = [known[word] for word in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else "such as AdamW, AdamW:amsgrad, AdamW:foreach"
    return f"Train.optimizer: there is no optimizer {name!r}; {hint}"
