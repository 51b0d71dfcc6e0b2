"""What hints ask for: rows that stay for a while, chunks that come up again, rows that go first."""

from __future__ import annotations

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import Limits
from tests.core.test_manager import HIT, scan
from tests.core.test_prefetch_queue import chain, come_up, in_host, stored
from tests.support import inside
from tests.support.core import expire, put, touched


def alone(rows: int) -> TierManager:
    """A host without storage tiers, half of which may be retained."""
    return TierManager(rows, 4096, [], Limits(retain_share=0.5))


def retain(core: TierManager, keys: list[Key], until_s: float) -> bool:
    return core.retain(keys, until_s)


def test_retained_rows_outlive_all_that_is_stored_after_them() -> None:
    core, kept = alone(8), chain("kept")
    put(core, kept)
    assert retain(core, kept, 60.0)
    for number in range(20):
        put(core, chain(f"other{number}"))
        assert in_host(core, chain(f"other{number}")) == 4, "others find room as long as there is any"
    assert in_host(core, kept) == 4
    expire(core, 59.0)
    assert core.host.retained == 4
    expire(core, 60.0)
    assert core.host.retained == 0
    for number in range(20, 24):
        put(core, chain(f"other{number}"))
    assert in_host(core, kept) == 0, "they are rows like any other again"


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


def test_no_more_is_planned_to_come_up_than_the_host_holds() -> None:
    core = stored(chain("a"), rows=16)
    assert [core.prefetch(chain(name), 5.0) for name in "aaaaa"] == [True] * 4 + [False]
    expire(core, 5.0)
    assert core.prefetch(chain("a"), 9.0)
    assert not alone(16).prefetch(chain("a"), 5.0), "there is nothing to promote from"


def test_what_a_request_of_low_priority_stores_goes_first() -> None:
    core = alone(12)
    put(core, chain("older"))
    core.arrive("batch", RequestWishes(evict_first=True))
    put(core, chain("low"), "batch")
    assert not inside.requests(core).wishes, "its name is forgotten"
    put(core, chain("newer"))
    put(core, chain("newest"))
    assert [in_host(core, chain(name)) for name in ("older", "low", "newer", "newest")] == [4, 0, 4, 4]


def test_a_request_of_low_priority_makes_nothing_younger() -> None:
    core = alone(13)
    put(core, chain("first", 1))
    put(core, chain("older"))
    put(core, chain("newer"))
    core.arrive("batch", RequestWishes(evict_first=True))
    touched(core, chain("older"), "batch")
    assert scan(core, chain("older"), "batch") == [HIT] * 4
    core.prepare_load("batch", chain("older"), 0.0)
    core.complete_load("batch", 0.0)
    core.finish("batch")
    core.end_step()
    put(core, chain("newest", 9))
    assert [in_host(core, chain(name)) for name in ("older", "newer")] == [0, 4]


def of_tenant(core: TierManager, keys: list[Key], name: str) -> None:
    core.set_tenant(name, 1)
    put(core, keys, name)


def test_a_tenant_retains_no_more_than_a_share_of_its_quota() -> None:
    core, kept = TierManager(16, 4096, [], Limits(retain_share=0.5), quotas=[0.25]), chain("kept")
    of_tenant(core, kept, "tenant")
    assert not retain(core, kept, 60.0)
    assert list(core.host.retained_of) == [0, 2]
    of_tenant(core, chain("other", 2), "other")
    assert in_host(core, chain("other", 2)) == 2, "it finds room in its quota"
    assert core.where(kept) == ["cpu", "cpu", None, None]
    assert all(retain(core, key, 60.0) for key in ([kept[0]], kept[:2]))
    expire(core, 60.0)
    assert list(core.host.retained_of) == [0, 0]
