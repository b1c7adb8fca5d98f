"""Exit codes and bad input, as the commands of this package have them."""

from __future__ import annotations

import argparse
from typing import NoReturn

from sbp.escape import one_line

# No unexpected failure; unexpected failures, or a known one that passes; bad usage or input; the run could not be
# done or is incomplete.
OK, FAILED, USAGE, INCOMPLETE = 0, 1, 2, 3


class UsageError(ValueError):
    """Bad input; one line that says what and what to do."""


class Parser(argparse.ArgumentParser):
    """A parser of arguments that says in one line what is wrong with them, where argparse prints a page."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {one_line(message)}; --help says more\n")


def at_least_one(text: str) -> int:
    """The type of an argument that counts things."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def parse_time(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``5m`` or ``1h``. Raises UsageError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e7:
        raise UsageError(f"{text!r} is not a time; write 90s, 5m or 1h")
    return seconds
