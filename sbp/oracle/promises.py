"""What random results promise, whatever was drawn. Needs numpy alone.

A promise is a text: ``permutation``, ``uniform`` (of [0, 1)), ``normal`` (mean 0, variance 1), or
``either A or B`` (each with probability 1/2).
"""

from __future__ import annotations

import re

import numpy as np

from sbp.placement import Array

# By how many standard deviations a mean may be off: chance alone does that in one of 500 million draws.
_DEVIATIONS = 6.0


def broken(promise: str, values: Array) -> str:
    """How ``values`` break a promise, in words; empty where they keep it. Raises ValueError for an unknown one."""
    flat = values.reshape(-1)
    if promise == "permutation":
        if np.array_equal(np.sort(flat), np.arange(flat.size)):
            return ""
        return f"not a permutation of 0 to {flat.size - 1}: {_extent(flat)}"
    flat = flat.astype(np.float64)
    if match := re.fullmatch(r"either (\S+) or (\S+)", promise):
        low, high = float(match[1]), float(match[2])
        other = (flat != low) & (flat != high)
        if other.any():
            return f"{int(other.sum())} of {flat.size} elements are neither {match[1]} nor {match[2]}"
        return _mean_off(flat, (low + high) / 2, abs(high - low) / 2)
    if promise == "uniform":
        if flat.size and not (flat.min() >= 0 and flat.max() < 1):
            return f"not in [0, 1): {_extent(flat)}"
        return _mean_off(flat, 0.5, 12**-0.5)
    if promise == "normal":
        # The variance of a square of a standard normal number is 2.
        return _mean_off(flat, 0.0, 1.0) or _mean_off(flat**2, 1.0, 2**0.5, "mean square")
    raise ValueError(f"{promise!r} is not a promise")


def _mean_off(values: Array, mean: float, deviation: float, what: str = "mean") -> str:
    if values.size == 0:
        return ""
    found = float(values.mean())
    if abs(found - mean) <= _DEVIATIONS * deviation / values.size**0.5:
        return ""
    return f"the {what} is {found:.4g}, that of the distribution {mean:.4g}"


def _extent(values: Array) -> str:
    return f"it goes from {values.min():.6g} to {values.max():.6g}" if values.size else "it is empty"
