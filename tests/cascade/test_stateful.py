"""Every invariant of the core, under every order of events that hypothesis finds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.support.stateful import CascadeStateMachine

pytestmark = pytest.mark.timeout(900)

TestCascade = CascadeStateMachine.TestCase
TestCascade.settings = settings(
    max_examples=200, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
