"""Counts the writes: one entry for each place and each set of claims that its tensors came with."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from sbp.inplace import tensors
from sbp.inplace.compare import Opinion
from sbp.inplace.operators import Argument
from sbp.inplace.records import Operand, Record
from sbp.inplace.stack import ModulePaths, Site

_MOST_ENTRIES = 20_000


class Tally(NamedTuple):
    """What became of a write: its outcome, the placements of its arguments afterwards, and a line about it."""

    outcome: str
    after: tuple[str, ...]
    message: str = ""
    compared: bool = False


@dataclass
class Entry:
    """A write that came up.

    Attributes:
        before: name, placements and whether it is written, of each tensor argument.
        claims: the claims of its tensors, kept because the entry is found by their ids.
        module: gives the module that the site is in, if it is still there.
        what: the same text for the same write on all ranks.
        usual: what became of it where nothing out of the ordinary was found, and ``times`` how often that was.
        tally: how often each other thing became of it.
    """

    site: Site
    path: str
    operator: str
    before: tuple[tuple[str, str, bool], ...]
    claims: tuple[Any, ...] = ()
    module: Callable[[], torch.nn.Module | None] = lambda: None
    what: str = ""
    usual: Tally | None = None
    times: int = 0
    tally: Counter[Tally] = field(default_factory=Counter)

    def count(self, outcome: str, after: tuple[str, ...], message: str = "", compared: bool = False) -> Tally:
        """Count one more."""
        tally = Tally(outcome, after, message, compared)
        self.tally[tally] += 1
        return tally

    def totals(self) -> Counter[Tally]:
        totals = Counter(self.tally)
        if self.usual is not None:
            totals[self.usual] += self.times
        return totals


class Log:
    """All entries of a watch, and what the comparisons found."""

    def __init__(self) -> None:
        self.paths = ModulePaths()
        self.opinions: dict[str, Opinion] = {}
        self._entries: dict[Any, Entry] = {}
        self._old: list[Entry] = []

    def entry(
        self, site: Site, operator: str, arguments: Sequence[Argument], found: Sequence[torch.Tensor]
    ) -> Entry:
        """The entry of this write at this place with these claims of its tensors."""
        claims = [tensors.claim(one) if isinstance(one, tensors.DISTRIBUTED) else None for one in found]
        key = (site.file, site.line, id(site.module), site.family, operator, *map(id, claims))
        entry = self._entries.get(key)
        if entry is not None and entry.module() is site.module:
            return entry
        if len(self._entries) >= _MOST_ENTRIES:
            self._retire()
        texts = show_each(arguments, found)
        before = tuple((one.name, text, one.written) for one, text in zip(arguments, texts, strict=True))
        path = self.paths.path(site.module)
        shapes = [(tuple(one.shape), str(one.dtype)) for one in found]
        what = f"{operator} {os.path.basename(site.file)}:{site.line} {path} {before} {shapes}"
        module = weakref.ref(site.module) if site.module is not None else lambda: None
        kept = site._replace(module=None)  # an entry must not keep the module alive
        self._entries[key] = entry = Entry(kept, path, operator, before, tuple(claims), module, what)
        return entry

    def plain_entry(self, site: Site, operator: str, name: str, placement: str) -> Entry:
        """The entry of a write that no operator on distributed tensors made."""
        key = (site.file, site.line, operator, name, placement, site.family)
        entry = self._entries.get(key)
        if entry is None:
            path = self.paths.path(site.module)
            kept = site._replace(module=None)
            entry = self._entries[key] = Entry(kept, path, operator, ((name, placement, True),))
        return entry

    def _retire(self) -> None:
        """Keep what was counted and forget what it is found by: claims may be new objects each time."""
        merged: dict[Any, Entry] = {}
        for entry in self._all():
            key = (entry.site, entry.path, entry.operator, entry.before)
            into = merged.setdefault(key, Entry(entry.site, entry.path, entry.operator, entry.before))
            into.tally.update(entry.totals())
        self._old = list(merged.values())
        self._entries = {}

    def _all(self) -> Iterable[Entry]:
        return [*self._old, *self._entries.values()]

    def records(self) -> list[Record]:
        """The writes as data; those that differ in their count alone are one record."""
        counts: Counter[Record] = Counter()
        for entry in self._all():
            site = entry.site
            for tally, count in entry.totals().items():
                operands = tuple(
                    Operand(name, before, after, written)
                    for (name, before, written), after in zip(entry.before, tally.after, strict=True)
                )
                record = Record(
                    file=site.file,
                    line=site.line,
                    source=site.source,
                    function=site.function,
                    module=entry.path,
                    operator=entry.operator,
                    operands=operands,
                    outcome=tally.outcome,
                    message=tally.message,
                    family=site.family or "",
                    compared=tally.compared,
                )
                counts[record] += count
        names = [one.name for one in fields(Record) if one.name != "count"]
        return [
            Record(**{name: getattr(record, name) for name in names}, count=count)
            for record, count in counts.items()
            if count > 0
        ]


def show_each(arguments: Sequence[Argument], found: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """The placements of each argument: ``S(0)``; of a list, those that occur with their number."""
    texts = []
    start = 0
    for argument in arguments:
        texts.append(_show(found[start : start + argument.size]))
        start += argument.size
    return tuple(texts)


def _show(values: Sequence[torch.Tensor]) -> str:
    texts = Counter(tensors.placement_text(one) if tensors.is_distributed(one) else "plain" for one in values)
    if len(values) == 1:
        return next(iter(texts))
    return "[" + ", ".join(f"{count} x {text}" for text, count in texts.items()) + "]"
