"""What mutates a tensor: the one table that the run-time watch, the lint and the suite read.

The data is ``mutations.json``, written by ``sbp.inplace.make_table`` from torch's schemas. Reading it imports no
torch.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).with_name("mutations.json")

GROUPS = ("value", "metadata", "storage", "harmless", "foreach", "fused", "amp", "init", "clip")
"""What a write changes. ``value``: elements. ``metadata``: shape, strides or names. ``storage``: the memory under
the tensor. ``harmless``: only what autograd or the allocator knows. ``foreach``, ``fused``, ``amp``: elements of
lists of tensors, mostly in optimizers. ``init`` and ``clip``: ``torch.nn.init`` and gradient clipping."""


class Operator(NamedTuple):
    """One overload that writes to tensor arguments.

    ``name`` is the dispatcher's (``aten::add_.Tensor``; an overload without a name is ``default``), ``kind`` is
    ``in-place``, ``out`` or ``both``, ``writes`` names the arguments that are written, ``functional`` is the
    overload with the same inputs that writes nothing, or None.
    """

    name: str
    kind: str
    writes: tuple[str, ...]
    group: str
    functional: str | None


@lru_cache(maxsize=1)
def load() -> dict[str, Any]:
    """The raw table, section by section; see ``make_table.make_table`` for what each section holds."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


@lru_cache(maxsize=1)
def operators() -> dict[str, Operator]:
    """All overloads that write to a tensor, by the dispatcher's name (``aten::add_.Tensor``)."""
    return {
        name: Operator(name, entry["kind"], tuple(entry["writes"]), entry["group"], entry.get("functional"))
        for name, entry in load()["operators"].items()
    }


def operator(name: str) -> Operator | None:
    """The entry of one overload, or None if it writes to no tensor.

    Takes both spellings: ``aten::add_.Tensor``, and ``aten.add_.Tensor`` as ``str(OpOverload)`` prints it.
    """
    if "::" not in name:
        namespace, _, rest = name.partition(".")
        name = f"{namespace}::{rest}"
    if "." not in name:
        name += ".default"
    return operators().get(name)


def methods(group: str | None = None) -> frozenset[str]:
    """Names of the Tensor methods that write to the tensor itself; only those of one group if it is given."""
    table = load()["methods"]
    return frozenset(name for name, entry in table.items() if group is None or entry["group"] == group)


def functional_method(name: str) -> str | None:
    """The Tensor method that does out of place what ``name`` does in place: ``add`` for ``add_``."""
    found: str | None = load()["methods"].get(name, {}).get("functional")
    return found
