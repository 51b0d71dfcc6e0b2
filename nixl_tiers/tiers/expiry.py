"""Expiry of rows (`max_age`), by the time in their seals: when they were sealed, by the clock of the writer.

Clocks differ and jump. A seal that is ahead of the reader's clock counts as made when it was first seen, until the
clock has caught up with it. So nothing expires early, and such a row lives for at most one `max_age` longer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SWEEP_S: Final = 60.0
SWEEPS_PER_AGE: Final = 10


def has_expired(sealed_at: float, now_s: float, max_age_s: float | None) -> bool:
    """Whether a row sealed then is too old now (Unix seconds). A seal without a time (0) is, if there is a maximum."""
    return max_age_s is not None and sealed_at <= now_s - max_age_s


def expired(sealed_at: NDArray[np.uint32], now_s: float, max_age_s: float) -> NDArray[np.bool_]:
    """`has_expired` for many rows, as flags."""
    flags: NDArray[np.bool_] = sealed_at <= now_s - max_age_s
    return flags


def sweep_s(max_age_s: float) -> float:
    """How often to sweep for expired rows, in seconds."""
    return min(SWEEP_S, max_age_s / SWEEPS_PER_AGE)
