"""sbp: does a module that is split over many ranks still compute what it computes on one device?"""

# The module of this name is imported first, so that importing it later does not replace the decorator.
import sbp.case  # noqa: F401
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
