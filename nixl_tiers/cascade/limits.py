"""The bounds that keep storage out of the way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds, rows, and shares of a tier's rows."""

    wait_s: float = 10.0  # a request waits this long for promotions, then recomputes
    hold_s: float = 30.0  # after that, rows promoted for it may go even if it never came back
    job_s: float = 30.0  # a job may take this long, and longer by its bytes at
    slowest_bytes_per_s: float = 4e6
    retry_s: float = 5.0  # a stored row whose load failed is not tried again sooner
    load_share: float = 0.10  # of the host rows: what may be under promotion at once
    store_share: float = 0.05
    reserve_share: float = 0.05  # of a tier whose evictions are written below: what is kept free ahead of need
    moves_per_job: int = 64
    job_bytes: int = 16 << 20  # small jobs keep a window full: rows are free, or hits, when their own job ends
