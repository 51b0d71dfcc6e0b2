"""The coordinator over a real mover: a failing medium end to end, and what it is configured with."""

from __future__ import annotations

import time
from unittest import mock

import pytest

from nixl_tiers.base import native
from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.base.clock import RunningClock
from nixl_tiers.config import schema as configuration
from nixl_tiers.config.tier import EnvironmentName
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.testing.config import MemoryConfig
from tests.support import inside
from tests.support.core import all_good, end_step

CHUNK_BYTES = 60_000
GEOMETRY = Geometry(1, CHUNK_BYTES)
HOST_ROWS = 16


class SecretConfig(MemoryConfig):
    user_env: EnvironmentName = None
    password_env: EnvironmentName = None


def test_movers_receive_the_names_of_variables_that_hold_secrets() -> None:
    tier = {"type": f"{__name__}:SecretConfig", "capacity": "1GiB", "user_env": "KV_A", "password_env": "KV_B"}
    inner = {"type": "nixl_tiers.testing.config:FaultyConfig", "inner": tier, "plan": {}}
    cpu = {"type": "cpu", "capacity": HOST_ROWS * GEOMETRY.row_bytes}
    config = configuration.load({"tiers": [cpu, tier, inner]})
    with mock.patch("nixl_tiers.runtime.mover_link.Supervisor") as supervisor:
        Coordinator(config, Namespace.of({}), HostRegion.create(GEOMETRY, HOST_ROWS))._end()
    configures = supervisor.call_args.args[0]
    assert [configure.secret_variables for configure in configures] == [["KV_A", "KV_B"]] * 2


def test_start_without_a_library_is_refused_before_a_mover_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ALL", (native.ROW_WORKER._replace(path="/nonexistent/_row_worker.abi3.so"),))
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}]})
    region = HostRegion.create(GEOMETRY, HOST_ROWS)
    with (
        mock.patch("nixl_tiers.runtime.mover_link.Supervisor") as supervisor,
        pytest.raises(native.NotBuilt, match="/nonexistent/_row_worker"),
    ):
        Coordinator.open(config, Namespace.of({}), region)
    assert not supervisor.called
    region.close()


def test_what_is_configured_reaches_the_core() -> None:
    fields = {"prefer": "throughput", "wait_s": 3.0, "probe_s": 1.5, "prefill_tokens_per_s": 1234}
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}], **fields})
    region = HostRegion.create(GEOMETRY, HOST_ROWS)
    coordinator = Coordinator(config, Namespace.of({"test": 1}), region)
    core = coordinator._core
    assert inside.state(core).prefer == "throughput"
    assert (core.limits.wait_s, core.limits.check_timeout_s) == (3.0, 1.5)
    assert core.limits.pin_s > 3.0
    assert core.prefill.seconds(0, 1234) == 1.0
    coordinator.close()


def test_without_storage_tiers_the_time_of_an_idle_engine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No supervisor reads the clock once a second then, which tells an idle engine from a stopped machine."""
    moments = {"now": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: moments["now"])
    monkeypatch.setattr(RunningClock.__init__, "__defaults__", (time.monotonic,))
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}]})
    coordinator = Coordinator(config, Namespace.of({}), HostRegion.create(GEOMETRY, 8))
    with coordinator.core() as core:
        core.prepare_store("r", [b"a"])
        core.complete_store([b"a"], all_good)
        assert core.retain([b"a"], coordinator.now() + 60.0)
    for _ in range(3):  # requests come and go once in a while
        moments["now"] += 300.0
        end_step(coordinator)
    assert coordinator.counters()["cpu"]["retained_rows"] == 0
    coordinator.close(0.0)


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
