"""Members: several movers of one tier. What one of them loses is lost to nobody for longer than one miss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.slots import slots_each
from nixl_tiers.core.types import TierSpec
from tests.support import inside
from tests.support.columns import PlainColumns
from tests.support.core import empty_host, opened, put, rows_of

MEMBERS: Final = 4
SLOTS: Final = 16  # of a member
TOKENS: Final = 16
PROMPT: Final = [b"chunk-%02d" % number for number in range(16)]


class Machine:
    """A core whose movers do at once what they are sent, but for those that `hang`."""

    def __init__(self, host: int = 256) -> None:
        spec = TierSpec("file", Write.THROUGH, physical_slots=True, members=MEMBERS)
        self.core = TierManager(host, 4096, [spec])
        self.tier = self.core.tiers[0]
        self.now = 0.0
        self.hang: set[int] = set()
        self.deleted: list[tuple[int, int, Key]] = []  # (mover, slot, key)
        for member in self.tier.members:
            opened(self.core, member.number, SLOTS, [])

    def turn(self) -> None:
        for _ in range(20):
            self.now += 0.01
            jobs = self.core.turn(self.now, self.now)
            for member in self.core.movers:
                for batch in member.delete_batches(256):
                    self.deleted += [(member.number, slot, key) for slot, key in batch]
            for job in jobs:
                if job.mover not in self.hang:
                    self.core.events.finished(job.mover, job.id, [Outcome.OK] * len(job.moves), self.now)

    def store(self, keys: Sequence[Key]) -> None:
        put(self.core, keys)
        self.turn()

    def die(self, mover: int) -> list[tuple[int, Key, int]]:
        """Returns what its medium lists when it is opened again."""
        member = self.core.movers[mover]
        held = [
            (row.slot - member.first_slot, key, row.tick)
            for key, row in rows_of(self.tier).items()
            if self.tier.member_of(key) is member
        ]
        self.core.events.lost(mover, self.now)
        return held

    def first_at(self, mover: int) -> Key:
        return next(key for key in PROMPT if self.tier.member_of(key).number == mover)


@pytest.fixture
def machine() -> Machine:
    machine = Machine()
    machine.store(PROMPT)
    empty_host(machine.core)
    return machine


def test_a_hung_member_has_no_more_than_its_part_of_the_window() -> None:
    machine = Machine(host=40)
    machine.store(PROMPT)
    empty_host(machine.core)
    assert sum(machine.tier.member_of(key).number == 3 for key in PROMPT) >= inside.state(machine.core).load_window
    machine.hang = {3}
    assert machine.core.look_up("waits", Chain((Group(PROMPT, TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    there = [key for key in PROMPT if key in machine.core.host.index and machine.tier.member_of(key).number != 3]
    assert len(there) == 12
    assert machine.tier.rows_loading == 1


@pytest.mark.parametrize("single", [True, False])
def test_a_slot_that_no_member_has_is_nobodys(machine: Machine, single: bool) -> None:
    """A defect of a mover lists them: beyond all members, and another member's, where that has this very key."""
    span, free = slots_each(MEMBERS), machine.tier.index.slots.free
    known = machine.first_at(1)
    garbage = [(span + SLOTS - 1, known, 1), (span + SLOTS - 2, b"new", 1), ((1 << 32) - 1, b"far", 1)]
    machine.deleted.clear()
    for mover in (0, 3):
        if single:
            machine.core.events.listed(mover, garbage, last=False)
        else:
            take_all(machine.core.events.columns_listed(mover, PlainColumns(garbage)))
    machine.turn()
    assert machine.deleted == []
    assert machine.tier.index.slots.free == free
    assert len(machine.tier.index) == len(PROMPT)


def test_a_row_that_one_member_reports_gone_stays_at_another(machine: Machine) -> None:
    """Its old place expires after the key was stored again elsewhere."""
    held = machine.die(2)
    machine.store(PROMPT)
    opened(machine.core, 2, SLOTS, [(-1, key, 0) for _, key, _ in held])
    assert len(machine.tier.index) == len(PROMPT)
    mine = machine.first_at(1)
    machine.core.events.listed(1, [(-1, mine, 0)], last=False)
    assert mine not in machine.tier.index


def test_deletes_are_sent_by_the_number_that_the_medium_knows(machine: Machine) -> None:
    held = {key: machine.tier.member_of(key) for key in PROMPT}
    slots = {key: row.slot for key, row in rows_of(machine.tier).items()}
    for key in PROMPT:
        inside.evict(machine.tier.index, key)
    machine.turn()
    want = [(held[key].number, slots[key] - held[key].first_slot, key) for key in PROMPT]
    assert sorted(machine.deleted) == sorted(want)
    assert all(0 <= slot < SLOTS for _, slot, _ in machine.deleted)
