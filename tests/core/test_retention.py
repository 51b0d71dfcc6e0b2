"""What hints ask for: rows that stay for a while, chunks that come up again, rows that go first."""

from __future__ import annotations

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.turn import NO, NOW
from nixl_tiers.core.types import Limits
from tests.core.test_manager import HIT, manager, scan
from tests.core.test_prefetch_queue import chain, come_up, in_host, stored
from tests.support import inside
from tests.support.core import all_good, expire, put, rows_of, touched


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


def test_a_longer_retention_counts_and_takes_no_more_room() -> None:
    core, kept = alone(8), chain("kept")
    put(core, kept)
    assert all(retain(core, kept, until_s) for until_s in (60.0, 10.0, 90.0, 60.0))
    expire(core, 89.0)
    assert core.host.retained == 4
    expire(core, 90.0)
    assert not inside.retention_waits(core)
    assert core.host.retained == 0


def test_released_rows_go_by_their_last_use_and_leaf_first() -> None:
    core, kept = alone(16), chain("kept")
    put(core, kept)
    retain(core, kept, 10.0)
    put(core, chain("older"))
    core.prepare_store("again", [*kept, *chain("deeper", 2)])  # uses them, and goes on
    core.complete_store(chain("deeper", 2), all_good)
    core.end_step()
    put(core, chain("newer"))
    expire(core, 10.0)
    gone = [row.key for row in core.host.make_room(2 + 4 + 2 + 3)]
    assert gone == [*reversed(chain("older")), *reversed(chain("deeper", 2)), *kept[:0:-1]]


def test_the_end_of_a_retention_is_a_use_in_tiers_below() -> None:
    core, kept, used = manager(16), chain("kept"), chain("used")
    put(core, kept)
    put(core, used)
    core.retain(kept, 10.0)
    come_up(core)
    touched(core, used, "later")
    expire(core, 10.0)
    assert set(rows_of(core.tiers[0])) == {*kept, *used}
    assert core.tiers[0].index.select_victims(8) == [*reversed(used), *reversed(kept)]


def test_a_host_without_storage_tiers_takes_turns_for_what_is_retained() -> None:
    core = alone(8)
    put(core, chain("kept"))
    core.end_step()
    assert core.events.take_due() is NO
    retain(core, chain("kept"), 10.0)
    core.end_step()
    assert core.events.take_due() is NOW


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
