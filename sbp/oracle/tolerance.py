"""How large a difference may be before it is a fault."""

from __future__ import annotations

# In float64 honest sharding differs by at most 1.2e-14 of the norm (ten operators, 2 to 8 pieces), and the
# smallest fault worth finding, a scale error of 1e-6, is a hundred million times that. Anything between the
# two would do; this is near the middle of them on a logarithmic scale.
FLOAT64_RELATIVE = 1e-10

# How many times its noise (sbp.oracle.noise) an error may be. Honest runs, cut into 2 to 8 pieces in one process, were
# at most 3.3 and 3.5 times off (8,100 runs of ten operators).
L2_FACTOR = 5.0
LARGEST_FACTOR = 8.0

_EPSILON = {"float32": 2.0**-23, "complex64": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def is_low(dtype: str) -> bool:
    """Whether results of that dtype are judged by their noise."""
    return dtype in _EPSILON


def relative_limit(dtype: str) -> float:
    """The relative norm of the difference that is still rounding, for results of ``dtype``; 0 for integers.

    For dtypes below float64 this bound is a coarse one, 64 roundings of the result, for where the noise is not known.
    """
    if dtype in ("float64", "complex128"):
        return FLOAT64_RELATIVE
    if dtype in _EPSILON:
        return 64 * _EPSILON[dtype]
    if dtype.startswith("float8"):
        return 1.0
    return 0.0
