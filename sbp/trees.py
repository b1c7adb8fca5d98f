"""Nested arguments and results: find, name and replace the tensors in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(tree: Any, function: Callable[[str, torch.Tensor], Any], name: str) -> Any:
    """A copy of ``tree`` with each tensor replaced by ``function(its name, the tensor)``.

    Goes through tuples (named ones too), lists, mappings and dataclasses; anything else stays as it is. A
    tensor at the top is called ``name``, others ``name[0]``, ``name.key`` and so on.
    """
    if isinstance(tree, torch.Tensor):
        return function(name, tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(getattr(tree, f), function, f"{name}.{f}") for f in tree._fields))
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(item, function, f"{name}[{i}]") for i, item in enumerate(tree)]
        # torch.return_types are tuples that take one sequence, like plain tuples and lists.
        return type(tree)(items)
    if isinstance(tree, Mapping):
        items_by_key = {key: map_tensors(item, function, f"{name}.{key}") for key, item in tree.items()}
        return items_by_key if type(tree) is dict else _same_mapping(tree, items_by_key)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = {
            f.name: map_tensors(getattr(tree, f.name), function, f"{name}.{f.name}")
            for f in dataclasses.fields(tree)
            if f.init
        }
        return dataclasses.replace(tree, **changed)
    return tree


def _same_mapping(like: Mapping[str, Any], items: dict[str, Any]) -> Mapping[str, Any]:
    try:
        return type(like)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def named_tensors(tree: Any, name: str) -> dict[str, torch.Tensor]:
    """The tensors in ``tree`` by the names that :func:`map_tensors` gives them, in order."""
    found: dict[str, torch.Tensor] = {}

    def note(tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
        found[tensor_name] = tensor
        return tensor

    map_tensors(tree, note, name)
    return found
