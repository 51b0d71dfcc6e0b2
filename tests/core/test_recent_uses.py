"""Recent uses of a tier's rows, as they are sent to its journal."""

from __future__ import annotations

from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.recent_uses import MAX_USES, RecentUses
from nixl_tiers.core.tier import TierIndex
from nixl_tiers.core.types import Entry, TierSpec
from tests.support.core import opened, touched


def key(number: int) -> bytes:
    return b"%d" % number


def entries(*slots: int, stored: bool = True) -> dict[bytes, Entry]:
    return {key(slot): Entry(slot, stored) for slot in slots}


def listed(*ticks: int, physical_slots: bool = True) -> tuple[TierManager, TierIndex]:
    """A tier that holds row n, last used at ticks[n], in slot n."""
    core = TierManager(4, 4096, [TierSpec("file", Write.THROUGH, physical_slots)])
    opened(core, 0, 8)
    core.events.listed(0, [(n, key(n), tick) for n, tick in enumerate(ticks)], last=True)
    return core, core.tiers[0]


def test_newest_use_of_a_row_counts_and_is_sent_once() -> None:
    uses = RecentUses()
    for number, tick in ((0, 5), (1, 6), (0, 7), (1, 4)):
        uses.add(key(number), tick)
    assert uses.take(10, entries(0, 1)) == [(0, 7), (1, 6)]
    assert uses.take(10, entries(0, 1)) == []


def test_rows_that_wait_longest_go_first() -> None:
    uses = RecentUses()
    for number in (2, 0, 1, 2):
        uses.add(key(number), 1)
    index = entries(0, 1, 2)
    assert [uses.take(1, index) for _ in range(3)] == [[(2, 1)], [(0, 1)], [(1, 1)]]


def test_use_of_an_evicted_row_is_dropped_and_one_of_a_row_being_stored_waits() -> None:
    uses = RecentUses()
    for number in range(3):
        uses.add(key(number), 1)
    index = entries(2) | entries(1, stored=False)
    assert uses.take(10, index) == [(2, 1)]
    index[key(1)].stored = True
    assert uses.take(10, index | entries(0)) == [(1, 1)]


def test_uses_are_bounded() -> None:
    uses = RecentUses()
    for number in range(MAX_USES + 1):
        uses.add(key(number), 1)
    uses.add(key(0), 2)
    taken = uses.take(2 * MAX_USES, entries(*range(MAX_USES + 1)))
    assert len(taken) == MAX_USES
    assert taken[0] == (0, 2)


def test_use_is_of_the_slot_in_which_the_row_is_now() -> None:
    """The slot that it was in at its use belongs to another row."""
    _, tier = listed(1, 2)
    tier.touch(key(0), 9)
    tier.evict(key(0))
    tier.add_listed(0, key(7), 3)
    tier.add_listed(5, key(0), 4)
    assert tier.take_recent_uses(10) == [(5, 9)]


def test_use_before_the_listing_ended_counts_as_later_than_all_that_is_listed() -> None:
    core, tier = listed(1, 80)
    tier.touch(key(0), 3)
    assert tier.take_recent_uses(10) == [(0, 80)]
    touched(core, [key(1)], "request")
    assert tier.take_recent_uses(10) == [(1, 82)]


def test_tick_that_no_counter_reaches_does_not_use_up_the_numbers() -> None:
    core, tier = listed(1, 2**62)
    touched(core, [key(0)], "request")
    assert tier.take_recent_uses(10) == [(0, 2**39 + 2)]


def test_nothing_is_sent_while_the_tier_is_not_up() -> None:
    """The slots of another mover's listing may be others."""
    core, tier = listed(1)
    touched(core, [key(0)], "request")
    core.events.down(0, 0.0)
    assert tier.take_recent_uses(10) == []
    opened(core, 0, 8)
    assert tier.take_recent_uses(10) == []
    core.events.listed(0, [], last=True)
    assert tier.take_recent_uses(10) == [(0, 3)]


def test_reset_forgets_all_uses() -> None:
    core, tier = listed(1)
    touched(core, [key(0)], "request")
    core.reset(keep_tiers=False)
    opened(core, 0, 8)
    core.events.listed(0, [(0, key(0), 1)], last=True)
    assert tier.take_recent_uses(10) == []


def test_tier_without_places_keeps_no_uses() -> None:
    core, tier = listed(1, physical_slots=False)
    touched(core, [key(0)], "request")
    assert tier.take_recent_uses(10) == []
