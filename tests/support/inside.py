"""What tests know of a core beyond its door: nothing else reaches into its parts."""

from __future__ import annotations

from typing import Any

import pytest

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.chain_rows import Chain
from nixl_tiers.core.jobs import Jobs
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefetch_queue import QueuedPrefetch
from nixl_tiers.core.probes import Measurements
from nixl_tiers.core.promotion import Promotion, RequestIndex
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.requests import Request
from nixl_tiers.core.rows import NO_ID, Found, Row, TierRows
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier_index import TierIndex


def state(core: TierManager) -> CascadeState:
    """Windows, ticks, prices."""
    return core._state


def jobs(core: TierManager) -> Jobs:
    """What movers get."""
    return core._jobs


def requests(core: TierManager) -> RequestIndex:
    """Those that have arrived, or that anything is known of."""
    return core._requests


def promotion(core: TierManager) -> Promotion:
    """The waits of requests."""
    return core._promotion


def promotion_jobs(core: TierManager) -> PromotionJobs:
    """What comes up."""
    return core._promotion_jobs


def measurements(core: TierManager) -> Measurements:
    """Loads that no request waits for."""
    return core._measurements


def waiting(core: TierManager) -> dict[str, Request]:
    """Requests that wait, or for which rows are pinned."""
    return core._promotion._waiting


def line(core: TierManager) -> list[QueuedPrefetch]:
    """Requests whose turn is to come, and prefetches, in their order."""
    return core._promotion.prefetch_queue._places


def loading_for(core: TierManager, row: Row) -> list[Request]:
    """On whose behalf a row comes up."""
    return core._promotion_jobs._loading_for.get(row.order, [])


def retained(core: TierManager) -> int:
    """Keys that are retained."""
    return sum(map(len, core._retention._until.values()))


def retention_waits(core: TierManager) -> bool:
    """Whether time brings the end of a retention, or a prefetch."""
    return core._retention.waiting


def pins(core: TierManager, key: Key) -> int:
    """How often the host's row of this key is kept from eviction."""
    found = core.host.generation.table.get(key)
    return 0 if found is None else Found(*found).pins


def pinned(core: TierManager) -> set[Key]:
    """The keys of the host's rows that are kept from eviction."""
    return {key for key in core.host.index if pins(core, key)}


def evicting(rows: TierRows) -> list[Key]:
    """The keys of a table's rows that are being evicted."""
    return [key for key in rows.some(0, len(rows))[1] if rows.is_evicting(key)] if rows.evicting() else []


def evict(index: TierIndex, key: Key) -> None:
    """A tier evicts this row."""
    index._evict(key, index.rows.remove(key, NO_ID))


def copied(core: TierManager, rows: int, seconds: float, now: float, *, at_most: bool = False) -> None:
    """The engine has copied so many rows, which took so long."""
    core._copies.copied(rows, seconds, now, at_most=at_most)


def dropped(core: TierManager, keys: list[Key]) -> None:
    """These of the host's rows leave it."""
    rows = [core.host.index[key] for key in keys]
    for row in rows:
        if row.retained_until:
            core.host.release(row)
        core.host.evict(row)
    core._state.dropped([row for row in rows if row.removed])


def shares(core: TierManager, name: str, chain: Chain) -> bool:
    """Whether the engine keeps this request back, to share what it loads for another."""
    request = core._requests.by_name.get(name)
    return request is not None and core._chains.shares(request, chain, 0)


def scans(core: TierManager, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests all of whose chain is gone through from now on."""
    names: list[str] = []
    scan = core._chains._scan

    def counted(request: Request, *arguments: Any) -> Any:
        names.append(request.name)
        return scan(request, *arguments)

    monkeypatch.setattr(core._chains, "_scan", counted)
    return names
