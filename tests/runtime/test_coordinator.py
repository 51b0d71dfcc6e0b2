"""The coordinator over a real mover: a failing medium end to end, and what it is configured with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry, Key, Namespace
from nixl_tiers.base.clock import COUNTED_S, RunningClock
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.limits import Limits
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from nixl_tiers.testing.config import with_faults
from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule, Way
from tests.support.file_tier import file_tier
from tests.support.waiting import until, until_up

CHUNK_BYTES = 60_000
GEOMETRY = Geometry(1, CHUNK_BYTES)
HOST_ROWS = 16
SOON_S, OVERDUE_S = 2.0, 10.0  # for what stalls


def content(key: Key) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, CHUNK_BYTES, np.uint8)


def keys_of(start: int, stop: int) -> list[Key]:
    return [b"key-%04d" % number for number in range(start, stop)]


@contextmanager
def store_over(path: Path, *rules: Rule, wait_s: float = 60.0, overdue_s: float = 120.0) -> Iterator[TieredStore]:
    """A store with few host rows over a file tier on a medium with these faults."""
    config = configuration.load(
        {
            "tiers": [
                {"type": "cpu", "capacity": HOST_ROWS * GEOMETRY.row_bytes},
                file_tier(path, "16MiB"),
            ],
            "wait_s": wait_s,
        }
    )
    region = HostRegion.create(GEOMETRY, HOST_ROWS)
    limits = Limits(wait_s=wait_s, hard_deadline_min_s=overdue_s, hard_deadline_max_s=overdue_s)
    config = with_faults(config, FaultPlan(rules).to_dict())
    coordinator = Coordinator(config, Namespace.of({"name": "faulty"}), region, limits=limits)
    with TieredStore(coordinator) as store:
        coordinator.start()
        until_up(store)
        yield store


def put(store: TieredStore, keys: list[Key]) -> None:
    assert store.put(keys, np.stack([content(key) for key in keys])) == len(keys)
    assert store.flush(300)


def get(store: TieredStore, keys: list[Key]) -> list[bool]:
    """Which are hits; a hit must be right."""
    out = np.full((len(keys), CHUNK_BYTES), 0xEE, np.uint8)
    hits = store.get(keys, out)
    for key, hit, row in zip(keys, hits, out, strict=True):
        assert not hit or np.array_equal(row, content(key)), f"a wrong byte under {key!r}"
    return hits


def put_beneath(store: TieredStore, keys: list[Key]) -> None:
    """Put these, and then so much else that the host has none of them left."""
    put(store, keys)
    for start in range(1000, 1000 + HOST_ROWS, 4):
        put(store, keys_of(start, start + 4))
    assert "cpu" not in store.locate(keys)


def test_corrupt_rows_are_counted_and_dropped_and_others_are_hits(tmp_path: Path) -> None:
    keys = keys_of(0, 8)
    with store_over(tmp_path, Rule(Fault.BIT_FLIP, Way.STORE, tuple(keys[::2]), times=1)) as store:
        put_beneath(store, keys)
        assert store.locate(keys) == ["file"] * 8
        assert get(store, keys) == [False, True] * 4
        assert store.stats()["file"]["corrupt"] == 4
        assert store.locate(keys[::2]) == [None] * 4
        put_beneath(store, keys)  # stored again, they are as good as any
        assert all(get(store, keys))
        assert store.stats()["file"]["corrupt"] == 4


def test_rows_without_space_below_are_counted_and_stay_in_the_host(tmp_path: Path) -> None:
    keys = keys_of(0, 8)
    with store_over(tmp_path, Rule(Fault.NO_SPACE, keys=tuple(keys[:3]), times=1)) as store:
        put(store, keys)
        counted = store.stats()["file"]
        assert counted["dropped"] == 3
        assert counted["failed"] == 0, "of a full medium nothing fails, and no alert on failures is raised"
        assert store.locate(keys) == ["cpu"] * 8
        assert all(get(store, keys))
        put_beneath(store, keys[3:])
        assert get(store, keys[3:]) == [True] * 5


def test_a_stalled_load_is_a_miss_in_time_and_its_mover_is_replaced(tmp_path: Path) -> None:
    keys = keys_of(0, 4)
    with store_over(
        tmp_path, Rule(Fault.STALL, Way.LOAD, tuple(keys[:1])), wait_s=SOON_S, overdue_s=OVERDUE_S
    ) as store:
        put_beneath(store, keys)
        pid = store.coordinator.mover_pids[0]
        assert get(store, keys[:1]) == [False]
        assert store.coordinator.mover_pids[0] == pid, "the request must not have waited for the mover's end"
        until(lambda: store.coordinator.mover_pids[0] not in {pid, None}, "another mover")
        until_up(store)
        until(lambda: store.locate(keys[1:]) == ["file"] * 3, "the rows to be listed")
        until(lambda: all(get(store, keys[1:])), "them to be hits")


def test_rows_beside_a_stalled_load_are_hits_in_time_and_outlive_its_mover(tmp_path: Path) -> None:
    keys = keys_of(0, 4)
    with store_over(
        tmp_path, Rule(Fault.STALL, Way.LOAD, tuple(keys[3:])), wait_s=SOON_S, overdue_s=OVERDUE_S
    ) as store:
        put_beneath(store, keys)
        pid = store.coordinator.mover_pids[0]
        # In time for the first request, but on a busy machine.
        until(lambda: get(store, keys) == [True, True, True, False], "those beside it")
        assert store.coordinator.mover_pids[0] == pid, "they have come by the mover that was stuck"
        until(lambda: store.coordinator.mover_pids[0] not in {pid, None}, "another mover")
        assert get(store, keys[:3]) == [True] * 3
        assert store.locate(keys[:3]) == ["cpu"] * 3


def test_a_load_that_fails_late_is_a_miss_and_its_bytes_are_not_used(tmp_path: Path) -> None:
    """All of the row is in the region when the error comes: it must not be taken for a hit, by that key or another."""
    keys = keys_of(0, 4)
    with store_over(tmp_path, Rule(Fault.LATE_ERROR, keys=tuple(keys), times=1)) as store:
        put_beneath(store, keys)
        assert get(store, keys) == [False] * 4
        assert store.stats()["file"]["failed"] == 4
        put(store, keys_of(2000, 2000 + HOST_ROWS // 2))
        assert all(get(store, keys_of(2000, 2000 + HOST_ROWS // 2)))


def test_movers_receive_the_names_of_variables_that_hold_secrets() -> None:
    s3 = {"type": "s3", "bucket": "kv-cache", "capacity": "1GiB", "access_key_env": "KV_A", "secret_key_env": "KV_B"}
    inner = {"type": "nixl_tiers.testing.config:FaultyConfig", "inner": s3 | {"prefix": "other"}, "plan": {}}
    cpu = {"type": "cpu", "capacity": HOST_ROWS * GEOMETRY.row_bytes}
    config = configuration.load({"tiers": [cpu, s3, inner]})
    with mock.patch("nixl_tiers.runtime.mover_link.Supervisor") as supervisor:
        Coordinator(config, Namespace.of({}), HostRegion.create(GEOMETRY, HOST_ROWS))._end()
    configures = supervisor.call_args.args[0]
    assert [configure.secret_variables for configure in configures] == [["KV_A", "KV_B"]] * 2


def test_what_is_configured_reaches_the_core() -> None:
    fields = {"prefer": "throughput", "wait_s": 3.0, "probe_s": 1.5, "prefill_tokens_per_s": 1234}
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}], **fields})
    region = HostRegion.create(GEOMETRY, HOST_ROWS)
    coordinator = Coordinator(config, Namespace.of({"test": 1}), region)
    core = coordinator._core
    assert core._state.prefer == "throughput"
    assert (core.limits.wait_s, core.limits.check_timeout_s) == (3.0, 1.5)
    assert core.limits.pin_s > 3.0
    assert core.prefill.seconds(0, 1234) == 1.0
    coordinator.close()


def test_copies_during_which_the_machine_was_stopped_took_no_time_meanwhile() -> None:
    moments = {"now": 0.0}
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}]})
    with HostRegion.create(GEOMETRY, 4) as region:
        clock = RunningClock(lambda: moments["now"])
        coordinator = Coordinator(config, Namespace.of({"name": "n"}), region, clock=clock)
        for _ in range(3):
            began_s = coordinator.now()
            moments["now"] += 3600.0
            now = coordinator.now()
            with coordinator.core() as core:
                core.copies.copied(1, now - began_s, now)
        price = core._state.price_of_copies(now)
        assert 0.0 < price.seconds(1) < 2 * COUNTED_S
        coordinator.close(0.0)


def test_a_start_without_the_native_table_warns_of_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nixl_tiers.core.row_table._tier_rows", None)
    tiers = [{"type": "cpu", "capacity": "1MiB"}, file_tier(tmp_path, "16MiB")]
    with nixl_tiers.open({"tiers": tiers}, CHUNK_BYTES, "n"):
        assert "was installed without a C compiler: a storage tier holds at most 250000 chunks" in caplog.text
