"""sbp: does a module that is split over many ranks still compute what it computes on one device?"""

from sbp._version import __version__
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
