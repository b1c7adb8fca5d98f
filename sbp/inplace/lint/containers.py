"""Methods of lists, tuples, sets and dictionaries: what they hold afterwards, what they give back."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from sbp.inplace.lint.scopes import Instance
from sbp.inplace.lint.syntax import path_of
from sbp.inplace.lint.values import (
    BORROWED,
    FRESH,
    MAPPING,
    NONE_VALUE,
    NUMBER_VALUE,
    SEQUENCE,
    TEXT_VALUE,
    UNKNOWN_VALUE,
    Value,
    join,
    sequence,
    sequence_of,
)

if TYPE_CHECKING:
    from sbp.inplace.lint.calls import Site
    from sbp.inplace.lint.flow import Flow


def container_method(
    flow: Flow, site: Site, base: Value, name: str, receiver: ast.expr | None
) -> Value | None:
    """The result of a container's method; None if it is not known."""
    from sbp.inplace.lint.calls import keep

    first = site.argument(0)
    if name in ("append", "add", "appendleft", "insert", "extend", "update", "setdefault"):
        keep(flow, site)
        added = site.arguments[-1] if site.arguments else None
        if added is not None:
            if name in ("extend", "update"):
                added = added.elements() if added.kinds & (SEQUENCE | MAPPING) else flow.iteration(added)
            store(flow, site, base, added.with_marks(drop=FRESH | BORROWED), receiver)
        return base.elements() if name == "setdefault" else NONE_VALUE
    if base.kinds & MAPPING:
        if name in ("get", "pop"):
            found = base.elements()
            default = site.argument(1)
            return join(found, default if default is not None else NONE_VALUE) if name == "get" else found
        if name == "items":
            return sequence_of(sequence(TEXT_VALUE, base.elements()))
        if name == "values":
            return sequence_of(base.elements())
        if name == "keys":
            return sequence_of(UNKNOWN_VALUE)
    elif name == "pop":
        if base.items and first is None:
            return base.items[-1]
        return base.elements()
    elif name in ("values", "indices"):
        # The named tuples of torch.max and the like.
        return base.elements()
    if name == "copy":
        return base
    if name in ("index", "count"):
        return NUMBER_VALUE
    if name in ("clear", "sort", "reverse", "remove"):
        return NONE_VALUE
    return None


def store(flow: Flow, site: Site, base: Value, added: Value, receiver: ast.expr | None) -> None:
    """Remember under the container's name what was put into it."""
    key = path_of(receiver) if receiver is not None else None
    if key is None or receiver is None:
        return
    if base.items is not None and len(base.items) < 8 and site.frame.loops == 0 and base.kinds == SEQUENCE:
        changed = base.replaced(items=(*base.items, added))
    else:
        empty = not base.items and base.element is None
        changed = base.replaced(items=None, element=added if empty else join(base.elements(), added))
    site.frame.bind_path(key, changed)
    if isinstance(receiver, ast.Attribute):
        owner = flow.value(receiver.value, site.frame)
        for ref in owner.refs:
            if isinstance(ref, Instance) and ref.info is not None:
                flow.store_attribute(ref.info, receiver.attr, changed)
