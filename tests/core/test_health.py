"""Health: how circuits close again after a mover was killed, and what is set aside."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.probes import MAX_SOUGHT
from nixl_tiers.core.types import BreakerState, Direction, Limits, TierSpec
from tests.support import inside
from tests.support.columns import PlainColumns
from tests.support.core import look_up_key, opened, put, set_aside


def killed(write: Write, rows: list[tuple[int, Key, int]]) -> TierManager:
    """A core with one shared tier whose mover was killed, and which was opened again with these rows."""
    core = TierManager(4, 4096, [TierSpec("s3", write, physical_slots=False, asked=True)])
    for _ in range(2):
        opened(core, 0, 10)
        core.events.listed(0, rows, last=True)
        if not core.tiers[0].counters.kills:
            core.events.killed(0, 0.0)
            core.events.lost(0, 0.0)
    assert core.tiers[0].circuit is BreakerState.OPEN
    return core


@pytest.mark.parametrize("rows", [[], [(0, b"a", 1)]], ids=["empty", "with a row"])
def test_circuit_of_a_tier_that_is_only_read_closes(rows: list[tuple[int, Key, int]]) -> None:
    """No store probes it; and a medium that held nothing yet has no row to probe with either."""
    core = killed(Write.OFF, rows)
    for now in range(1, 5):
        for job in core.turn(now, now):
            assert rows
            core.events.finished(0, job.id, [Outcome.OK], now)
    assert core.tiers[0].circuit is BreakerState.CLOSED
    assert look_up_key(core, b"b", "request", None, 5.0) is Lookup.PENDING, (
        "another engine may have stored it meanwhile"
    )


def test_stores_of_an_empty_tier_are_probed() -> None:
    core = killed(Write.THROUGH, [])
    for now in range(1, 5):
        assert core.turn(now, now) == []
    assert core.tiers[0].readable
    assert core.tiers[0].circuit is BreakerState.HALF_OPEN


def test_no_circuit_is_probed_with_a_row_that_is_set_aside() -> None:
    """It would be killed again and again; the circuit is not that row's."""
    core = killed(Write.OFF, [(0, b"a", 1)])
    tier = core.tiers[0]
    set_aside(tier, [b"a"], 600.0)
    for now in (5.0, 60.0, 599.0):
        assert core.turn(now, now) == []
        assert look_up_key(core, b"a", "request", None, now) is Lookup.MISS
    (job,) = core.turn(600.0, 600.0)
    assert [move.key for move in job.moves] == [b"a"]


def whose_s3_was_killed(rows: int, write: Write, limits: Limits | None = None) -> TierManager:
    """A file and an S3 tier, both without rows; the mover of the second has been replaced."""
    specs = [TierSpec(name, write, physical_slots=name == "file") for name in ("file", "s3")]
    core = TierManager(rows, 4096, specs, limits or Limits())
    for tier in range(2):
        opened(core, tier, 10)
        core.events.listed(tier, [], last=True)
    core.events.killed(1, 0.0)
    core.events.lost(1, 0.0)
    opened(core, 1, 10)
    core.events.listed(1, [], last=True)
    return core


def test_row_that_leaves_the_host_once_it_is_written_above_probes_stores() -> None:
    """Else a small host, each row of which is written to the tier above as it comes, would never have one."""
    core = whose_s3_was_killed(2, Write.ON_EVICT, Limits(reserve_share=1.0))
    core.turn(1.0, 1.0)
    assert core.tiers[1].circuit is BreakerState.HALF_OPEN
    for key in (b"a", b"b"):
        put(core, [key])
        stored = []
        while jobs := core.turn(2.0, 2.0):
            stored += [job.tier for job in jobs if job.direction is Direction.STORE]
            for job in jobs:
                core.events.finished(job.tier, job.id, [Outcome.OK], 2.0)
        assert stored == [1, 0]
        assert not core.host.index
    assert core.tiers[1].circuit is BreakerState.CLOSED


def test_sealed_row_probes_stores_before_one_that_another_tier_is_about_to_seal() -> None:
    core = whose_s3_was_killed(4, Write.THROUGH)
    put(core, [b"sealed"])
    (job,) = core.turn(0.5, 0.5)
    core.events.finished(0, job.id, [Outcome.OK], 0.5)
    put(core, [b"new"])
    jobs = core.turn(1.0, 1.0)
    assert {(job.tier, move.key) for job in jobs for move in job.moves} == {(1, b"sealed"), (0, b"new")}


def test_listed_row_probes_loads_though_no_request_asks_for_it() -> None:
    """As after the tier was opened again: else the first request for them would find it closed."""
    core = killed(Write.THROUGH, [])
    tier = core.tiers[0]
    opened(core, 0, 10)
    rows = PlainColumns([(slot, key, slot) for slot, key in enumerate([b"aside", b"a", b"b"])])
    take_all(core.events.columns_listed(0, rows))
    core.events.listed(0, [], last=True)
    set_aside(tier, [b"aside"], 600.0)
    for _ in range(2):
        (job,) = core.turn(1.0, 1.0)
        assert [move.key for move in job.moves] != [b"aside"]
        core.events.finished(0, job.id, [Outcome.OK], 1.0)
    assert tier.readable


KEYS = [b"key-%04d" % number for number in range(2000)]
PROBES = 2  # that close a circuit


def listed(core: TierManager) -> None:
    """The tier is opened (again), and lists all keys, the first of which is the coldest."""
    opened(core, 0, 2 * len(KEYS))
    rows = list(zip(range(len(KEYS)), KEYS, range(1, len(KEYS) + 1), strict=True))
    take_all(core.events.columns_listed(0, PlainColumns(rows)))
    core.events.listed(0, [], last=True)


def killed_by(keys: Sequence[Key], *, physical_slots: bool) -> TierManager:
    """A core whose mover was killed while it loaded `keys`; its tier has been opened again."""
    spec = TierSpec("tier", Write.OFF, physical_slots, asked=not physical_slots)
    core = TierManager(4, 4096, [spec])
    listed(core)
    core.events.killed(0, 0.0)
    core.events.lost(0, 0.0)
    set_aside(core.tiers[0], keys, 600.0)
    listed(core)
    return core


def turns_until_closed(core: TierManager, most: int) -> int:
    probes = 0
    for turn in range(1, most + 1):
        now = 1.0 + turn / 20
        for job in core.turn(now, now):
            probes += 1
            core.events.finished(0, job.id, [Outcome.OK], now)
        if core.tiers[0].readable:
            assert probes == PROBES
            return turn
    pytest.fail(f"the circuit has not closed after {most} turns and {probes} probes")


@pytest.mark.parametrize("physical_slots", [True, False])
@pytest.mark.parametrize("count", [1, 500, 1900])
@pytest.mark.parametrize("newest", [True, False])
def test_a_circuit_closes_though_many_rows_are_set_aside(physical_slots: bool, count: int, newest: bool) -> None:
    """Wherever they are: each look goes on from where the last one ended."""
    core = killed_by(KEYS[-count:] if newest else KEYS[:count], physical_slots=physical_slots)
    assert turns_until_closed(core, PROBES + 2 * len(KEYS) // MAX_SOUGHT) >= PROBES


def test_rows_looked_at_for_a_probe_are_as_cold_as_before() -> None:
    core = killed_by(KEYS[:100], physical_slots=False)
    turns_until_closed(core, 5)
    assert core.tiers[0].index.rows.select(len(KEYS)) == KEYS


def of_a_disk(slots: int) -> TierManager:
    core = TierManager(1, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
    opened(core, 0, slots)
    core.events.listed(0, [], last=True)
    return core


def store(core: TierManager, key: Key, bad: Sequence[int], now: float) -> None:
    """Of a disk that cannot write these slots."""
    put(core, [key])
    for job in core.turn(now, now):
        outcomes = [Outcome.FAILED if move.slot in bad else Outcome.OK for move in job.moves]
        core.events.finished(0, job.id, outcomes, now)


def test_one_bad_block_costs_one_row_of_five_hundred() -> None:
    """Its slot would be the next to be handed out, until the circuit opens, and be what each probe of that writes."""
    core = of_a_disk(600)
    for number, key in enumerate(KEYS[:500]):
        store(core, key, [15], number / 100)
    tier = core.tiers[0]
    assert (tier.counters.stored, tier.counters.failed_stores) == (499, 1)
    assert tier.circuit is BreakerState.CLOSED
    assert len(tier.index.slots) == 499
    opened(core, 0, 600)
    core.events.listed(0, [(slot, key, 1) for slot, key in enumerate(KEYS[:15])], last=True)
    store(core, b"after a listing", [], 6.0)
    store(core, b"later", [], core.limits.aside_s + 1.0)
    slots = [tier.index.rows.get(key)[0] for key in (b"after a listing", b"later")]  # type: ignore[index]
    assert slots == [16, 15]


def test_disk_on_which_every_write_failed_is_used_again() -> None:
    core = of_a_disk(4)
    for number in range(8):
        store(core, KEYS[number], range(4), number)
    now = 100.0
    for number in range(8, 16):
        now += 61.0
        store(core, KEYS[number], [], now)
    assert core.tiers[0].circuit is BreakerState.CLOSED
    assert len(core.tiers[0].index.slots) == 4


def test_probes_of_a_full_disk_that_cannot_be_written_cost_one_row_each_outage() -> None:
    """The slot that failed first is tried again, before a row that can be read is evicted for another."""
    core = of_a_disk(600)
    for number in range(600):
        store(core, KEYS[number], [], number / 100)
    tier, now = core.tiers[0], 1.0
    for number in range(600, 608):
        now += 0.1
        store(core, KEYS[number], range(600), now)
    assert tier.circuit is BreakerState.OPEN
    kept = len(tier.index.slots)
    for number in range(700, 800):
        now += 61.0
        store(core, KEYS[number], range(600), now)
    assert len(tier.index.slots) >= kept - 1
    for number in range(800, 840):
        now += 61.0
        store(core, KEYS[number], [], now)
    assert tier.circuit is BreakerState.CLOSED
    assert len(tier.index.slots) == 600


def test_circuit_of_a_full_disk_with_a_bad_block_closes() -> None:
    """The probes do not try that slot again and again."""
    core = of_a_disk(40)
    for number in range(41):
        store(core, KEYS[number], [15], number / 100)
    core.tiers[0].members[0].breakers[Direction.STORE].trip(1.0)
    now = 1.0
    for number in range(41, 60):
        now += 61.0
        store(core, KEYS[number], range(40) if number < 46 else [15], now)
    assert core.tiers[0].circuit is BreakerState.CLOSED
    assert len(core.tiers[0].index.slots) == 39


def test_writes_that_fail_now_and_then_shrink_a_full_disk_by_one_in_a_hundred() -> None:
    """Its circuit stays closed, so none of these slots would be tried again before it is opened again."""
    core = of_a_disk(500)
    for number, key in enumerate(KEYS[:1500]):
        store(core, key, range(500) if number % 20 == 0 else [], number)
    tier = core.tiers[0]
    assert tier.circuit is BreakerState.CLOSED
    assert tier.counters.failed_stores == 75
    assert len(tier.index.slots) == 495


def test_slots_above_a_lowered_limit_that_failed_cost_no_row() -> None:
    """As where a disk has no room for more: its rows are to fill what it has."""
    core = of_a_disk(400)
    for number in range(100):
        store(core, KEYS[number], [], number / 100)
    tier = core.tiers[0]
    store(core, b"before", range(100, 400), 2.0)
    put(core, [b"meanwhile"])
    (job,) = core.turn(3.0, 3.0)
    core.events.resized(0, 100)
    core.events.finished(0, job.id, [Outcome.FAILED], 3.0)
    assert tier.index.slots.free == 0
    for number in range(100, 110):
        store(core, KEYS[number], [], 4.0)
    assert tier.counters.evictions == 10
    assert len(tier.index.slots) == 100


def test_row_that_has_just_failed_is_no_probe() -> None:
    """It is what requests ask for: an unreadable block would keep the circuit of all others open."""
    core = of_a_disk(8)
    rows = list(enumerate(KEYS[:3]))
    opened(core, 0, 8)
    core.events.listed(0, [(slot, key, 1) for slot, key in rows], last=True)
    core.events.killed(0, 0.0)
    core.events.lost(0, 0.0)
    opened(core, 0, 8)
    core.events.listed(0, [(slot, key, 1) for slot, key in rows], last=True)
    tier, now = core.tiers[0], 1.0
    set_aside(tier, [KEYS[0]], core.limits.retry_s, now)
    for _ in range(PROBES):
        assert look_up_key(core, KEYS[0], "request", None, now) is Lookup.MISS
        (job,) = core.turn(now, now)
        assert KEYS[0] not in [move.key for move in job.moves]
        core.events.finished(0, job.id, [Outcome.OK], now)
    assert tier.readable


@pytest.mark.parametrize("answer", [Outcome.OK, Outcome.FAILED])
def test_a_row_whose_load_was_late_is_loaded_again_soon_after_its_mover_has_answered(answer: Outcome) -> None:
    """Of a server that was slow for a while: a mover that answers does not hang at it."""
    core = of_a_disk(8)
    opened(core, 0, 8)
    core.events.listed(0, [(0, KEYS[0], 1)], last=True)
    tier, now = core.tiers[0], 0.0
    for _ in range(2):
        assert look_up_key(core, KEYS[0], f"request at {now}", None, now) is Lookup.PENDING
        (job,) = core.turn(now, now)
        now = job.soft_deadline_s + 1.0
        assert core.turn(now, now) == []
        assert tier.index.is_aside(KEYS[0])
        core.events.finished(0, job.id, [answer], now)
        core.turn(now, now)
        assert tier.index.is_aside(KEYS[0]) is (answer is Outcome.FAILED)
        now += 2 * core.limits.retry_s + 1.0
        core.turn(now, now)
        assert not tier.index.is_aside(KEYS[0])


class Disk:
    """Of which one slot hangs whoever reads, or writes, it, and its core, for an hour."""

    def __init__(self, hangs: Direction, slot: int) -> None:
        self.core = TierManager(4, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
        self.held: dict[int, Key] = dict(enumerate(KEYS[:20]))
        self.hangs, self.slot, self.now, self.kills = hangs, slot, 0.0, 0
        self.open()

    def open(self) -> None:
        opened(self.core, 0, 40)
        self.core.events.listed(0, [(slot, key, 1) for slot, key in self.held.items()], last=True)

    def second(self) -> None:
        self.now += 1.0
        jobs = self.core.turn(self.now, self.now)
        for slot, key in [each for batch in self.core.tiers[0].members[0].delete_batches(256) for each in batch]:
            assert self.held.pop(slot, key) == key
        for job in jobs:
            stuck = [move for move in job.moves if move.slot == self.slot and job.direction is self.hangs]
            good = [move for move in job.moves if move not in stuck]
            if job.direction is Direction.STORE:
                self.held |= {move.slot: move.key for move in good}
            if not stuck:
                self.core.events.finished(0, job.id, [Outcome.OK] * len(good), self.now)
            elif good:
                indexes = [move.row.index for move in good]
                self.core.events.rows_ended(0, job.id, indexes, [Outcome.OK] * len(good), self.now)
        if self.core.health.overdue(self.now):
            self.kills += 1
            self.core.events.killed(0, self.now)
            self.core.events.lost(0, self.now)
            self.open()

    def hits(self, key: Key) -> bool:
        for number in range(4):
            if not self.core.look_up(key.decode(), Chain([Group([key], 16)]), 0, self.now).waits or number == 3:
                break
            self.core.end_step()
            self.second()
        hit = self.core.look_up(key.decode(), Chain([Group([key], 16)]), 0, self.now).end > 0
        self.core.finish(key.decode())
        self.core.end_step()
        inside.state(self.core).make_room(4)
        return hit


@pytest.mark.parametrize("hangs", list(Direction))
def test_a_slot_that_hangs_kills_few_movers_and_takes_no_hits_of_others(hangs: Direction) -> None:
    """A listing brought its row back after each restart, and it was handed out again: a kill each minute."""
    disk = Disk(hangs, 7 if hangs is Direction.LOAD else 20)
    missed = asked = number = 0
    while disk.now < 3600.0:
        key = KEYS[number % 20]
        if hangs is Direction.STORE:
            put(disk.core, [b"new-%d" % number])
            key = b"new-%d" % (number - 10)
        disk.second()
        hit = disk.hits(key)
        if key in disk.held.values() and key != KEYS[7]:
            asked, missed = asked + 1, missed + (not hit)
        number += 1
    assert 1 <= disk.kills <= 3
    assert asked > 1000
    assert missed <= 0.01 * asked
