"""What goes next: by its last use, here or in the engine, within quotas, and in an order that can be repeated."""

from __future__ import annotations

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import TierSpec
from tests.support import inside
from tests.support.core import look_up_key, opened, put

KEYS = [b"key-%03d" % number for number in range(200)]


def test_what_the_engine_used_goes_last_and_the_deepest_of_it_first() -> None:
    core = TierManager(len(KEYS), 4096, [TierSpec("file", Write.THROUGH, True)])
    opened(core, 0, len(KEYS), [(n, key, 1 + n) for n, key in enumerate(KEYS[:100])])  # each later than those before
    for start in (32, 16, 0):  # in parts, as of a long prompt
        core.used("request", KEYS[start : min(start + 16, 40)])
    assert core.tiers[0].index.select_victims(100) == [*KEYS[40:100], *reversed(KEYS[:40])]


ROWS, QUOTA = 10, 3


def keys_of(name: str, count: int) -> list[Key]:
    return [f"{name}-{number}".encode() for number in range(count)]


def stored(core: TierManager, tenant: int, name: str, count: int) -> list[Key]:
    """A request of a tenant stores these chunks; which of them are in host memory then."""
    core.set_tenant(name, tenant)
    keys = keys_of(name, count)
    put(core, keys, name)
    return [key for key in keys if key in core.host.index]


def test_a_tenant_at_its_quota_evicts_its_own_least_recently_used_rows_and_no_others() -> None:
    core = TierManager(ROWS, 4096, [], quotas=(QUOTA / ROWS,))
    assert len(stored(core, 0, "other", 4)) == 4
    first, second = stored(core, 1, "first", 2), stored(core, 1, "second", 1)
    core.set_tenant("user", 1)
    assert look_up_key(core, first[0], "user", 1, 0.0) is Lookup.HIT
    core.prepare_load("user", first[:1], 0.0)
    core.complete_load("user", 0.0)
    core.end_step()
    third = stored(core, 1, "third", 2)
    assert len(third) == 2
    assert core.host.rows_of(1) == QUOTA
    assert first[0] in core.host.index, "it was used last"
    assert first[1] not in core.host.index
    assert second[0] not in core.host.index
    assert all(key in core.host.index for key in keys_of("other", 4)), "there was room for all of them"
    assert core.host.free == ROWS - 4 - QUOTA


def test_what_a_request_of_low_priority_stores_goes_first() -> None:
    core = TierManager(12, 4096, [])
    put(core, keys_of("older", 4))
    core.arrive("batch", RequestWishes(evict_first=True))
    put(core, keys_of("low", 4), "batch")
    assert not inside.requests(core).wishes, "its name is forgotten"
    put(core, keys_of("newer", 4))
    put(core, keys_of("newest", 4))
    assert set(core.host.index) == {*keys_of("older", 4), *keys_of("newer", 4), *keys_of("newest", 4)}
