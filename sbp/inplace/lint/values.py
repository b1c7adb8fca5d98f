"""What the lint knows about a value at one point of a program: its possible kinds, and how surely it is a
distributed tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# What a value may be. A value that may be several things has several bits.
TENSOR, NUMBER, TEXT, SEQUENCE, MAPPING, NONE, OBJECT, UNKNOWN = (1 << n for n in range(8))

# How surely a tensor is a distributed one: a tensor of no interest, a tensor inside a module's forward, a tensor
# that flows from distribute_tensor and the like.
PLAIN, LIKELY, CERTAIN = 1, 2, 3
LEVEL_NAMES = {LIKELY: "likely", CERTAIN: "certain"}

# How surely a value is a tensor at all: nothing said so (0), it came out of something that was given tensors (1),
# a parameter of forward() without annotation or the result of a submodule (2), an annotation or a torch function
# says so (3).
NOTHING, HINTED, ASSUMED, KNOWN = 0, 1, 2, 3

# What else is known of a tensor.
LOCAL = 1  # it is the local piece of a distributed tensor: to_local(), _local_tensor, or a view of one
DATA = 2  # reached through .data
SPLIT_VIEW = 4  # a view that cuts a dimension that is split over ranks
FRESH = 8  # made here, and nothing else refers to its memory
PARAMETER = 16  # an nn.Parameter or a buffer
BORROWED = 32  # a view of a name that was fresh: fresh again if that name is overwritten by it

# Marks that a value has when it may have them; FRESH it has only when it surely has it.
MAY_MARKS = LOCAL | DATA | SPLIT_VIEW | PARAMETER

NO_CONSTANT: Any = object()
# The types of keys under which a mapping's entries are told apart.
KEYS = (str, int)


class Reason(NamedTuple):
    """Where a tensor became interesting: ``text`` names the source, ``line`` is where it stands."""

    text: str
    line: int


class Value:
    """One abstract value; never changed after it is made."""

    __slots__ = (
        *("const", "element", "entries", "items", "kinds", "level", "marks", "refs", "split", "sure", "why"),
    )

    def __init__(
        self,
        kinds: int,
        level: int = 0,
        sure: int = 0,
        why: Reason | None = None,
        marks: int = 0,
        items: tuple[Value, ...] | None = None,
        element: Value | None = None,
        refs: tuple[Any, ...] = (),
        const: Any = NO_CONSTANT,
        split: frozenset[int] | None = None,
        entries: Mapping[Any, Value] | None = None,
    ) -> None:
        self.kinds = kinds
        self.level = level
        self.sure = sure
        self.why = why
        self.marks = marks
        self.items = items
        self.element = element
        self.refs = refs
        self.const = const
        self.split = split
        # Of a mapping: what stands under the keys that are written out; ``element`` is what stands under any key.
        self.entries = entries

    def __repr__(self) -> str:
        names = ("tensor", "number", "text", "sequence", "mapping", "none", "object", "unknown")
        kinds = "|".join(name for bit, name in enumerate(names) if self.kinds >> bit & 1)
        return f"Value({kinds}, level={self.level}, sure={self.sure}, marks={self.marks}, refs={self.refs})"

    @property
    def is_tensor(self) -> bool:
        """Whether it may be a tensor."""
        return bool(self.kinds & TENSOR)

    def with_marks(self, add: int = 0, drop: int = 0) -> Value:
        """The same value with other marks."""
        marks = (self.marks | add) & ~drop
        if marks == self.marks:
            return self
        return Value(
            self.kinds, self.level, self.sure, self.why, marks, self.items, self.element, self.refs, self.const,
            self.split, self.entries,
        )  # fmt: skip

    def replaced(self, **changes: Any) -> Value:
        """The same value with some fields changed. Where the element changes, the entries are forgotten unless they are
        given as well."""
        entries = None if "element" in changes else self.entries
        new = Value(
            self.kinds, self.level, self.sure, self.why, self.marks, self.items, self.element, self.refs, self.const,
            self.split, entries,
        )  # fmt: skip
        for name, value in changes.items():
            setattr(new, name, value)
        return new

    def elements(self) -> Value:
        """What iterating over it or indexing it may give, as one value."""
        if self.items:
            joined = self.items[0]
            for item in self.items[1:]:
                joined = join(joined, item)
            return joined if self.element is None else join(joined, self.element)
        if self.element is not None:
            return self.element
        return UNKNOWN_VALUE

    def entry(self, key: Any) -> Value | None:
        """What stands under a constant key, None where that is not known."""
        if self.entries is None or type(key) not in KEYS:
            return None
        return self.entries.get(key)

    def with_entry(self, key: Any, stored: Value) -> Value:
        """The mapping after ``self[key] = stored``; ``key`` is NO_CONSTANT where it is not known, and may then be any
        of those that are."""
        element = stored if not self.items and self.element is None else join(self.elements(), stored)
        if type(key) not in KEYS or not self.kinds & MAPPING:
            return self.replaced(items=None, element=element)
        # Entries have none of their own, so that a mapping that is put into itself does not grow.
        entries = {**(self.entries or {}), key: stored.replaced(entries=None)}
        return self.replaced(items=None, element=element, entries=entries)


def same(one: Value, other: Value) -> bool:
    """Whether two values say the same, as far as a loop needs to know."""
    return one is other or (
        one.kinds == other.kinds
        and one.level == other.level
        and one.sure == other.sure
        and one.marks == other.marks
        and one.refs == other.refs
        and one.split == other.split
        and (one.element is None) == (other.element is None)
        and (one.items is None) == (other.items is None)
        and same_entries(one.entries, other.entries)
    )


def same_entries(one: Mapping[Any, Value] | None, other: Mapping[Any, Value] | None) -> bool:
    if one is other:
        return True
    if one is None or other is None or one.keys() != other.keys():
        return False
    return all(value is other[key] or same(value, other[key]) for key, value in one.items())


def join(one: Value, other: Value) -> Value:
    """What is known of a value that is either of two."""
    if one is other:
        return one
    if one.kinds & TENSOR and other.kinds & TENSOR:
        sure = min(one.sure, other.sure)
    elif one.kinds & TENSOR:
        sure = min(one.sure, ASSUMED) if other.kinds & UNKNOWN else one.sure
    elif other.kinds & TENSOR:
        sure = min(other.sure, ASSUMED) if one.kinds & UNKNOWN else other.sure
    else:
        sure = min(one.sure, other.sure)
    items, element = one.items, one.element
    if one.items is not other.items or one.element is not other.element:
        items, element = join_contents(one, other)
    refs = one.refs
    if other.refs and other.refs != refs:
        refs = (refs + tuple(ref for ref in other.refs if ref not in refs))[:4]
    # A name that may be None or a number is as fresh as the tensor that it may be.
    fresh = (one.marks if one.kinds & (TENSOR | UNKNOWN) else FRESH) & (
        other.marks if other.kinds & (TENSOR | UNKNOWN) else FRESH
    )
    const = one.const
    if const is not other.const and not (type(const) is type(other.const) and const == other.const):
        const = NO_CONSTANT
    return Value(
        one.kinds | other.kinds,
        max(one.level, other.level),
        sure,
        one.why if one.level >= other.level else other.why,
        ((one.marks | other.marks) & MAY_MARKS) | (fresh & FRESH),
        items,
        element,
        refs,
        const,
        one.split if one.split == other.split else one.split and other.split and one.split | other.split,
        one.entries if one.entries is other.entries else join_entries(one, other),
    )


def join_entries(one: Value, other: Value) -> Mapping[Any, Value] | None:
    """The entries of a mapping that is either of two."""
    if one.entries is None:
        one, other = other, one
    assert one.entries is not None
    if other.entries is not None:
        joined = {**other.entries, **one.entries}
        for key in one.entries.keys() & other.entries.keys():
            joined[key] = join(one.entries[key], other.entries[key])
        return joined
    # Where nothing is known to be in the other, it says nothing against these.
    if not other.kinds & (SEQUENCE | MAPPING) or is_empty(other):
        return one.entries
    anything = other.elements()
    return {key: join(value, anything).replaced(entries=None) for key, value in one.entries.items()}


def join_contents(one: Value, other: Value) -> tuple[tuple[Value, ...] | None, Value | None]:
    """The items and the element of a container that is either of two."""
    holds = SEQUENCE | MAPPING
    if not one.kinds & holds:
        return other.items, other.element
    if not other.kinds & holds:
        return one.items, one.element
    if one.items is not None and other.items is not None and len(one.items) == len(other.items):
        return tuple(join(a, b) for a, b in zip(one.items, other.items)), None
    # An empty list says nothing about what will be put into it.
    if is_empty(one):
        return None, other.elements()
    if is_empty(other):
        return None, one.elements()
    return None, join(one.elements(), other.elements())


def is_empty(value: Value) -> bool:
    """Whether it is a container of which nothing is known to be in it."""
    return not value.items and value.element is None


UNKNOWN_VALUE = Value(UNKNOWN)
NUMBER_VALUE = Value(NUMBER)
TEXT_VALUE = Value(TEXT)
NONE_VALUE = Value(NONE, const=None)
OBJECT_VALUE = Value(OBJECT)
TRUE_VALUE = Value(NUMBER, const=True)
FALSE_VALUE = Value(NUMBER, const=False)
SHAPE_VALUE = Value(SEQUENCE, element=NUMBER_VALUE)


def sequence_of(element: Value) -> Value:
    """A list or tuple whose length is not known."""
    return Value(SEQUENCE, element=element)


def sequence(*items: Value) -> Value:
    """A list or tuple of exactly these."""
    return Value(SEQUENCE, items=items)


def mapping_of(element: Value | None, entries: Mapping[Any, Value] | None = None) -> Value:
    """A dictionary with these values, and of them those whose keys are written out."""
    return Value(MAPPING, element=element, entries=entries)
