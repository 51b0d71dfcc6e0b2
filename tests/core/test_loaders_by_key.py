"""Loaders of a tier whose rows are found by their keys: they go on while the mover that stores is down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.types import Direction, TierState
from tests.support.core import opened, put
from tests.support.members import PROMPT, SLOTS, TOKENS, Machine

MOVERS = 3


def filled(**named: Any) -> Machine:
    machine = Machine(members=1, loaders=MOVERS - 1, places=False, **named)
    machine.store(PROMPT)
    machine.forget_host()
    machine.sent.clear()
    return machine


def movers_of(machine: Machine, direction: Direction) -> set[int]:
    return {job.mover for job in machine.sent if job.direction is direction}


@pytest.mark.parametrize("how", ["down", "killed", "dead"])
def test_while_the_mover_that_stores_is_down_its_loaders_load_and_nobody_stores(how: str) -> None:
    machine = filled()
    events = machine.core.events
    {"down": events.down, "killed": events.killed, "dead": events.lost}[how](0, machine.now)
    assert machine.load(PROMPT, "request") == len(PROMPT)
    machine.store([b"new"])
    assert movers_of(machine, Direction.LOAD) == {1, 2}
    assert not movers_of(machine, Direction.STORE)


def test_jobs_of_a_killed_owner_hold_up_no_load_before_it_is_reaped() -> None:
    machine = filled()
    machine.hang = {0, 1, 2}
    assert machine.core.scan("request", Chain((Group(PROMPT, TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    (stuck,) = [job for job in machine.tier.jobs.values() if job.mover == 0]
    rest = [move.key for job in machine.tier.jobs.values() if job.mover for move in job.moves]
    machine.core.events.killed(0, machine.now)
    assert machine.tier.members[0].dead
    for job in [job for job in machine.tier.jobs.values() if job.mover]:
        machine.core.events.finished(job.mover, job.id, [Outcome.OK] * len(job.moves), machine.now)
    machine.core.finish_request("request")
    machine.forget_host()
    machine.hang = set()
    machine.sent.clear()
    assert machine.load(rest, "later") == len(rest)
    assert not movers_of(machine, Direction.LOAD) & {0}
    assert all(machine.tier.denylist.is_suspect(move.key) for move in stuck.moves), "they may have killed it"
    machine.store([b"new"])
    assert not movers_of(machine, Direction.STORE)


def test_a_loader_that_opens_while_the_owner_is_down_loads_and_is_probed() -> None:
    machine = filled()
    for mover in (0, 1):
        machine.core.events.killed(mover, machine.now)
        machine.core.events.lost(mover, machine.now)
    machine.core.movers[0].send_credits = 0  # there is no such process
    machine.core.events.down(2, machine.now)
    assert machine.load(PROMPT, "request") == 0
    take_all(machine.core.events.opened(1, 0))
    for _ in range(40):
        machine.now += 1.0
        machine.turn()
    assert machine.core.movers[1].can_load
    assert machine.load(PROMPT, "later") == len(PROMPT)
    assert movers_of(machine, Direction.LOAD) == {1}


def test_loaders_go_on_while_the_owner_opens_and_lists_again() -> None:
    machine = filled()
    held = machine.die(0)
    steps = machine.core.events.opened(0, SLOTS)
    assert machine.load(PROMPT[:8], "request") == 8
    take_all(steps)
    assert machine.tier.state is TierState.LISTING
    machine.core.events.listed(0, held, last=True)
    assert machine.load(PROMPT, "later") == len(PROMPT)
    assert movers_of(machine, Direction.LOAD) >= {1, 2}


def test_what_is_gone_when_the_owner_lists_again_is_no_hit() -> None:
    machine = filled()
    held = machine.die(0)
    opened(machine.core, 0, SLOTS)
    machine.core.events.listed(0, [row for row in held if row[1] != PROMPT[3]], last=True)
    assert machine.load(PROMPT, "request") == 3


def test_a_reset_shuts_loaders_which_open_what_follows_by_themselves() -> None:
    machine = filled()
    machine.core.reset(keep_tiers=False, now=machine.now)
    assert not any(mover.can_load for mover in machine.tier.movers)
    take_all(machine.core.events.opened(1, 0))
    assert machine.load(PROMPT, "request") == 0, "rows of before are not known any more"
    machine.open(0, [])
    machine.store(PROMPT)
    machine.forget_host()
    machine.sent.clear()
    assert machine.load(PROMPT, "later") == len(PROMPT)
    assert movers_of(machine, Direction.LOAD) == {0, 1, 2}


def found(machine: Machine, outcome: Outcome) -> None:
    """A loader has loaded the first row, with this outcome."""
    machine.hang = {0, 1, 2}
    assert machine.core.scan("request", Chain((Group(PROMPT[:1], TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    (job,) = machine.tier.jobs.values()
    assert job.mover != 0
    machine.core.events.finished(job.mover, job.id, [outcome], machine.now)
    machine.turn()


@pytest.mark.parametrize("asked", [False, True])
def test_the_owner_is_told_once_of_a_bad_row(asked: bool) -> None:
    """Also where the tier deletes nothing that is evicted, since others may use it."""
    machine = filled(asked=asked)
    found(machine, Outcome.CORRUPT)
    assert [(mover, key) for mover, _, key in machine.deleted] == [(0, PROMPT[0])]
    assert PROMPT[0] not in machine.tier.index


def test_a_reader_s_owner_is_told_too() -> None:
    machine = Machine(members=1, loaders=MOVERS - 1, places=False, write=Write.OFF)
    machine.core.events.listed(0, [(0, PROMPT[0], 1)], last=True)
    found(machine, Outcome.CORRUPT)
    assert [(mover, key) for mover, _, key in machine.deleted] == [(0, PROMPT[0])]


def test_a_row_that_is_gone_from_an_asked_tier_is_not_deleted() -> None:
    """Another engine may have stored it again by now."""
    machine = filled(asked=True)
    found(machine, Outcome.MISSING)
    assert machine.deleted == []


def test_a_loader_that_is_down_ends_no_existence_check_and_none_is_asked_of_it() -> None:
    machine = filled(asked=True)
    key = b"stored by another engine"

    def ask(name: str) -> bool:
        machine.core.scan(name, Chain((Group([key], TOKENS),)), 0, machine.now)
        machine.core.end_step()
        return bool(machine.core.events.plan_checks(machine.now))

    assert ask("request")
    machine.core.events.down(1, machine.now)
    assert machine.core.checks.busy, "the owner still answers"
    machine.core.events.down(0, machine.now)
    assert machine.tier.readable
    assert not machine.core.checks.busy
    assert not ask("later"), "nobody can be asked"


def test_a_miss_while_loaders_serve_is_none_of_a_tier_that_is_down() -> None:
    machine = filled()
    machine.core.events.down(0, machine.now)
    machine.core.count_misses(PROMPT, "request", machine.now)
    assert machine.tier.counters.missed_down == machine.tier.counters.missed_open == 0
    for loader in (1, 2):
        machine.core.events.down(loader, machine.now)
    machine.core.count_misses(PROMPT, "later", machine.now)
    assert machine.tier.counters.missed_down == len(PROMPT)


def test_nothing_is_stored_before_the_suspects_of_a_dead_owner_are_known() -> None:
    """Though its successor has opened meanwhile."""
    machine = filled()
    machine.core._state.limits = replace(machine.core.limits, rows_per_slice=1)
    machine.hang = {0, 1, 2}
    assert machine.core.scan("request", Chain((Group(PROMPT, TOKENS),)), 0, machine.now).waits
    machine.core.end_step()
    machine.turn()
    for job in [job for job in machine.tier.jobs.values() if job.mover]:
        machine.core.events.finished(job.mover, job.id, [Outcome.OK] * len(job.moves), machine.now)
    machine.core.finish_request("request")
    machine.core.events.lost(0, machine.now)
    machine.open(0, [(0, b"held", 1)])
    assert machine.tier.members[0].dead
    assert machine.tier.writable
    machine.sent.clear()
    put(machine.core, [b"new"])
    while machine.tier.members[0].dead:
        machine.now += 1.0  # promotions hold up stores no longer
        jobs = machine.core.turn(machine.now, machine.now)
        if machine.tier.members[0].dead:
            machine.sent += jobs
    assert not movers_of(machine, Direction.STORE)
    machine.hang = set()
    for _ in range(10):
        machine.now += 1.0
        machine.turn()
    assert movers_of(machine, Direction.STORE) == {0}


def test_new_rows_wait_for_no_loader() -> None:
    machine = filled()
    machine.core.events.down(1, machine.now)
    machine.core.events.down(2, machine.now)
    put(machine.core, [b"new"])
    machine.turn()
    assert movers_of(machine, Direction.STORE) == {0}
