"""Holds of the core: leaving one wakes the supervisor where there is work, and none does more than its share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.supervisor import TICK_S
from nixl_tiers.runtime.coordinator import Coordinator
from tests.support.core import look_up_key, opened, put
from tests.support.file_tier import file_tier

GEOMETRY = Geometry(1, 4096)
KEYS = [b"key-%d" % number for number in range(8)]


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """Over a file tier that is up and holds KEYS, without a mover."""
    tiers = [{"type": "cpu", "capacity": 16 * GEOMETRY.row_bytes}, file_tier(tmp_path, "16MiB")]
    with mock.patch("nixl_tiers.runtime.mover_link.Supervisor"):
        coordinator = Coordinator(
            configuration.load({"tiers": tiers}), Namespace.of({}), HostRegion.create(GEOMETRY, 16)
        )
    opened(coordinator._core, 0, 100)
    coordinator._core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(KEYS)], last=True)
    coordinator._core.garbage.drop(1 << 20)
    yield coordinator
    coordinator._end()


def wakes(coordinator: Coordinator) -> int:
    """How often the supervisor was woken up since this was asked last."""
    supervisor: Any = coordinator._link.supervisor
    count: int = supervisor.wake.call_count + supervisor.wake_soon.call_count
    supervisor.reset_mock()
    return count


def test_end_of_a_step_with_work_wakes_the_supervisor_and_its_look_ups_do_not(coordinator: Coordinator) -> None:
    for key in KEYS[:2]:
        with coordinator.core() as core:
            assert look_up_key(core, key, "request", None, coordinator.now()) is Lookup.PENDING
    assert wakes(coordinator) == 0, "the supervisor would take the interpreter's lock from the scheduler"
    with coordinator.core() as core:
        core.end_step()
    assert wakes(coordinator) == 1
    with coordinator.core() as core:
        core.counters()
    assert wakes(coordinator) == 0


def test_a_hold_that_raises_lets_go_and_wakes(coordinator: Coordinator) -> None:
    def fail() -> None:
        with coordinator.core() as core:
            core.prefetch(KEYS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert wakes(coordinator) == 1
    assert not coordinator._hold.lock._is_owned()  # type: ignore[union-attr]


def test_who_waits_for_writes_has_the_supervisor_look_for_them(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in a pause, and what has ended meanwhile is known only after a turn."""
    with coordinator.core() as core:
        put(core, [b"new"])
    wakes(coordinator)
    waited: list[float] = []

    def wait(timeout_s: float) -> bool:
        waited.append(timeout_s)
        coordinator._waits.closed = len(waited) == 3
        return len(waited) == 2  # something has changed: that brought a turn

    monkeypatch.setattr(coordinator.changed, "wait", wait)
    assert coordinator.flush()
    supervisor: Any = coordinator._link.supervisor
    assert supervisor.wake.call_count == 3, "as it began, and twice after nothing had changed for so long"
    assert waited == [TICK_S] * 3
    coordinator.look()
    assert supervisor.wake.call_count == 4
