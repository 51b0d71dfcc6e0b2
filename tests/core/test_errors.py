"""An error in the middle of the supervisor's work: its movers are killed, and what it had begun ends with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from nixl_tiers.base.policies import Write
from tests.support.simulation import MANY_TURNS, Scan, Simulation

PLANNERS = tuple(
    f"core/{name}.py"
    for name in ("turn", "health", "jobs", "probes", "promotion", "promotion_jobs", "writeback", "state")
)
CHAINS = [[prompt[: end + 1].encode() for end in range(3)] for prompt in ("aaa", "abb", "bbb")]


class UnexpectedError(Exception):
    pass


def fails_at_call(number: int, call: Callable[[], object]) -> bool:
    """Make the call, in which the nth call of a planner's code raises; whether there was such a one."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        caller = frame.f_back
        planned = caller is not None and caller.f_code.co_filename.endswith(PLANNERS)
        if event == "call" and planned and frame.f_code.co_name != "<genexpr>":  # which ignores it while it is closed
            left -= 1
            if left == 0:
                raise UnexpectedError

    sys.settrace(trace)
    try:
        call()
    except UnexpectedError:
        pass
    finally:
        sys.settrace(None)
    return left <= 0


class Interrupted(Simulation):
    """Between the error and the death of the movers nothing needs to hold."""

    broken = False

    def check(self) -> None:
        if not self.broken:
            super().check()


def busy(write: Write) -> Interrupted:
    """It has rows to store into both tiers, and a request that waits for rows that another engine has stored."""
    simulation = Interrupted(12, writes=(write, Write.THROUGH))
    simulation.other_stores(CHAINS[0])
    simulation.request(CHAINS[0], Scan.CHAIN)
    simulation.mover_works(1)
    simulation.deliver(1)  # all of them exist
    simulation.turns = 0
    simulation.again(*simulation.waiting)
    for chain in CHAINS[1:]:
        simulation.request(chain)
    while simulation.workers:
        simulation.worker_finishes(0)
    simulation.turns = MANY_TURNS
    return simulation


def reports(simulation: Simulation) -> None:
    """Both movers have done all of what they were sent."""
    for mover in (0, 1):
        while simulation.movers[mover].finished:
            simulation.deliver(mover)


@pytest.mark.parametrize("write", [Write.THROUGH, Write.ON_EVICT])
@pytest.mark.parametrize("what", ["turn", "finished"])
def test_error_at_any_call_leaves_nothing_pinned_after_the_movers_death(what: str, write: Write) -> None:
    number = 0
    while True:
        number += 1
        simulation = busy(write)
        call = partial(simulation.advance, 0.1)
        if what == "finished":
            call()
            for mover in (0, 1):
                while simulation.movers[mover].inbox:
                    simulation.mover_works(mover)
            call = partial(reports, simulation)
        simulation.broken = True
        if not fails_at_call(number, call):
            break
        for kill in (simulation.send_kill, simulation.reap):
            for mover in (0, 1):
                kill(mover)
        simulation.broken = False
        simulation.quiesce()
    assert number > 60
