"""Exit codes and bad input, as the commands of this package have them."""

from __future__ import annotations

# No unexpected failure; unexpected failures, or a known one that passes; bad usage or input; the run could not be
# done or is incomplete.
OK, FAILED, USAGE, INCOMPLETE = 0, 1, 2, 3


class UsageError(ValueError):
    """Bad input; one line that says what and what to do."""


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
