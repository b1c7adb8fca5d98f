"""The words of a verdict, in one place; see the design page for what each means."""

from __future__ import annotations

# Differences that rounding explains, and a clear refusal, are not failures.
HARMLESS = ("pass", "noise", "refused")

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
