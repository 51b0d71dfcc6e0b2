"""Members: several movers of one tier. What one of them loses is lost to nobody for longer than one miss."""

from __future__ import annotations

import pytest

from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.slots import slots_each
from tests.support import inside
from tests.support.columns import PlainColumns
from tests.support.core import opened, rows_of
from tests.support.members import MEMBERS, PROMPT, SLOTS, TOKENS, Machine



@pytest.fixture
def machine() -> Machine:
    machine = Machine()
    machine.store(PROMPT)
    machine.forget_host()
    machine.sent.clear()
    return machine


def test_a_prompt_is_spread_over_all_members_and_loaded_from_all_at_once(machine: Machine) -> None:
    rows = [sum(machine.tier.member_of(key) is member for key in PROMPT) for member in machine.tier.members]
    assert rows == [4, 4, 4, 4]
    assert machine.load(PROMPT, "request") == len(PROMPT)
    assert {job.mover for job in machine.sent} == {0, 1, 2, 3}
    assert len({job.started_s for job in machine.sent}) == 1, "one waits for another"


def test_a_hung_member_has_no_more_than_its_part_of_the_window() -> None:
    machine = Machine(host=40)
    machine.store(PROMPT)
    machine.forget_host()
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
    known = PROMPT[machine.first_at(1)]
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
    opened(machine.core, 2, SLOTS)
    machine.core.events.listed(2, [(-1, key, 0) for _, key, _ in held], last=True)
    assert len(machine.tier.index) == len(PROMPT)
    mine = PROMPT[machine.first_at(1)]
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
