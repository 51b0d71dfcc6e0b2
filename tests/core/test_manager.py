"""TierManager's decisions, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.lookup import Lookup, Scan
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefetch_queue import MAX_PREFETCHES
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support import inside
from tests.support.core import anticipate, expire, look_up_key, opened, put, rows_of, touched

HIT, PENDING, MISS = Lookup.HIT, Lookup.PENDING, Lookup.MISS
CHAIN = [bytes([n]) * 8 for n in range(1, 9)]


def manager(rows: int = 8, tiers: Sequence[str] = ("file",), **limits: float) -> TierManager:
    specs = [TierSpec(name, Write.THROUGH, physical_slots=name == "file") for name in tiers]
    core = TierManager(rows, 4096, specs, Limits(load_share=1.0, store_share=1.0, **limits))  # type: ignore[arg-type]
    for tier in range(len(specs)):
        opened(core, tier, 100, [])
    return core


def run(core: TierManager, jobs: Sequence[Job], outcome: Outcome = Outcome.OK) -> None:
    for job in jobs:
        core.events.finished(job.tier, job.id, [outcome] * len(job.moves), 0.0)


def only_stored(keys: Sequence[Key], rows: int = 8, tiers: Sequence[str] = ("file",)) -> TierManager:
    """A core whose tiers hold `keys` and whose host holds nothing."""
    core = manager(rows, tiers)
    for tier in range(len(tiers)):
        core.events.listed(tier, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
    return core


def scan(core: TierManager, keys: Sequence[Key], request: str, now: float = 0.0) -> list[Lookup]:
    """What a full-attention group does: up the prefix, until a miss."""
    answers = []
    for position, key in enumerate(keys):
        answers.append(look_up_key(core, key, request, position, now))
        if answers[-1] is MISS:
            break
    return answers


@pytest.mark.parametrize(("first", "found"), [(0, 1), (1, 1), (2, 2)])
def test_row_that_lacks_what_a_load_reads_is_a_miss(first: int, found: int) -> None:
    core = manager(tiers=())
    put(core, CHAIN[:2])
    core.host.index[CHAIN[1]].missing = 2  # sub-blocks at its beginning
    assert core.look_up("chain", Chain((Group(CHAIN[:2], 16),)), 0, 0.0, first) == Scan(False, 16 * found)
    answers = [look_up_key(core, key, "keys", place, 0.0, first) for place, key in enumerate(CHAIN[:2])]
    assert answers == [HIT] * found + [MISS] * (2 - found)


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.MISSING, Outcome.FAILED])
def test_failed_promotion_falls_back_to_the_next_tier_then_misses(outcome: Outcome) -> None:
    core = only_stored(CHAIN[:1], tiers=("file", "s3"))
    assert scan(core, CHAIN[:1], "r") == [PENDING]
    (first,) = core.events.plan(0.0)
    assert first.tier == 0
    run(core, [first], outcome)
    core.end_step()
    assert scan(core, CHAIN[:1], "r") == [PENDING]
    (second,) = core.events.plan(0.0)
    assert second.tier == 1
    run(core, [second], outcome)
    core.end_step()
    assert scan(core, CHAIN[:1], "r") == [MISS]
    assert core.events.plan(0.0) == []
    core.health.watch(core.limits.retry_s)
    expected = None if outcome is not Outcome.FAILED else "file"
    assert core.where([CHAIN[0]])[0] == expected


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "half-open"])
def test_nothing_is_stored_before_the_listing_has_ended(killed: bool) -> None:
    """No slot is known to be free before, and a medium takes what it has not listed for gone."""
    core = manager()
    if killed:
        core.events.killed(0, 0.0)
    core.events.lost(0, 0.0)
    opened(core, 0, 100)
    put(core, CHAIN[:2])
    for now in (10.0, 20.0):  # the time of a probe has come
        assert core.turn(now, now) == []
    core.events.listed(0, [(0, CHAIN[5], 5)], last=False)
    assert core.turn(30.0, 30.0) == []
    core.events.listed(0, [], last=True)
    assert [job.direction for job in core.turn(40.0, 40.0)][-1] is Direction.STORE


def stored_keys(core: TierManager) -> set[Key]:
    """Of the first tier, once every write has ended."""
    while jobs := core.events.plan(0.0):
        run(core, jobs)
    return {key for key in CHAIN if key in core.tiers[0].index}


def test_chunks_of_a_host_only_request_are_hits_and_are_not_written() -> None:
    core = manager()
    core.arrive("private", RequestWishes(host_only=True))
    put(core, CHAIN[:2], "private")
    assert stored_keys(core) == set()
    assert scan(core, CHAIN[:2], "r") == [HIT, HIT]
    put(core, CHAIN[:3], "private")
    assert stored_keys(core) == {*CHAIN[:3]}, "a name that comes again is another request"


@pytest.mark.parametrize("use", ["store", "load", "touch"])
def test_use_by_another_request_lifts_host_only(use: str) -> None:
    core = manager()
    core.arrive("private", RequestWishes(host_only=True))
    put(core, CHAIN[:2], "private")
    for other in ("private too", "other"):
        if other == "private too":
            core.arrive(other, RequestWishes(host_only=True))
        if use == "store":
            core.prepare_store(other, CHAIN[:1])
        elif use == "touch":
            touched(core, CHAIN[:1], other)
        else:
            assert scan(core, CHAIN[:1], other) == [HIT]
            core.prepare_load(other, CHAIN[:1], 0.0)
            core.complete_load(other, 0.0)
        assert stored_keys(core) == (set() if other == "private too" else {CHAIN[0]})


def test_open_tier_is_resized_without_losing_rows() -> None:
    core = only_stored(CHAIN[:6])
    core.events.resized(0, 4)
    assert scan(core, CHAIN[:6], "r") == [PENDING] * 6  # what stands beyond is there until it is said to be gone
    core.finish("r")
    tier = core.tiers[0]
    beyond = [key for key in CHAIN[:6] if rows_of(tier)[key].slot >= 4]
    assert len(beyond) == 2
    core.events.listed(0, [(-1, key, 0) for key in beyond], last=False)
    put(core, CHAIN[6:8], "new")
    stores = core.events.plan(0.0)
    assert {move.slot for job in stores for move in job.moves} <= set(range(4))
    run(core, stores)
    assert sum(tier.can_load(key) for key in CHAIN) == 4
    core.events.resized(0, 8)
    put(core, beyond, "again")
    run(core, core.events.plan(0.0))
    assert sum(tier.can_load(key) for key in CHAIN) == 6


def test_no_request_waits_beyond_its_deadline_for_a_row_being_filled() -> None:
    core, now = manager(wait_s=2.0), 0.0
    core.prepare_store("writer", CHAIN[:1])  # whose workers never end
    while PENDING in scan(core, CHAIN[:2], "reader", now):
        core.end_step()
        now += 0.5
        assert now <= 2.5
        expire(core, now)
        core.events.plan(now)


FIRST = (0.0,)


def chain(name: str, length: int = 4) -> list[Key]:
    return [f"{name}{number}".encode() for number in range(length)]


def wait_in_line(core: TierManager, name: str, keys: Sequence[Key], rank: tuple[float, ...]) -> None:
    """The request arrives, and a step passes it over."""
    anticipate(core, name, keys, rank)
    core.end_step()


def come_up(core: TierManager) -> list[Key]:
    """All promotions that are planned one after the other, carried out: their keys in order."""
    keys = []
    while jobs := core.events.plan(0.0):
        keys += [move.key for job in jobs for move in job.moves if job.direction is Direction.LOAD]
        run(core, jobs)
    return keys


def test_request_whose_turn_comes_at_once_gets_nothing_before_it_is_looked_up() -> None:
    """It may well choose to compute: its look-up weighs that, and a promotion before it would be in vain."""
    a = chain("a")
    core = only_stored(a, 16)
    anticipate(core, "a", a, FIRST)
    assert core.events.plan(0.0) == []
    assert not core.events.busy, "nothing wakes the supervisor either"
    core.end_step()
    assert core.events.busy
    assert come_up(core) == a, "a step has passed it over"


def test_line_gives_way_to_a_request_whose_turn_has_come() -> None:
    a, b = chain("a"), chain("b", 8)
    core = only_stored([*a, *b])
    wait_in_line(core, "a", a, FIRST)
    come_up(core)
    assert scan(core, b, "b") == [PENDING] * 8
    jobs = core.events.plan(0.0)
    assert [move.key for job in jobs for move in job.moves] == b, "all at once"
    run(core, jobs)
    core.end_step()
    assert scan(core, b, "b") == [HIT] * 8
    core.finish("b")
    core.end_step()
    assert scan(core, a, "a") == [PENDING] * 4, "it gets them at its turn"


def test_line_of_prefetches_is_bounded() -> None:
    core = manager()
    for number in range(1000):
        core.prefetch([b"%d-%d" % (number, place) for place in range(4)])
    assert len(inside.line(core)) == MAX_PREFETCHES


def test_chunks_come_up_again_when_they_are_to_be_needed() -> None:
    a = chain("a")
    core = only_stored(a, 16)
    assert core.prefetch(a, 5.0)
    expire(core, 4.9)
    assert come_up(core) == []
    expire(core, 5.0)
    assert come_up(core) == a
    assert scan(core, a, "next turn") == [HIT] * 4
    assert not inside.retention_waits(core)
