"""TierManager's decisions, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.lookup import Lookup, Scan
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support.core import expire, look_up_key, opened, put, rows_of, touched

HIT, PENDING, MISS = Lookup.HIT, Lookup.PENDING, Lookup.MISS
CHAIN = [bytes([n]) * 8 for n in range(1, 9)]


def manager(rows: int = 8, tiers: Sequence[str] = ("file",), **limits: float) -> TierManager:
    specs = [TierSpec(name, Write.THROUGH, physical_slots=name == "file") for name in tiers]
    core = TierManager(rows, 4096, specs, Limits(load_share=1.0, store_share=1.0, **limits))  # type: ignore[arg-type]
    for tier in range(len(specs)):
        opened(core, tier, 100)
        core.events.listed(tier, [], last=True)
    return core


def run(core: TierManager, jobs: Sequence[Job], outcome: Outcome = Outcome.OK) -> None:
    for job in jobs:
        core.events.finished(job.tier, job.id, [outcome] * len(job.moves), 0.0)


def only_stored(keys: Sequence[Key], rows: int = 8, tiers: Sequence[str] = ("file",)) -> TierManager:
    """A core whose tier tiers hold `keys` and whose host holds nothing."""
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


def waiting_and_loading(core: TierManager, prefixes: dict[str, list[Key]], steps: int) -> dict[str, int]:
    """What requests with these prefixes hit, in turns of a step, a turn of the supervisor and the movers. Each request
    loads as soon as it waits for nothing, and its copy ends a step later."""
    hits: dict[str, int] = {}
    for _ in range(steps):
        loaded: list[str] = []
        for name, keys in prefixes.items():
            if name in hits:
                continue
            answers = scan(core, keys, name)
            if PENDING not in answers:
                hits[name] = answers.count(HIT)
                loaded.append(name)
                core.prepare_load(name, keys[: hits[name]], 0.0)
        core.end_step()
        run(core, core.events.plan(0.0))
        core.events.plan(0.0)
        for name in loaded:
            core.complete_load(name, 0.0)
    return hits


@pytest.mark.parametrize("length", [2, 3])
def test_promotions_wait_until_other_requests_have_loaded_from_a_full_host(length: int) -> None:
    """Computing what is stored would take longer."""
    stored = [bytes([number]) * 8 for number in range(1, 8 * length + 1)]
    core = only_stored(stored, rows=4)
    prefixes = {str(n): stored[n * length : (n + 1) * length] for n in range(8)}
    assert waiting_and_loading(core, prefixes, steps=30) == dict.fromkeys(prefixes, length)


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


def test_row_is_sealed_once_and_the_second_tier_waits() -> None:
    core = manager(tiers=("file", "s3"))
    put(core, CHAIN[:2])
    (first,) = core.events.plan(0.0)
    assert (first.tier, [move.seal for move in first.moves]) == (0, [True, True])
    assert core.events.plan(0.0) == []
    run(core, [first])
    (second,) = core.events.plan(0.0)
    assert (second.tier, [move.seal for move in second.moves]) == (1, [False, False])


def test_promoted_row_is_written_to_the_tiers_above_its_source() -> None:
    core = manager(tiers=("file", "s3"))
    core.events.listed(1, [(0, CHAIN[0], 0)], last=True)
    scan(core, CHAIN[:1], "r")
    (load,) = core.events.plan(0.0)
    assert load.direction is Direction.LOAD
    run(core, [load])
    (store,) = core.events.plan(0.0)
    assert (store.tier, store.direction, store.moves[0].seal) == (0, Direction.STORE, False)


def test_tier_that_is_down_misses_at_once_and_keeps_its_rows() -> None:
    core = only_stored(CHAIN[:2])
    core.events.down(0, 0.0)
    assert scan(core, CHAIN[:2], "r") == [MISS]
    put(core, CHAIN[4:5])
    assert core.events.plan(0.0) == []
    assert core.tiers[0].counters.dropped == 1
    opened(core, 0, 100)
    assert scan(core, CHAIN[:2], "again") == [PENDING, PENDING], "they serve while the tier lists"
    core.finish("again")
    core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(CHAIN[1:2], 1)], last=True)
    assert core.where(CHAIN[:2]) == [None, "file"], "what is not listed again is gone"


def test_failing_storage_behaves_like_a_host_only_cascade() -> None:
    bare, failing = manager(rows=4, tiers=()), manager(rows=4, tiers=("file", "s3"))
    for n, keys in enumerate([CHAIN[:3], CHAIN[2:6], CHAIN[:2], CHAIN[5:8], CHAIN[:4]]):
        answers = [scan(core, keys, f"scan{n}") for core in (bare, failing)]
        assert answers[0] == answers[1]
        for core in (bare, failing):
            core.finish(f"scan{n}")
            put(core, keys, f"put{n}")
            run(core, core.events.plan(float(n)), Outcome.FAILED)
        assert sorted(bare.host.index) == sorted(failing.host.index)
    assert not failing.tiers[0].index


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


def test_row_listed_as_removed_is_a_miss_unless_it_is_being_read() -> None:
    core = only_stored(CHAIN[:2])
    scan(core, CHAIN[:1], "r")
    (job,) = core.events.plan(0.0)
    core.events.listed(0, [(-1, key, 0) for key in (*CHAIN[:2], b"never heard of")], last=False)
    assert core.tiers[0].index.slots.free == core.tiers[0].index.slots.limit - 1
    assert core.where([CHAIN[1]])[0] is None
    run(core, [job], Outcome.MISSING)
    assert core.where([CHAIN[0]])[0] is None
    core.events.listed(0, [(0, CHAIN[1], 5)], last=False)  # and it may come again
    assert core.where([CHAIN[1]])[0] == "file"


def test_request_whose_load_failed_gets_no_more_hits() -> None:
    core = manager(tiers=())
    put(core, CHAIN[:3])
    assert scan(core, CHAIN[:2], "r") == [HIT, HIT]
    core.prepare_load("r", CHAIN[:2], 0.0)
    core.complete_load("r", 0.0, failed=True)
    core.end_step()
    assert scan(core, CHAIN[2:3], "r") == [MISS], "a request that was computed once is not tried again"
    assert scan(core, CHAIN[:1], "other") == [MISS]
    assert scan(core, CHAIN[2:3], "other") == [HIT]
    assert core.host.counters.failed == 2
    assert core.host.used == 1
    core.finish("r")
    assert scan(core, CHAIN[2:3], "r") == [HIT], "a name that comes again is another request"


def test_request_loads_from_its_allowed_tiers_only() -> None:
    core = only_stored(CHAIN[:2], tiers=("file", "s3"))
    core.arrive("far", RequestWishes(allowed=frozenset([1])))
    core.arrive("none", RequestWishes(allowed=frozenset([])))
    assert scan(core, CHAIN[:2], "none") == [MISS]
    assert scan(core, CHAIN[:1], "far") == [PENDING]
    assert [job.tier for job in core.events.plan(0.0)] == [1]
    core.reset(keep_tiers=True)  # which forgets requests, but not what they asked for
    assert scan(core, CHAIN[1:2], "none") == [MISS]
    core.finish("none")
    assert scan(core, CHAIN[1:2], "none") == [PENDING]
    assert [job.tier for job in core.events.plan(0.0)] == [0]
    put(core, CHAIN[2:3])
    core.arrive("host", RequestWishes(allowed=frozenset([])))
    assert look_up_key(core, CHAIN[2], "host", 0, 0.0) is HIT


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


# --- one deadline a request ----------------------------------------------------------------------------------------


def pending_s(
    core: TierManager, keys: Sequence[Key], request: str, step_s: float = 0.5, most_s: float = 3600.0
) -> float:
    """How long a request is pending that comes back every `step_s`, on movers that do nothing."""
    now = 0.0
    while PENDING in scan(core, keys, request, now):
        assert now < most_s, "it never ends"
        core.end_step()
        now += step_s
        expire(core, now)
        core.events.plan(now)
    return now


def test_no_request_waits_beyond_its_deadline_for_a_row_being_filled() -> None:
    core = manager(wait_s=2.0)
    core.prepare_store("writer", CHAIN[:1])  # whose workers never end
    assert pending_s(core, CHAIN[:2], "reader") <= 2.5


def test_rows_of_jobs_before_a_reset_are_released_by_later_jobs() -> None:
    """vLLM up to 0.32: the first job of after a reset that ends says that all of before it have ended, too."""
    core = manager(rows=12, tiers=())
    for number in range(1000):
        chain = [b"%d-%d" % (number, place) for place in range(8)]
        put(core, chain[:3], f"ready-{number}")
        assert scan(core, chain[:3], f"load-{number}") == [HIT] * 3
        core.prepare_load(f"load-{number}", chain[:3], 0.0)
        assert core.prepare_store(f"store-{number}", chain[3:]).rows
        core.reset(keep_tiers=False)
        assert core.host.used == 8, "a row is given away before the engine can know that it is quiet"
    put(core, CHAIN[:1])
    assert core.host.used == 1
