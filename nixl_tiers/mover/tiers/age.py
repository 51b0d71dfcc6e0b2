"""How old a row may get: by its seal, which holds the time at which it was sealed by whoever sealed it.

Clocks differ and jump. A row from the future is as good as one of now while it is ahead by no more than AHEAD_S: so
writers need not agree to the second. One that is further ahead has expired: nobody can tell how old it is, and it must
not live for ever. A clock that is put back by more than that costs the rows that were stored meanwhile.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

AHEAD_S: Final = 600.0
SWEEP_S: Final = 60.0
SWEEPS_IN_AN_AGE: Final = 10


def has_expired(sealed_at: float, now_s: float, max_age_s: float | None) -> bool:
    """Whether a row sealed then is too old now (Unix seconds); one without a time (0) is, if there is an age at all."""
    return max_age_s is not None and not now_s - max_age_s < sealed_at <= now_s + AHEAD_S


def expired(sealed_at: NDArray[np.uint32], now_s: float, max_age_s: float) -> NDArray[np.bool_]:
    """`has_expired` for many, as flags."""
    flags: NDArray[np.bool_] = (sealed_at <= now_s - max_age_s) | (sealed_at > now_s + AHEAD_S)
    return flags


def sweep_s(max_age_s: float) -> float:
    """How often to look for rows that have expired, in seconds."""
    return min(SWEEP_S, max_age_s / SWEEPS_IN_AN_AGE)
