"""Sorting numbers together with their places, which numpy does 10 times as fast as finding an order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def sorted_with_places(values: NDArray[np.uint64], place_bits: int = 32) -> NDArray[np.uint64]:
    """uint64 (n,): the values, sorted, above the lowest `place_bits` bits, which have where each one was. Stable.
    Overwrites `values`; both must fit."""
    values <<= np.uint64(place_bits)
    values |= np.arange(len(values), dtype=np.uint64)
    values.sort()
    return values
