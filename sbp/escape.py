"""Text from elsewhere (ids, messages, module names) for a terminal or a log: it must not steer what shows it."""

from __future__ import annotations

import re
import sys

# Control characters would move the cursor, colour the screen or ring; bidirectional marks reorder what is read; half of
# a surrogate pair cannot be written at all.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Text with its control characters made visible; tabs and line ends stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(text: str) -> str:
    """Printable text whose line ends are made visible too."""
    return printable(text).replace("\n", "\\n")


def complain(command: str, text: str, code: int) -> int:
    """Say in one line on stderr what is wrong; returns ``code``."""
    print(f"{command}: {one_line(text)}", file=sys.stderr)
    return code


def print_whatever_comes() -> None:
    """Have characters that the terminal's encoding lacks printed as escapes instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
