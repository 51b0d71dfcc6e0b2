"""Every invariant of the core, under every order of events that hypothesis finds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.support.replay import examples
from tests.support.stateful import (
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
