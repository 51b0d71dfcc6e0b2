"""What hints ask for: rows that stay for a while, chunks that come up again, rows that go first."""

from __future__ import annotations

from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import Limits
from tests.core.test_manager import HIT, scan
from tests.core.test_prefetch_queue import chain, come_up, in_host, stored
from tests.support import inside
from tests.support.core import expire, put


def alone(rows: int) -> TierManager:
    """A host without storage tiers, half of which may be retained."""
    return TierManager(rows, 4096, [], Limits(retain_share=0.5))


def test_chunks_come_up_again_when_they_are_to_be_needed() -> None:
    a = chain("a")
    core = stored(a, rows=16)
    assert core.prefetch(a, 5.0)
    expire(core, 4.9)
    assert come_up(core) == []
    expire(core, 5.0)
    assert come_up(core) == a
    assert scan(core, a, "next turn") == [HIT] * 4
    assert not inside.retention_waits(core)


def test_what_a_request_of_low_priority_stores_goes_first() -> None:
    core = alone(12)
    put(core, chain("older"))
    core.arrive("batch", RequestWishes(evict_first=True))
    put(core, chain("low"), "batch")
    assert not inside.requests(core).wishes, "its name is forgotten"
    put(core, chain("newer"))
    put(core, chain("newest"))
    assert [in_host(core, chain(name)) for name in ("older", "low", "newer", "newest")] == [4, 0, 4, 4]
