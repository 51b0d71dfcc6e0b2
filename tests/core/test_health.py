"""Health: how circuits close again after a mover was killed, and what is set aside."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import BreakerState, Direction, TierSpec
from tests.support import inside
from tests.support.core import look_up_key, opened, put


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


KEYS = [b"key-%04d" % number for number in range(2000)]


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


def test_writes_that_fail_now_and_then_shrink_a_full_disk_by_one_in_a_hundred() -> None:
    """Its circuit stays closed, so none of these slots would be tried again before it is opened again."""
    core = of_a_disk(500)
    for number, key in enumerate(KEYS[:1500]):
        store(core, key, range(500) if number % 20 == 0 else [], number)
    tier = core.tiers[0]
    assert tier.circuit is BreakerState.CLOSED
    assert tier.counters.failed_stores == 75
    assert len(tier.index.slots) == 495


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
