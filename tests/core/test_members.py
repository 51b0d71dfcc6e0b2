"""Members: several movers of one tier. What one of them loses is lost to nobody for longer than one miss."""

from __future__ import annotations

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.slots import slots_each
from nixl_tiers.core.types import BreakerState, Direction, TierState
from tests.support import inside
from tests.support.columns import PlainColumns
from tests.support.core import opened, rows_of
from tests.support.members import MEMBERS, PROMPT, SLOTS, TOKENS, Machine

OTHER = [b"other-%02d" % number for number in range(16)]


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


def test_a_dead_member_cuts_a_prompt_at_its_first_row_there_and_what_is_behind_is_not_loaded(machine: Machine) -> None:
    gap = machine.first_at(2)
    machine.die(2)
    assert machine.tier.state is TierState.UP
    assert machine.tier.circuit is BreakerState.OPEN, "what an operator is shown is the worst"
    assert machine.load(PROMPT, "request") == gap
    loaded = [move.key for job in machine.sent for move in job.moves]
    assert sorted(loaded) == PROMPT[:gap]
    assert machine.tier.counters.missed_down == len(PROMPT) - gap


def test_a_hung_member_takes_neither_room_nor_messages_from_the_others(machine: Machine) -> None:
    machine.hang = {3}
    machine.store(OTHER)
    stored = [key for key in OTHER if machine.tier.index.rows.is_stored(key)]
    share = inside.state(machine.core).store_window // MEMBERS
    assert len(stored) == len(OTHER) - share, "it has its share of the window"
    machine.forget_host()
    chain = Chain((Group(PROMPT, TOKENS),))
    assert machine.core.look_up("waits", chain, 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    there = [key for key in PROMPT if key in machine.core.host.index and machine.tier.member_of(key).number != 3]
    assert len(there) == 12, "loads from the others have ended"
    # Only the hung one is killed, and only what it moved is lost.
    late = machine.now + machine.core.limits.hard_deadline_max_s + 1
    assert machine.core.health.overdue(late) == {3: "a job is overdue"}
    machine.core.events.killed(3, late)
    assert machine.tier.quarantined > 0
    assert machine.tier.members[0].loads.closed
    assert not machine.tier.members[3].loads.closed
    machine.core.events.lost(3, late)
    assert not machine.tier.quarantined
    assert not machine.tier.members[3].dead
    assert not machine.tier.jobs


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


def test_an_expired_request_blames_the_member_that_it_waited_for(machine: Machine) -> None:
    machine.hang = {3}
    assert machine.core.look_up("request", Chain((Group(PROMPT, TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    assert not machine.core.look_up("request", Chain((Group(PROMPT, TOKENS),)), 0, machine.now + 60.0).waits
    failures = [sum(not good for _, good in member.loads._results) for member in machine.tier.members]
    assert failures == [0, 0, 0, 1]


def test_a_bad_row_keeps_its_slot_while_another_job_reads_it(machine: Machine) -> None:
    machine.hang = {0, 1, 2, 3}
    key, free = PROMPT[0], machine.tier.index.slots.free
    assert machine.core.look_up("request", Chain((Group([key], TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    (job,) = machine.tier.jobs
    move = machine.tier.start_load(machine.core.host.allocate_scratch(key))
    (probe,) = inside.jobs(machine.core).start(machine.tier, Direction.LOAD, [move], machine.now)
    machine.core.events.finished(job.mover, job.id, [Outcome.CORRUPT], machine.now)
    assert machine.tier.index.slots.free == free
    assert not machine.tier.can_load(key), "it is not asked for again and again"
    machine.core.events.finished(probe.mover, probe.id, [Outcome.CORRUPT], machine.now)
    assert key not in machine.tier.index
    machine.core.health.watch(machine.now + machine.core.limits.retry_s)
    assert machine.tier.index.slots.free == free + 1
