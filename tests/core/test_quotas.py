"""Quotas: a tenant's rows give way to its own, in host memory and in a tier, and to nobody else's before that."""

from __future__ import annotations

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Direction, TierSpec
from tests.support.core import look_up_key, opened, put, rows_of

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


def test_a_chain_longer_than_the_quota_is_stored_as_far_as_that() -> None:
    core = TierManager(ROWS, 4096, [], quotas=(QUOTA / ROWS,))
    assert stored(core, 1, "long", 8) == keys_of("long", 8)[:QUOTA]
    assert core.host.counters.dropped_full == 8 - QUOTA


def test_rows_in_use_are_not_evicted_for_their_tenant_and_nothing_else_is() -> None:
    core = TierManager(ROWS, 4096, [], quotas=(QUOTA / ROWS,))
    stored(core, 0, "other", 7)
    used = stored(core, 1, "used", QUOTA)
    for key in used:
        assert look_up_key(core, key, "reader", 1, 0.0) is Lookup.HIT
    core.prepare_load("reader", used, 0.0)
    assert stored(core, 1, "refused", 2) == []
    assert all(key in core.host.index for key in [*used, *keys_of("other", 7)])
    core.complete_load("reader", 0.0)
    core.end_step()
    assert len(stored(core, 1, "later", 2)) == 2, "the tenant's cache is not frozen"


def with_tier(quotas: tuple[float, ...] = (0.25, 1.0)) -> TierManager:
    spec = TierSpec("disk", Write.THROUGH, physical_slots=True, quotas=quotas)
    core = TierManager(40, 4096, [spec], quotas=(0.9, 0.9))
    opened(core, 0, 8)
    core.events.listed(0, [(7, b"found", 1)], last=True)
    return core


def written(core: TierManager) -> None:
    """The mover writes all that it is sent."""
    for _ in range(20):
        for job in core.turn(0.0, 0.0):
            assert job.direction is Direction.STORE
            core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), 0.0)
        core.tiers[0].members[0].to_delete.clear()


def test_a_tenant_at_its_quota_of_a_tier_evicts_its_own_rows_there() -> None:
    core = with_tier()
    stored(core, 2, "other", 5)
    written(core)
    for name in ("first", "second", "third"):
        stored(core, 1, name, 2)
        written(core)
    in_tier = rows_of(core.tiers[0])
    assert sorted(in_tier) == sorted([b"found", *keys_of("other", 5), *keys_of("third", 2)])
    assert {row.tenant for row in in_tier.values()} == {0, 1, 2}
    assert core.tiers[0].counters.evictions == 4


def test_a_promoted_row_counts_against_the_quota_of_who_asked_for_it() -> None:
    core = with_tier()
    core.host.quotas = (1, 1)
    stored(core, 1, "own", 1)
    core.set_tenant("reader", 1)
    assert look_up_key(core, b"found", "reader", 1, 0.0) is Lookup.PENDING
    (job,) = [job for job in core.turn(0.0, 0.0) if job.direction is Direction.LOAD]
    core.events.finished(0, job.id, [Outcome.OK], 0.0)
    assert list(core.host.index) == [b"found"], "in the place of the tenant's other row"
    assert core.host.rows_of(1) == 1
