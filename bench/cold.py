"""Cold code on purpose: what a call costs behind a forward pass, which leaves neither code nor data in any cache."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

CACHE_BYTES: Final = 64 << 20  # more than a processor's second-level cache, and most of its last one
SLEEP_S: Final = 0.003  # as long as a short step: the processor has done something else by then, and clocks down


class Cold:
    """Call it before each step of a bench."""

    def __init__(self) -> None:
        self._bytes = np.ones(CACHE_BYTES, np.uint8)

    def __call__(self) -> None:
        time.sleep(SLEEP_S)
        self._bytes.sum()


def warm() -> None:
    """Instead of a Cold: nothing."""
