"""The policies of a tier that a configuration names: when it is written to, and what it evicts first."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class Write(StrEnum):
    """When a storage tier is written to."""

    THROUGH = "through"  # as soon as a row is complete above
    ON_EVICT = "on_evict"  # when the tier above is about to evict it (write-back)
    OFF = "off"  # never: a read-only tier


Eviction = Literal["lru", "s3fifo", "arc"]
