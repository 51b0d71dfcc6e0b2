"""The index of a storage tier: what its medium lists, in steps, what is left out, and the uses that it reports."""

from __future__ import annotations

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.listing import add_columns, begin_listing, end_listing, take_all
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.rows import MAX_USES, MOST_TICK
from nixl_tiers.core.slots import SlotCount, Slots
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Limits, TierSpec, TierState
from tests.support import inside
from tests.support.columns import PlainColumns
from tests.support.core import look_up_key, opened, rows_of

KEYS = [b"key-%02d" % number for number in range(40)]
SLOTS = 100
A_STEP = 3
LIMITS = Limits(listed_per_step=A_STEP)
PHYSICAL = TierSpec("file", Write.THROUGH, physical_slots=True)
COUNTED = TierSpec("s3", Write.THROUGH, physical_slots=False)

both = pytest.mark.parametrize("spec", [PHYSICAL, COUNTED], ids=["places", "counted"])


def tier_of(spec: TierSpec, slots: int = SLOTS) -> Tier:
    tier = Tier(spec, 0, LIMITS)
    take_all(begin_listing(tier, tier.members[0], slots))
    return tier


def numbered(*numbers: int) -> PlainColumns:
    """Row n is in slot n, and was used at tick n."""
    return PlainColumns([(number, KEYS[number], number) for number in numbers])


def listed(spec: TierSpec, *numbers: int, slots: int = SLOTS) -> Tier:
    tier = tier_of(spec, slots)
    take_all(add_columns(tier, tier.members[0], numbered(*numbers)))
    take_all(end_listing(tier, tier.members[0]))
    tier.members[0].state = TierState.UP
    return tier


# --- listing ------------------------------------------------------------------------------------------------------


@both
def test_what_is_not_listed_again_serves_until_the_end_and_is_gone_then(spec: TierSpec) -> None:
    tier = listed(spec, *range(8))
    take_all(begin_listing(tier, tier.members[0], SLOTS))
    take_all(add_columns(tier, tier.members[0], numbered(*range(0, 8, 2), 20)))
    assert all(tier.can_load_many(KEYS[:8])), "until all is listed"
    sizes = [len(tier.index) for _ in end_listing(tier, tier.members[0])]
    assert sizes[-1] == 5
    assert all(one - other <= A_STEP for one, other in zip([9, *sizes], sizes, strict=False)), "in slices"
    assert sorted(rows_of(tier)) == [KEYS[n] for n in (0, 2, 4, 6, 20)]
    assert (tier.counters.found, tier.counters.removed, tier.counters.rows) == (9, 4, 5)
    assert len(tier.index.slots) == 5
    assert not tier.members[0].to_delete, "there is nothing to delete"


@both
def test_rows_being_read_and_victims_are_swept_like_others_once_they_may(spec: TierSpec) -> None:
    tier = listed(spec, *range(4))
    pinned = tier.index.rows.pin(KEYS[3])
    assert pinned is not None
    assert tier.index.select_victims(1) == [KEYS[0]]
    for _ in range(2):
        take_all(begin_listing(tier, tier.members[0], SLOTS))
        take_all(end_listing(tier, tier.members[0]))
        assert list(rows_of(tier)) == [KEYS[3]], "its load may end well"
        assert not tier.index.rows.evicting()
    tier.index.rows.unpin(KEYS[3], pinned[1])
    take_all(begin_listing(tier, tier.members[0], SLOTS))
    take_all(end_listing(tier, tier.members[0]))
    assert (len(tier.index), len(tier.index.slots)) == (0, 0)


def test_slots_are_within_the_limit_and_each_is_given_once() -> None:
    places, count = Slots(6), SlotCount(2)
    places.limit = 4
    assert [places.claim(slot) for slot in (2, 2, 4, -1)] == [True, False, False, False]
    assert [places.allocate() for _ in range(4)] == [0, 1, 3, None]
    for slot in (1, 0):
        places.release(slot)
    assert [places.allocate() for _ in range(3)] == [0, 1, None]
    assert [count.allocate() for _ in range(3)] == [0, 0, None]


@pytest.mark.parametrize("physical", [True, False])
def test_core_has_nothing_deleted_that_it_only_reads(physical: bool) -> None:
    core = TierManager(4, 4096, [TierSpec("file", Write.OFF, physical_slots=physical)])
    (tier,) = core.tiers
    opened(core, 0, 4)
    rows = [(n % 5, b"%d" % n, n) for n in range(8)]  # more than fit, and some in slots that are taken
    core.events.listed(0, rows, last=True)
    assert tier.index.make_room(4) == []
    assert len(tier.index.slots) == 4
    look_up_key(core, b"1", "request", None, 1.0)
    (job,) = core.turn(1.0, 1.0)
    core.events.finished(0, job.id, [Outcome.CORRUPT], 1.0)
    assert b"1" not in tier.index
    core.events.listed(0, [(-1, b"2", 9)], last=False)
    assert b"2" not in tier.index
    assert not tier.members[0].to_delete


# --- uses that the medium's journal hears of ----------------------------------------------------------------------


def test_uses_are_bounded() -> None:
    tier = tier_of(PHYSICAL, slots=2 * MAX_USES)
    many = [b"%d" % number for number in range(MAX_USES + 5)]
    take_all(add_columns(tier, tier.members[0], PlainColumns([(slot, key, 0) for slot, key in enumerate(many)])))
    tier.index.touch(many, 7)
    assert len(tier.index.take_uses(2 * MAX_USES)) == MAX_USES
    tier.index.touch(many[-5:], 8)
    assert [slot for slot, _ in tier.index.take_uses(9)] == list(range(MAX_USES, MAX_USES + 5))


@pytest.mark.parametrize("single", [True, False])
def test_tick_that_no_counter_reaches_does_not_use_up_the_numbers(single: bool) -> None:
    core = TierManager(40, 4096, [PHYSICAL], LIMITS)
    opened(core, 0, SLOTS, [])
    if single:
        core.events.listed(0, [(50, b"defect", 1 << 60)], last=False)
    else:
        take_all(core.events.columns_listed(0, PlainColumns([(50, b"defect", 1 << 60)])))
    assert inside.state(core).tick == MOST_TICK + 1
    row = rows_of(core.tiers[0])[b"defect"]
    assert row.tick == MOST_TICK, "nor is its row never evicted"
