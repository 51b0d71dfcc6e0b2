"""Every invariant of the core, under every order of events that hypothesis finds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from tests.support.replay import examples
from tests.support.simulation import Scan, Simulation
from tests.support.stateful import (
    CascadeStateMachine,
    MemberStateMachine,
    TenantStateMachine,
)

pytestmark = pytest.mark.timeout(900)

TestCascade = TenantStateMachine.TestCase
TestCascade.settings = settings(
    max_examples=examples(200), stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)

TestMembers = MemberStateMachine.TestCase
TestMembers.settings = settings(
    max_examples=examples(60), stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_hold_that_began_with_victims_to_be_loaded_ends_for_stores_too() -> None:
    """What the machine took for a store beside a promotion: it had not watched the demotion that was held before."""
    machine = CascadeStateMachine()
    machine.begin((Write.THROUGH, Write.ON_EVICT), listed=0, victims=2, tokens_per_s=5.0)
    machine.request("aabba", Scan.HYBRID, stays=True)
    machine.call("abbbb", store=False)
    machine.traffic_hits_corrupt_row(tier=1, prompt="abbb")
    machine.traffic(["a", "aab", "bbbab"])
    machine.traffic_hits_corrupt_row(tier=0, prompt="baaba")
    machine.catch_up()
    machine.call("ba", store=True)
    machine.time_passes(1.0)
    machine.request("ab", Scan.HYBRID, host_only=True)
    machine.mover_works(tier=1, outcome=Outcome.OK, steps=2)
    machine.teardown()


def test_the_scheduler_comes_back_to_a_request_once_a_step() -> None:
    """What the machine took for a miss of a key that is yet to be listed: a second scan of the same step, which no
    scheduler makes, and whose first look-up counts as the second key of a scan that was put off."""
    simulation = Simulation(listed=0)
    simulation.request([b"a"])
    for _ in range(4):
        while simulation.workers:
            simulation.worker_finishes(0)
        simulation.mover_works(0)
        simulation.deliver(0)
    simulation.crash()
    name = simulation.request([b"a"], Scan.EACH)
    simulation.end_step()
    for _ in range(2):
        simulation.again(name)
        assert name in simulation.waiting
    simulation.quiesce()


def test_every_example_ends_with_a_check_that_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Simulation] = []

    def quiesce(simulation: Simulation) -> None:
        checked.append(simulation)

    monkeypatch.setattr(Simulation, "quiesce", quiesce)
    run_state_machine_as_test(
        CascadeStateMachine, settings=settings(max_examples=1, stateful_step_count=1, deadline=None, database=None)
    )
    assert checked
