"""The bounds that keep storage out of the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from nixl_tiers.cascade.breaker import BreakerLimits


@dataclass(frozen=True)
class Limits:
    """Seconds, rows, and shares of a tier's rows."""

    wait_s: float = 10.0  # a request waits this long for promotions, then recomputes
    pin_s: float = 30.0  # after that, rows promoted for it may go even if it never came back
    # A job is late after a multiple of its expected time, but not before `soft_deadline_min_s`, and at the
    # latest after `wait_s`: whom it is for recomputes then. Twice that for a hiccup, before its rows are missed so
    # much that the mover is killed; and however slow the tier, `hard_deadline_max_s` at the latest.
    soft_deadline_min_s: float = 5.0
    hard_deadline_min_s: float = 30.0
    hard_deadline_max_s: float = 120.0
    assumed_bytes_per_s: float = 4e6  # of a tier that has not shown its pace yet
    retry_s: float = 5.0  # a stored row whose load failed is not tried again sooner; twice as long each time
    retry_max_s: float = 600.0
    check_timeout_s: float = (
        0.25  # in all its life, a request waits so long to hear whether another engine has stored its keys
    )
    max_checks: int = 4  # of one tier at once
    keys_per_check: int = 512  # in one probe
    absent_s: float = 30.0  # what a probe has not found is not asked for again sooner
    absent_keys: int = 65536  # how many such keys a tier remembers
    clean_wait_s: float = 0.25  # a promotion waits so long for a row that is written below; then one is lost for it
    load_share: float = 0.10  # of the host rows: what may be under promotion at once
    store_share: float = 0.05
    quarantine_share: float = 0.75  # of the rows under promotion: how many may be stuck before the mover is killed
    reserve_share: float = 0.05  # of a tier whose evictions are written below: what is kept free ahead of need
    moves_per_job: int = 64
    deletes_per_batch: int = 256  # rows that a medium must forget, in one message; not fewer than moves_per_job
    job_bytes: int = 16 << 20  # small jobs keep a window full: rows are free, or hits, when their own job ends
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
