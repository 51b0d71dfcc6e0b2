"""Loaders: movers that only load, beside the one that stores. One that fails takes its jobs, and nothing else."""

from __future__ import annotations

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.core.breaker import BreakerState
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.types import Direction, TierState
from tests.support.core import opened, put
from tests.support.members import PROMPT, SLOTS, TOKENS, Machine

MOVERS = 4


def filled(**more: int) -> Machine:
    machine = Machine(**{"members": 1, "loaders": MOVERS - 1, **more})
    machine.store(PROMPT)
    machine.forget_host()
    machine.sent.clear()
    return machine


@pytest.fixture
def machine() -> Machine:
    return filled()


def test_a_prompt_is_loaded_by_all_movers_at_once_and_stored_by_one() -> None:
    machine = Machine(members=1, loaders=MOVERS - 1)
    machine.store(PROMPT)
    assert {job.mover for job in machine.sent} == {0}
    machine.forget_host()
    machine.sent.clear()
    assert machine.load(PROMPT, "request") == len(PROMPT)
    loaded = {mover: sum(len(job.moves) for job in machine.sent if job.mover == mover) for mover in range(MOVERS)}
    assert loaded == dict.fromkeys(range(MOVERS), 4)
    assert len({job.started_s for job in machine.sent}) == 1, "one waits for another"


def test_the_loaders_of_each_member_load_its_rows() -> None:
    machine = filled(members=2, loaders=1)
    assert [mover.number for mover in machine.tier.movers] == [0, 1, 2, 3]
    assert machine.load(PROMPT, "request") == len(PROMPT)
    assert {job.mover for job in machine.sent} == {0, 1, 2, 3}
    for job in machine.sent:
        for move in job.moves:
            assert machine.tier.index.place_of_slot(move.slot) == job.mover % 2


def test_a_few_rows_do_not_wait_for_the_mover_that_stores(machine: Machine) -> None:
    assert machine.load(PROMPT[:1], "request") == 1
    assert [job.mover for job in machine.sent] != [0]


def test_a_dead_loader_loses_its_jobs_and_the_others_go_on(machine: Machine) -> None:
    machine.hang = {2}
    chain = Chain((Group(PROMPT, TOKENS),))
    assert machine.core.scan("request", chain, 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    (stuck,) = machine.tier.jobs.values()
    machine.core.events.killed(2, machine.now)
    assert machine.tier.state is TierState.UP
    assert machine.tier.quarantined == len(stuck.moves)
    assert machine.tier.circuit is BreakerState.OPEN, "an operator is shown the worst"
    # What it read is in no other mover's hands before it is reaped; then its rows are loaded by the others.
    assert all(machine.tier.index.rows.get(move.key)[4] for move in stuck.moves), "their slots stay pinned"  # type: ignore[index]
    machine.core.events.lost(2, machine.now)
    assert not machine.tier.quarantined
    machine.core.finish_request("request")
    machine.forget_host()
    machine.now += 10.0
    machine.sent.clear()
    for _ in range(20):
        machine.load(PROMPT, "later")
        machine.now += 1.0
    assert machine.load(PROMPT, "last") == len(PROMPT)
    assert 2 not in {job.mover for job in machine.sent}
    assert len(machine.tier.index) == len(PROMPT)


def test_a_loader_that_returns_is_probed_and_loads_again(machine: Machine) -> None:
    machine.core.events.killed(2, machine.now)
    machine.core.events.lost(2, machine.now)
    take_all(machine.core.events.opened(2, 0))
    assert not machine.tier.movers[2].can_load
    for _ in range(40):
        machine.now += 1.0
        machine.turn()
    assert {job.mover for job in machine.sent if job.is_trial} == {2}
    assert machine.tier.movers[2].can_load
    assert machine.tier.circuit is BreakerState.CLOSED
    machine.sent.clear()
    assert machine.load(PROMPT, "request") == len(PROMPT)
    assert 2 in {job.mover for job in machine.sent}


def test_nobody_loads_while_the_member_is_down_and_loaders_must_open_anew(machine: Machine) -> None:
    held = machine.die(0)
    assert machine.load(PROMPT, "request") == 0
    take_all(machine.core.events.opened(1, 0))  # restarted meanwhile: it has opened what was there before
    assert machine.load(PROMPT, "again") == 0
    opened(machine.core, 0, SLOTS)
    machine.core.events.listed(0, held, last=True)
    machine.sent.clear()
    assert machine.load(PROMPT, "alone") == len(PROMPT)
    assert {job.mover for job in machine.sent} == {0}
    machine.forget_host()
    for loader in (1, 2, 3):
        take_all(machine.core.events.opened(loader, 0))
    machine.sent.clear()
    assert machine.load(PROMPT, "all") == len(PROMPT)
    assert {job.mover for job in machine.sent} == {0, 1, 2, 3}


def test_what_no_mover_but_a_loader_can_read_is_loaded(machine: Machine) -> None:
    for mover in (0, 1, 2):
        machine.tier.movers[mover].loads.trip(machine.now)
    assert machine.tier.readable
    assert machine.load(PROMPT, "request") == len(PROMPT)
    assert {job.mover for job in machine.sent if not job.is_trial} == {3}
    machine.tier.movers[3].loads.trip(machine.now)
    machine.forget_host()
    assert machine.load(PROMPT, "later") == 0


def test_a_row_that_a_loader_finds_bad_is_deleted_by_the_one_that_stores(machine: Machine) -> None:
    machine.hang = {0, 1, 2, 3}
    assert machine.core.scan("request", Chain((Group(PROMPT[:1], TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    (job,) = machine.tier.jobs.values()
    assert job.mover != 0
    machine.core.events.finished(job.mover, job.id, [Outcome.CORRUPT], machine.now)
    machine.turn()
    assert machine.deleted == [(0, job.moves[0].slot, PROMPT[0])]
    assert machine.tier.counters.corrupt == 1


def test_a_bad_row_keeps_its_slot_while_another_mover_reads_it(machine: Machine) -> None:
    machine.hang = {0, 1, 2, 3}
    key, free = PROMPT[0], machine.tier.index.slots.free
    assert machine.core.scan("request", Chain((Group([key], TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    (job,) = machine.tier.jobs.values()
    (probe,) = machine.core.health._start_trial_load(machine.tier.movers[0], key, machine.now)
    assert probe.mover != job.mover
    machine.core.events.finished(job.mover, job.id, [Outcome.CORRUPT], machine.now)
    assert machine.tier.index.slots.free == free
    assert not machine.tier.can_load(key, machine.now), "it is not asked for again and again"
    machine.core.events.finished(probe.mover, probe.id, [Outcome.CORRUPT], machine.now)
    assert machine.tier.index.slots.free == free + 1
    assert key not in machine.tier.index


def test_a_slot_that_a_loader_reads_is_not_stored_into(machine: Machine) -> None:
    """Not even after it was killed, until it is reaped: what it reads may still be read."""
    machine.hang = {0, 1, 2, 3}
    assert machine.core.scan("request", Chain((Group(PROMPT, TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    read = {move.slot for job in machine.tier.jobs.values() if job.mover == 1 for move in job.moves}
    assert read
    machine.core.events.killed(1, machine.now)
    machine.hang = {1}
    for job in list(machine.tier.jobs.values()):
        machine.core.events.finished(job.mover, job.id, [Outcome.OK] * len(job.moves), machine.now)
    machine.core.finish_request("request")
    for start in range(0, 4 * SLOTS, 8):
        put(machine.core, [b"new-%03d" % number for number in range(start, start + 8)])
        machine.turn()
    stored = {move.slot for job in machine.sent if job.direction is Direction.STORE for move in job.moves}
    assert stored
    assert not stored & read
    machine.core.events.lost(1, machine.now)
    for start in range(0, 4 * SLOTS, 8):
        put(machine.core, [b"other-%03d" % number for number in range(start, start + 8)])
        machine.turn()
    stored = {move.slot for job in machine.sent if job.direction is Direction.STORE for move in job.moves}
    assert read <= stored


def test_each_loader_is_sent_as_many_messages_as_it_takes(machine: Machine) -> None:
    for mover in machine.core.movers:
        mover.send_credits = 100
    for mover in (0, 1, 3):
        machine.core.movers[mover].send_credits = 0
    assert machine.core.scan("request", Chain((Group(PROMPT, TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    jobs = machine.core.turn(machine.now + 0.1, machine.now + 0.1)
    assert {job.mover for job in jobs} == {2}
    assert all(mover.send_credits >= 0 for mover in machine.core.movers)


def test_an_expired_request_blames_the_movers_that_it_waited_for(machine: Machine) -> None:
    machine.hang = {3}
    chain = Chain((Group(PROMPT[:MOVERS], TOKENS),))
    assert machine.core.scan("request", chain, 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    assert not machine.core.scan("request", chain, 0, machine.now + machine.core.limits.wait_s).waits
    failures = [sum(not good for _, good in mover.loads._results) for mover in machine.tier.movers]
    assert failures == [0, 0, 0, 1]


def test_a_reset_shuts_loaders_until_they_have_opened_what_follows(machine: Machine) -> None:
    machine.core.reset(keep_tiers=False, now=machine.now)
    assert not any(mover.can_load for mover in machine.tier.movers)
    machine.open(0, [])
    machine.store(PROMPT)
    machine.forget_host()
    assert machine.load(PROMPT, "request") == len(PROMPT)
