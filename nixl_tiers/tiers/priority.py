"""Low CPU priority for threads that only store, so that a busy machine serves first whom requests wait for.

Linux has a nice value for each thread. A thread inherits that of the one that starts it, may raise it, and cannot lower
it again without a right (CAP_SYS_NICE, RLIMIT_NICE). So a thread that also loads must never call this.

Nor must one that runs Python code: while it holds the interpreter lock and is not scheduled, since its priority is low,
the mover's loop waits for the lock (priority inversion). It is for native threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

STORE_NICE: Final = 10  # a tenth of the weight of a thread with 0

T = TypeVar("T")


def at_low_priority(start: Callable[[], T]) -> T:
    """Call `start` on a thread that ends with it: native threads that it starts have low priority for all their life.
    Returns or raises what it does."""
    with ThreadPoolExecutor(1, initializer=lambda: os.nice(STORE_NICE)) as thread:
        return thread.submit(start).result()
