"""The words of a verdict, in one place; see the design page for what each means."""

from __future__ import annotations

# Differences that rounding explains, a clear refusal, and results that are zero on one device as well, by which nothing
# can be told, are not failures.
HARMLESS = ("pass", "noise", "refused", "no signal")

# The order says which word a trial gets when several apply: the one nearest the cause.
FAILURES = (
    "crash",
    "hang",
    "ranks disagree",
    "lost write",
    "wrong layout",
    "wrong value",
    "wrong gradient",
    "wrong state",
    "error",
)

WORDS = (*HARMLESS, *FAILURES)


def percent(part: float) -> str:
    """0.0043 as ``0.43 %``."""
    return f"{100 * part:.0f} %" if part >= 1 else f"{100 * part:.2g} %"
