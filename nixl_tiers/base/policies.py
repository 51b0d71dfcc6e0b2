"""Words and defaults of the configuration that the core uses too: when a tier is written to, what it evicts first, how
long a request waits."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal


class Write(StrEnum):
    """When a storage tier is written to."""

    THROUGH = "through"  # as soon as a row is complete above
    ON_EVICT = "on_evict"  # when the tier above is about to evict it (write-back)
    OFF = "off"  # never: a read-only tier


class HugePages(StrEnum):
    """Which pages the host region lies in."""

    AUTO = "auto"  # transparent huge pages where the kernel gives them to shared memory, else 4 KiB
    HUGETLB = "hugetlb"  # 2 MiB pages out of the machine's pool; as `auto` where the pool or a limit has too few
    OFF = "off"  # 4 KiB


Prefer = Literal["latency", "throughput"]
"""Whose time counts when loading is weighed against computing: the request's own, or that of all requests, which wait
while one computes, and not while one loads."""

DEFAULT_WAIT_S: Final = 10.0  # for promotions
DEFAULT_PROBE_S: Final = 0.25  # for existence checks

MOST_TENANTS: Final = 64  # that have a quota; csrc/tier_rows.h has an order for each
