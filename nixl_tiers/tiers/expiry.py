"""How old a row may get: by its seal, which holds the time at which it was sealed by whoever sealed it.

Clocks differ and jump. A seal that is ahead of the clock by which it is judged counts as sealed when it was first seen,
until the clock has caught up with it. So nothing is deleted early, and such a row lives for at most one age more.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SWEEP_S: Final = 60.0
SWEEPS_IN_AN_AGE: Final = 10


def has_expired(sealed_at: float, now_s: float, max_age_s: float | None) -> bool:
    """Whether a row sealed then is too old now (Unix seconds); one without a time (0) is, if there is an age at all."""
    return max_age_s is not None and sealed_at <= now_s - max_age_s


def expired(sealed_at: NDArray[np.uint32], now_s: float, max_age_s: float) -> NDArray[np.bool_]:
    """`has_expired` for many, as flags."""
    flags: NDArray[np.bool_] = sealed_at <= now_s - max_age_s
    return flags


def sweep_s(max_age_s: float) -> float:
    """How often to look for rows that have expired, in seconds."""
    return min(SWEEP_S, max_age_s / SWEEPS_IN_AN_AGE)
