"""What the watch must know about an operator and about the tensors of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sbp.inplace import table, tensors

READ, VIEW, WRITE = "read", "view", "write"


class Argument(NamedTuple):
    """A tensor argument of a call: its name, how many tensors it is made of, and whether it is written."""

    name: str
    size: int
    written: bool


class Operator(NamedTuple):
    """An operator, from its schema.

    ``kind`` is ``write`` for one that writes to an argument, ``view`` for one whose result shares an argument's
    memory, else ``read``. ``places`` are its tensor arguments, each with its position. ``outs`` are the names of its
    ``out`` arguments, ``group`` the kind of write (see ``table.GROUPS``), ``functional`` the overload that does the
    same and writes nothing.
    """

    kind: str
    name: str
    places: tuple[tuple[int, Argument], ...] = ()
    outs: tuple[str, ...] = ()
    group: str = "value"
    functional: Any = None
    random: bool = False

    @property
    def writes(self) -> int:
        """How many arguments it writes."""
        return sum(argument.written for _, argument in self.places)


# By the operator's id: an overload's own hash is slow, and overloads live for ever.
_operators: dict[int, tuple[Any, Operator]] = {}
_distributed: dict[Any, bool] = {}


def describe(func: Any) -> Operator:
    """What the watch must know about an operator; remembered."""
    found = _operators.get(id(func))
    if found is None:
        found = _operators[id(func)] = func, _describe(func)
    return found[1]


def _describe(func: Any) -> Operator:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Operator(READ, str(func))
    collective = schema.name.startswith("c10d::") and schema.name.endswith("_")
    places = tuple(
        # Collectives write to their first argument, which their schemas do not say.
        (place, Argument(argument.name, 1, _is_written(argument) or (collective and place == 0)))
        for place, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    )
    if any(argument.written for _, argument in places):
        entry = table.operator(str(func))
        functional = None
        if entry is not None and entry.functional is not None and entry.kind != "both":
            functional = _overload(entry.functional)
        outs = tuple(argument.name for argument in schema.arguments if argument.is_out)
        group = entry.group if entry is not None else "value"
        random = torch.Tag.nondeterministic_seeded in func.tags
        return Operator(WRITE, str(func), places, outs, group, functional, random)
    if any(result.alias_info is not None for result in schema.returns):
        return Operator(VIEW, str(func), places)
    return Operator(READ, str(func), places)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _overload(name: str) -> Any:
    """``aten::add.Tensor`` as an operator."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def any_distributed(types: Any) -> bool:
    """Whether one of the types of a call's arguments is a distributed tensor's."""
    found = _distributed.get(types)
    if found is None:
        found = _distributed[types] = any(issubclass(one, tensors.DISTRIBUTED) for one in types)
    return found


def tensor_arguments(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Argument], list[torch.Tensor]]:
    """The tensor arguments of a call in the order of the schema, and all their tensors in one list."""
    arguments: list[Argument] = []
    found: list[torch.Tensor] = []
    given = len(args)
    for place, argument in operator.places:
        value = args[place] if place < given else kwargs.get(argument.name)
        if value is None:
            continue
        if type(value) is tensors.DISTRIBUTED or isinstance(value, torch.Tensor):
            found.append(value)
            arguments.append(argument)
        elif isinstance(value, (list, tuple)):
            before = len(found)
            _flatten(value, found)
            if len(found) > before:
                arguments.append(argument._replace(size=len(found) - before))
    return arguments, found


def _flatten(values: Sequence[Any], into: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            into.append(value)
        elif isinstance(value, (list, tuple)):
            _flatten(value, into)


def written_tensors(arguments: Sequence[Argument], found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of a call's tensors that it writes to."""
    if len(found) == 1:
        return list(found)
    written: list[torch.Tensor] = []
    start = 0
    for _, count, is_written in arguments:
        if is_written:
            written += found[start : start + count]
        start += count
    return written
