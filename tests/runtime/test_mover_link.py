"""What movers report, applied under the coordinator's lock; what they are configured with; and how its lock is held."""

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
from nixl_tiers.config.tier import EnvironmentName
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.rows import Row
from nixl_tiers.core.types import Direction
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, Heartbeat, Listed, Opened, Refused
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.runtime.mover_link import MoverLink
from nixl_tiers.runtime.tier_log import LINES, STEADY_S, TierLog
from nixl_tiers.testing.config import MemoryConfig, with_faults
from tests.support import inside
from tests.support.core import all_good, look_up_key, opened
from tests.support.file_tier import file_tier

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


class SecretConfig(MemoryConfig):
    user_env: EnvironmentName = None
    password_env: EnvironmentName = None


def test_movers_receive_the_names_of_variables_that_hold_secrets() -> None:
    tier = {"type": f"{__name__}:SecretConfig", "capacity": "1GiB", "user_env": "KV_A", "password_env": "KV_B"}
    inner = {"type": "nixl_tiers.testing.config:FaultyConfig", "inner": tier, "plan": {}}
    cpu = {"type": "cpu", "capacity": 16 * GEOMETRY.row_bytes}
    config = configuration.load({"tiers": [cpu, tier, inner]})
    with mock.patch("nixl_tiers.runtime.mover_link.Supervisor") as supervisor:
        Coordinator(config, Namespace.of({}), HostRegion.create(GEOMETRY, 16))._end()
    configures = supervisor.call_args.args[0]
    assert [configure.secret_variables for configure in configures] == [["KV_A", "KV_B"]] * 2


def test_faults_come_before_each_directory_of_a_tier() -> None:
    disks = {"type": "file", "path": ["/mnt/a", "/mnt/b"], "capacity": "2GiB"}
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}, disks]})
    (faulty,) = with_faults(config, {}).storage
    assert [(each.inner.place, each.capacity) for each in faulty.members] == [("/mnt/a", 1 << 30), ("/mnt/b", 1 << 30)]


def test_rows_are_used_as_far_as_their_memory_is_there() -> None:
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}]})
    region = HostRegion.create(GEOMETRY, 8)
    region.ranks.publish_ready(0, 0)
    coordinator = Coordinator(config, Namespace.of({}), region)
    given: list[int] = []
    for number, ready in enumerate((0, 3, 3, 8)):
        region.ranks.publish_ready(0, ready)
        request, keys = f"r{number}", [b"%d-%d" % (number, n) for n in range(3)]
        given += coordinator.prepare_store(request, keys).rows
        assert len(given) <= ready
        assert coordinator.counters()["cpu"]["ready_bytes"] == ready * GEOMETRY.row_bytes
    assert sorted(given) == list(range(6)), "the lowest first"
    coordinator.close(0.0)


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


@pytest.fixture
def tier(caplog: pytest.LogCaptureFixture) -> TierLog:
    caplog.set_level(logging.INFO, "nixl_tiers")
    return TierLog("s3", "s3://bucket/prefix", "10TiB", logging.getLogger("nixl_tiers.runtime.tier_log").log)


def test_a_crash_loop_is_one_outage(tier: TierLog, caplog: pytest.LogCaptureFixture) -> None:
    """A mover that comes up and dies with its first job, once a minute, for a day."""
    for minute in range(24 * 60):
        now = 60.0 * minute
        tier.down("its mover ended with -6", now)
        tier.up(now + 1)
        for second in range(2, 50):
            tier.watch({}, now + second)
    assert len(caplog.records) == 3  # down, up again, down again
    end = 60.0 * 24 * 60
    tier.watch({}, end + STEADY_S)
    assert caplog.messages[-1].startswith("nixl_tiers: the s3 tier is up again after")


def test_a_restart_loop_does_not_repeat_log_lines(tier: TierLog, caplog: pytest.LogCaptureFixture) -> None:
    for now in range(50):
        tier.line(logging.ERROR, "the mover failed | ZeroDivisionError")
        tier.down("its mover ended with 1", float(now))
    tier.up(50.0)
    assert len(caplog.records) == 3
    tier.line(logging.ERROR, "the mover failed | ZeroDivisionError")
    assert len(caplog.records) == 4
    for number in range(3 * LINES):
        tier.line(logging.INFO, str(number))
    assert len(tier._lines) == LINES


# --- holds of the core: leaving one wakes the supervisor where there is work, and none does more than its share

KEYS = [b"key-%d" % number for number in range(2)]


@pytest.fixture
def holding(coordinator: Coordinator) -> Coordinator:
    """Its tier is up and holds KEYS."""
    opened(coordinator._core, 0, 100)
    coordinator._core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(KEYS)], last=True)
    coordinator._core.garbage.drop(1 << 20)
    return coordinator


def wakes(holding: Coordinator) -> int:
    """How often the supervisor was woken up since this was asked last."""
    supervisor: Any = holding._link.supervisor
    count: int = supervisor.wake.call_count + supervisor.wake_soon.call_count
    supervisor.reset_mock()
    return count


def test_end_of_a_step_with_work_wakes_the_supervisor_and_its_look_ups_do_not(holding: Coordinator) -> None:
    for key in KEYS:
        with holding.core() as core:
            assert look_up_key(core, key, "request", None, holding.now()) is Lookup.PENDING
    assert wakes(holding) == 0, "the supervisor would take the interpreter's lock from the scheduler"
    with holding.core() as core:
        core.end_step()
    assert wakes(holding) == 1
    with holding.core() as core:
        core.counters()
    assert wakes(holding) == 0


def test_a_hold_that_raises_lets_go_and_wakes(holding: Coordinator) -> None:
    def fail() -> None:
        with holding.core() as core:
            core.prefetch(KEYS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert wakes(holding) == 1
    assert not holding._hold.lock._is_owned()  # type: ignore[union-attr]
