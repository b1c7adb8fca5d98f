"""What the lint found: one write to a distributed tensor, or one file that it could not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

UNREADABLE = "SBP100"


class Related(NamedTuple):
    """Another line that belongs to a finding: where a module that works in place is called."""

    line: int
    text: str


@dataclass(frozen=True, order=True)
class Finding:
    """One finding. Lines count from 1, columns from 0, in characters; the end is exclusive.

    ``level`` is ``certain`` or ``likely`` (empty for a file that cannot be read). ``kept`` says why ``--fix``
    leaves it alone; it is empty when it can be fixed. ``name`` is the plain name that is written to, if it is one.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    level: str
    message: str
    kept: str = ""
    name: str = ""
    related: tuple[Related, ...] = ()

    @property
    def lines(self) -> tuple[int, ...]:
        """All the lines that it names."""
        return (self.line, *(other.line for other in self.related))


def unreadable(path: str, message: str, line: int = 1, column: int = 0) -> Finding:
    """The one finding for a file that the lint cannot read."""
    return Finding(
        path, max(line, 1), max(column, 0), max(line, 1), max(column, 0) + 1, UNREADABLE, "", message
    )
