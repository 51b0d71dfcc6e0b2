"""What movers report, applied under the coordinator's lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from nixl_tiers.cascade.types import Direction
from nixl_tiers.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.coordinator import Coordinator
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, Heartbeat, Listed, Opened, Refused
from nixl_tiers.mover_link import MoverLink

GEOMETRY = Geometry(1, 60_000)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """Over a file tier without a mover."""
    cpu = {"type": "cpu", "capacity": 4 * GEOMETRY.row_bytes}
    tier = {"type": "file", "path": str(tmp_path), "capacity": "16MiB"}
    config = configuration.load({"tiers": [cpu, tier]})
    with mock.patch("nixl_tiers.mover_link.Supervisor"):
        coordinator = Coordinator(config, Namespace.of({}), HostRegion.create(GEOMETRY, 4))
    yield coordinator
    coordinator._end()


class _Blocked(logging.Handler):
    """What standard error is while nobody reads it: calls of the scheduler must go on meanwhile."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.held_up: list[str] = []
        self._coordinator = coordinator

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        scheduler = threading.Thread(target=self._coordinator.lookup, args=(b"key", "request"), daemon=True)
        scheduler.start()
        scheduler.join(10.0)  # a fraction of a millisecond, if nothing holds it up
        if scheduler.is_alive():
            self.held_up.append(record.getMessage())


def _opens_a_circuit(link: MoverLink) -> None:
    link.on_message(0, Opened(0, 10))
    link._core.tiers[0].breakers[Direction.LOAD].trip(0.0)
    link.on_tick(0.0, [0])


LOGGED: dict[str, Callable[[MoverLink], object]] = {
    "down: no disk": lambda link: link.on_message(0, Down("no disk")),
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


def test_an_error_of_a_logging_handler_costs_its_line_only(coordinator: Coordinator) -> None:
    handler = logging.Handler()
    logger = logging.getLogger("nixl_tiers")
    logger.addHandler(handler)
    try:
        with mock.patch.object(handler, "emit", side_effect=ZeroDivisionError) as emit:
            coordinator._link.on_message(0, Down("no disk"))
    finally:
        logger.removeHandler(handler)
    assert emit.called
    assert "no disk" in coordinator.problems()["file"]
