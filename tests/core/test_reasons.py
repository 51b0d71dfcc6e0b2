"""Each chunk that is not written to a tier, and each miss, is counted once, at the tier that it is about, by reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.stats import MISSED, TABLE_BITS, EvictionHistory, Gone, tag_of
from nixl_tiers.core.types import Direction, Limits, TierSpec
from tests.support import inside
from tests.support.core import look_up_key, opened, put, set_aside


def cascade(slots: int = 100, rows: int = 4, *, physical_slots: bool = True) -> TierManager:
    """A host of `rows` rows over a file tier of `slots`."""
    core = TierManager(rows, 4096, [TierSpec("file", Write.THROUGH, physical_slots)], Limits())
    opened(core, 0, slots, [])
    return core


def saying(refusal: str) -> TierManager:
    """Whose medium says why it takes no rows."""
    core = cascade()
    core.tiers[0].members[0].refusal = refusal  # type: ignore[assignment]
    return core


def settle(core: TierManager, outcome: Outcome = Outcome.OK) -> None:
    for job in core.events.plan(0.0):
        core.events.finished(0, job.id, [outcome] * len(job.moves), 0.0)


def no_room() -> TierManager:
    core = cascade(slots=1, rows=16)
    put(core, [b"one", b"two"])  # two stores at once
    core.events.plan(0.0)
    return core


def behind() -> TierManager:
    core = cascade()
    for number in range(5):  # four wait to be written, and no mover takes them
        put(core, [b"%d" % number])
    return core


def evicted() -> TierManager:
    core = cascade()
    put(core, [b"one"])
    inside.state(core).make_room(4)  # before it was written
    settle(core)
    return core


def evicted_above_a_tier_that_is_down() -> TierManager:
    core = TierManager(4, 4096, [TierSpec("file", Write.ON_EVICT, physical_slots=True)], Limits())
    put(core, [b"one"])
    inside.state(core).make_room(4)
    return core


def refused(said: str = "") -> TierManager:
    """It is down, whatever it said before."""
    core = saying(said)
    put(core, [b"one"])
    core.events.down(0, 0.0)
    return core


def failed() -> TierManager:
    core = cascade()
    put(core, [b"one"])
    settle(core, Outcome.FAILED)
    return core


def full(said: str = "") -> TierManager:
    """A shared prefix whose budget is not known is refused as a full one is: an outage is no lack of room."""
    core = saying(said)
    put(core, [b"one"])
    settle(core, Outcome.NO_SPACE)
    return core


def aside() -> TierManager:
    core = cascade(physical_slots=False)
    set_aside(core.tiers[0], [b"one"], 600.0)
    put(core, [b"one"])
    settle(core)
    return core


def circuit_open(said: str = "") -> TierManager:
    core = saying(said)
    core.tiers[0].members[0].breakers[Direction.STORE].trip(0.0)
    put(core, [b"one"])
    return core


@pytest.mark.parametrize(
    ("drop", "reason"),
    [
        (no_room, "full"),
        (full, "full"),
        (lambda: full("denied"), "denied"),
        (lambda: full("unreachable"), "unreachable"),
        (behind, "slow"),
        (evicted, "slow"),
        (refused, "unreachable"),
        (evicted_above_a_tier_that_is_down, "unreachable"),
        (lambda: refused("denied"), "unreachable"),
        (circuit_open, "unreachable"),
        (lambda: circuit_open("denied"), "denied"),
        (failed, "failed"),
        (aside, "failed"),
    ],
)
def test_a_drop_is_counted_once_and_by_its_reason(drop: Callable[[], TierManager], reason: str) -> None:
    counters = drop().counters()["file"].counters
    assert getattr(counters, f"dropped_{reason}") == counters.dropped == 1
    assert counters.failed == (drop is failed), "what a full medium refuses has not failed"


ONE, TWO = b"one", b"two"


def holding(*held: Key, rows: int = 8) -> TierManager:
    """A host over an s3 tier that holds `held`."""
    core = TierManager(rows, 4096, [TierSpec("s3", Write.OFF, physical_slots=False)], Limits(wait_s=10.0))
    opened(core, 0, 4, [(0, key, 0) for key in held])
    return core


def missed(core: TierManager) -> dict[tuple[str, str], int]:
    """(tier, reason) -> how many, of those that are not 0."""
    found = {(name, each): getattr(stats.counters, each) for name, stats in core.counters().items() for each in MISSED}
    return {(tier, each.removeprefix("missed_")): count for (tier, each), count in found.items() if count}


def miss(core: TierManager, *keys: Key, now: float = 0.0) -> dict[tuple[str, str], int]:
    """Look `keys` up, which must not wait, and count the misses among them from the first on."""
    answers = [look_up_key(core, key, "get", place, now) for place, key in enumerate(keys)]
    assert Lookup.PENDING not in answers
    core.count_misses("get", keys[answers.index(Lookup.MISS) :], now)
    core.finish("get")
    core.end_step()
    return missed(core)


def evicts(core: TierManager) -> None:
    for key in (ONE, b"another"):
        put(core, [key])


def evicts_from_storage(core: TierManager) -> None:
    core.tiers[0].index.set_limit(core.tiers[0].members[0], 0)
    inside.evict(core.tiers[0].index, ONE)


def finds_it_corrupt(core: TierManager) -> None:
    assert look_up_key(core, ONE, "get", 0, 0.0) is Lookup.PENDING
    core.end_step()
    (job,) = core.events.plan(0.0)
    core.events.finished(0, job.id, [Outcome.CORRUPT], 0.0)


def waits(core: TierManager) -> None:
    assert look_up_key(core, ONE, "get", 0, -11.0) is Lookup.PENDING
    core.end_step()


@pytest.mark.parametrize(
    ("held", "happens", "reason"),
    [
        ([], lambda core: None, ("cpu", "never_stored")),
        ([], evicts, ("cpu", "evicted")),
        ([ONE], evicts_from_storage, ("s3", "evicted")),
        ([ONE], lambda core: core.events.listed(0, [(-1, ONE, 0)], last=False), ("s3", "expired")),
        ([ONE], finds_it_corrupt, ("s3", "failed")),
        ([ONE], lambda core: set_aside(core.tiers[0], [ONE], 5.0), ("s3", "failed")),
        ([ONE], lambda core: core.events.down(0, 0.0), ("s3", "down")),
        ([ONE], lambda core: core.tiers[0].members[0].breakers[Direction.LOAD].trip(0.0), ("s3", "open")),
        ([], lambda core: opened(core, 0, 4), ("s3", "listing")),
        ([ONE], lambda core: core.arrive("get", RequestWishes(allowed=frozenset(()))), ("s3", "excluded")),
        ([ONE], waits, ("s3", "late")),
    ],
)
def test_a_miss_is_counted_at_the_tier_that_its_reason_is_about(
    held: list[Key], happens: Callable[[TierManager], None], reason: tuple[str, str]
) -> None:
    core = holding(*held, rows=1)
    happens(core)
    assert miss(core, ONE) == {reason: 1}


def test_what_is_there_behind_a_miss_has_its_reason_up_to_the_next_miss() -> None:
    keys = [b"%d" % number for number in range(6)]
    core = holding(keys[2], keys[3], keys[5], rows=1)
    put(core, [keys[4]])
    put(core, [b"another"])
    core.count_misses("get", keys, 0.0)
    assert missed(core) == {("cpu", "never_stored"): 4, ("cpu", "evicted"): 2}


def test_most_of_the_last_keys_are_remembered_and_no_other_key_is_named() -> None:
    gone = EvictionHistory()
    count = 1 << (TABLE_BITS - 5)
    for number in range(count):
        gone.note(b"key %d" % number, tag_of(2, Gone.EVICTED))
    known = sum(gone.find(b"key %d" % number) == tag_of(2, Gone.EVICTED) for number in range(count))
    assert known > 0.95 * count
    assert sum(gone.find(b"other %d" % number) != 0 for number in range(count)) <= 2
