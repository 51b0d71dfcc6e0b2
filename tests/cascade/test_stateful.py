"""Every invariant of the core, under every order of events that hypothesis finds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.simulation import Simulation
from tests.support.stateful import CascadeStateMachine

pytestmark = pytest.mark.timeout(900)

TestCascade = CascadeStateMachine.TestCase
TestCascade.settings = settings(
    max_examples=200, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_every_example_ends_with_a_check_that_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Simulation] = []

    def quiesce(simulation: Simulation) -> None:
        checked.append(simulation)

    monkeypatch.setattr(Simulation, "quiesce", quiesce)
    run_state_machine_as_test(
        CascadeStateMachine, settings=settings(max_examples=1, stateful_step_count=1, deadline=None, database=None)
    )
    assert checked
