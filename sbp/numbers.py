"""Random numbers for inputs: such that a wrong answer cannot look right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Values are multiples of the largest magnitude's power of two times this. 40 bits are far more than any
# operator needs to tell numbers apart and leave room for partial pieces to add up exactly in float64.
_GRID = 2.0**-40


def on_grid(values: NDArray[Any]) -> NDArray[Any]:
    """The same floating (or complex) values with the lowest bits rounded off, so that sums of partial pieces
    of them are exact (see ``placement.split``)."""
    values = np.asarray(values)
    if values.dtype.kind == "c":
        return np.asarray(on_grid(values.real) + 1j * on_grid(values.imag), dtype=values.dtype)
    if values.dtype.kind != "f":
        return values
    largest = float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))
    if largest == 0.0:
        return values
    # float32 and narrower keep fewer bits than the grid asks for; they are exact in float64 anyway.
    step = 2.0 ** np.ceil(np.log2(largest)) * max(_GRID, float(np.finfo(values.dtype).eps) * 2**6)
    return np.asarray(np.round(values / step) * step, dtype=values.dtype)


def draw_normal(shape: Sequence[int], random: np.random.Generator) -> NDArray[np.float64]:
    """Standard normal float64 values on the grid, none of them zero."""
    values = random.standard_normal(tuple(shape))
    return np.asarray(on_grid(np.where(np.abs(values) < 0.05, 0.3 + values, values)))
