"""sbp: does a module that is split over many ranks still compute what it computes on one device?

The names of :mod:`sbp.cases` and :func:`assert_conforms` are loaded when they are asked for, since the lint imports
this package too and must start at once.
"""

from typing import TYPE_CHECKING, Any

from sbp._version import __version__

if TYPE_CHECKING:
    from sbp.cases import (
        Call,
        Case,
        CaseError,
        Packed,
        Parallel,
        Train,
        World,
        call,
        case,
        fused,
        packed,
        padded,
        transposed,
    )

__all__ = [
    "Call",
    "Case",
    "CaseError",
    "Packed",
    "Parallel",
    "Train",
    "World",
    "__version__",
    "call",
    "case",
    "fused",
    "packed",
    "padded",
    "transposed",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sbp' has no attribute {name!r}")
    from sbp import cases

    return getattr(cases, name)


def __dir__() -> list[str]:
    return __all__
