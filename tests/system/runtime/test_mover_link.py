"""What movers report, applied under the coordinator's lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from nixl_tiers.core.types import Direction
from nixl_tiers.mover.protocol import Down, Heartbeat, Listed, Opened, Refused
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.runtime.mover_link import MoverLink
from tests.runtime.test_mover_link import coordinator
from tests.support.core import look_up

__all__ = ["coordinator"]  # a fixture


class _Blocked(logging.Handler):
    """What standard error is while nobody reads it: calls of the scheduler must go on meanwhile."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.held_up: list[str] = []
        self._coordinator = coordinator

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        scheduler = threading.Thread(target=look_up, args=(self._coordinator, b"key", "request"), daemon=True)
        scheduler.start()
        scheduler.join(10.0)  # a fraction of a millisecond, if nothing holds it up
        if scheduler.is_alive():
            self.held_up.append(record.getMessage())


def _opens_a_circuit(link: MoverLink) -> None:
    link.on_message(0, Opened(0, 10))
    link._core.tiers[0].members[0].breakers[Direction.LOAD].trip(0.0)
    link.on_tick(0.0, [0])


LOGGED: dict[str, Callable[[MoverLink], object]] = {
    "down: no disk": lambda link: link.on_message(0, Down("no disk", 0)),
    "down: no such path": lambda link: link.on_message(0, Refused("no such path")),
    "down: its mover is killed": lambda link: link.on_problem(0, "its mover is killed"),
    "0 rows found": lambda link: link.on_message(0, Listed(0, [], last=True)),
    "may not be read": lambda link: link.on_message(0, Heartbeat(0, {"get": "objects may not be read"}, 0)),
    "mover: a line": lambda link: link.on_log_line(0, logging.WARNING, "a line"),
    "loads from the file tier fail": _opens_a_circuit,
}


@pytest.mark.parametrize("line", LOGGED)
def test_no_line_is_logged_with_the_lock_held(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    caplog.set_level(logging.INFO, "nixl_tiers")
    handler = _Blocked(coordinator)
    logger = logging.getLogger("nixl_tiers")
    logger.addHandler(handler)
    try:
        LOGGED[line](coordinator._link)
    finally:
        logger.removeHandler(handler)
    assert line in " ".join(handler.lines)
    assert not handler.held_up
