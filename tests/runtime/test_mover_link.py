"""What movers report, applied under the coordinator's lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.rows import Row
from nixl_tiers.core.types import Direction
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, Heartbeat, Listed, Opened, Refused, decode_to_mover, packet_of
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.runtime.mover_link import MoverLink
from tests.support import inside
from tests.support.core import all_good
from tests.support.file_tier import file_tier
from tests.support.times import PATIENT

GEOMETRY = Geometry(1, 60_000)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """Over a file tier without a mover."""
    cpu = {"type": "cpu", "capacity": 4 * GEOMETRY.row_bytes}
    config = configuration.load({"tiers": [cpu, file_tier(tmp_path, "16MiB")]})
    with mock.patch("nixl_tiers.runtime.mover_link.Supervisor"):
        coordinator = Coordinator(config, Namespace.of({}), HostRegion.create(GEOMETRY, 4))
    yield coordinator
    coordinator._end()


def test_next_mover_is_told_the_mount_point(coordinator: Coordinator) -> None:
    link = coordinator._link
    link.on_message(0, Opened(0, 10, b"/mnt/kv"))
    supervisor = link.supervisor
    assert isinstance(supervisor, mock.Mock)
    supervisor.expect_mount.assert_called_with(0, b"/mnt/kv")


@pytest.mark.parametrize(
    ("kind", "refusal", "denials", "full"),
    [("unreachable", "unreachable", 0, 0), ("full", "", 0, 1), ("put", "denied", 1, 0)],
)
def test_core_is_told_why_a_medium_takes_no_rows(
    coordinator: Coordinator, kind: str, refusal: str, denials: int, full: int
) -> None:
    link = coordinator._link
    link.on_message(0, Opened(0, 10))
    link.on_message(0, Heartbeat(0, {kind: "what is wrong"}))
    link.on_tick(0.0, [0])
    assert link._core.movers[0].refusal == refusal
    found = coordinator.counters()["file"]
    assert (found["denials"], found["full"]) == (denials, full)
    assert coordinator.problems()["file"] == "what is wrong"
    link.on_reaped(0)
    link.on_tick(0.0, [0])
    assert link._core.movers[0].refusal == "", "the next mover finds out again"


def test_a_down_of_before_a_reset_says_nothing_of_the_new_epoch(coordinator: Coordinator) -> None:
    """Else `wait_ready` would return before the new namespace is listed."""
    link = coordinator._link
    link.on_message(0, Opened(0, 10))
    link.on_message(0, Listed(0, [], last=True))
    coordinator.reset()
    link.on_message(0, Down("no disk", 0))
    assert not coordinator.ready
    assert coordinator.problems()["file"] == ""
    link.on_message(0, Down("no disk", coordinator.namespace.epoch))
    assert coordinator.ready
    assert "no disk" in coordinator.problems()["file"]


def test_mover_whose_existence_checks_are_stuck_is_killed(coordinator: Coordinator) -> None:
    link = coordinator._link
    link.on_message(0, Opened(0, 10))
    link.on_message(0, Heartbeat(0))
    assert link.on_tick(0.0, [0]).overdue == {}
    link.on_message(0, Heartbeat(0, stuck=True))
    assert link.on_tick(0.0, [0]).overdue == {0: "existence checks are stuck"}
    link.on_killed(0)
    link.on_reaped(0)
    assert link.on_tick(0.0, [0]).overdue == {}, "the next one may find an answer"


def test_movers_are_given_the_times_of_their_engine(tmp_path: Path) -> None:
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}, file_tier(tmp_path, "16MiB")]})
    coordinator = Coordinator(config, Namespace.of({}), HostRegion.create(GEOMETRY, 4), times=PATIENT)
    (configure,) = coordinator._link.supervisor._configures
    packet = packet_of(configure)
    assert packet is not None
    assert decode_to_mover(packet).times == PATIENT  # type: ignore[union-attr]
    coordinator._end()


@pytest.mark.parametrize("first", [True, False])
def test_store_after_a_reset_gets_all_rows_whose_jobs_the_workers_have_ended(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Where vLLM does not say that they are flushed: else no new job could begin in a host full of them."""
    monkeypatch.setattr("nixl_tiers.runtime.coordinator.LOCATE_BATCH", 1)
    monkeypatch.setattr("nixl_tiers.core.host.MAX_JUDGED", 0)
    inside.state(coordinator._core).limits = replace(coordinator._core.limits, rows_per_slice=1)
    plan = coordinator.prepare_store("before", [b"a", b"b", b"c", b"d"])
    assert len(plan.rows) == 4
    coordinator.reset()
    if not first:  # a worker may still write to them
        assert coordinator.prepare_store("after", [b"e", b"f", b"g", b"h"]).rows == []
    coordinator.region.mark(plan.rows[:3], 0, plan.store_seq, ok=True)
    coordinator.region.mark(plan.rows[3:], 0, plan.store_seq, ok=False)
    assert len(coordinator.prepare_store("after", [b"e", b"f", b"g", b"h"]).rows) == 4


@pytest.mark.parametrize("changes", [False, True], ids=["at rest", "while rows come and go"])
def test_rows_are_demoted_at_exit_in_slices_and_in_prefix_order(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    monkeypatch.setattr("nixl_tiers.runtime.blocking.SLICE", 2)
    core = coordinator._core
    for keys in ([b"old", b"a"], [b"b", b"c"]):
        core.prepare_store("request", keys)
        core.complete_store(keys, all_good)
    core.end_step()
    core.host.invalidate(core.host.index[b"old"])
    core.prepare_store("request", [b"d"])  # in the place that has become free
    slices: list[list[bytes]] = []
    monkeypatch.setattr(core.writeback, "demote", lambda rows: slices.append([row.key for row in rows]))
    if changes:
        in_slices = core.host.in_slices

        def changing(count: int) -> Iterator[list[Row]]:
            for part in in_slices(count):
                yield part
                if b"a" in core.host.index:  # one goes and one comes
                    core.host.invalidate(core.host.index[b"a"])
                    core.prepare_store("request", [b"e"])

        monkeypatch.setattr(core.host, "in_slices", changing)
    coordinator._waits.demote_all()
    assert max(map(len, slices)) == 2
    expected = [b"a", b"b", b"b", b"c", b"d", b"e"] if changes else [b"a", b"b", b"c", b"d"]
    assert [key for keys in slices for key in keys] == expected


def test_an_error_of_a_logging_handler_costs_its_line_only(coordinator: Coordinator) -> None:
    handler = logging.Handler()
    logger = logging.getLogger("nixl_tiers")
    logger.addHandler(handler)
    try:
        with mock.patch.object(handler, "emit", side_effect=ZeroDivisionError) as emit:
            coordinator._link.on_message(0, Down("no disk", 0))
    finally:
        logger.removeHandler(handler)
    assert emit.called
    assert "no disk" in coordinator.problems()["file"]


class _Locks(logging.Handler):
    """Notes the lines that are written with the coordinator's lock held."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.held_up: list[str] = []
        self._lock: Any = coordinator._hold.lock

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.held_up += [record.getMessage()] if self._lock._is_owned() else []


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
    handler = _Locks(coordinator)
    logger = logging.getLogger("nixl_tiers")
    logger.addHandler(handler)
    try:
        LOGGED[line](coordinator._link)
    finally:
        logger.removeHandler(handler)
    assert line in " ".join(handler.lines)
    assert not handler.held_up, "the scheduler would wait for whoever reads standard error"
