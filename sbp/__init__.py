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
    from sbp.conform import ConformanceError, assert_conforms

__all__ = [
    "Call",
    "Case",
    "CaseError",
    "ConformanceError",
    "Packed",
    "Parallel",
    "Train",
    "World",
    "__version__",
    "assert_conforms",
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
    from importlib import import_module

    # Under their full names: a submodule that was imported is an attribute of the package as well.
    where = "sbp.conform" if name in ("ConformanceError", "assert_conforms") else "sbp.cases"
    return getattr(import_module(where), name)


def __dir__() -> list[str]:
    return __all__
