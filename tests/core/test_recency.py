"""What goes next: by its last use, here or in the engine, within quotas, and in an order that can be repeated."""

from __future__ import annotations

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Limits, TierSpec
from tests.support.core import look_up_key, opened, put

KEYS = [b"key-%03d" % number for number in range(200)]
LIMITS = Limits(rows_per_slice=16)


def core_of(*, rows: int = len(KEYS), stored: int = 0) -> TierManager:
    """With one tier, which holds that many of the keys, each used later than the one before."""
    core = TierManager(rows, 4096, [TierSpec("file", Write.THROUGH, True)], LIMITS)
    opened(core, 0, len(KEYS))
    core.events.listed(0, [(n, key, 1 + n) for n, key in enumerate(KEYS[:stored])], last=True)
    return core


def test_what_the_engine_used_goes_last_and_the_deepest_of_it_first() -> None:
    core = core_of(stored=100)
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
