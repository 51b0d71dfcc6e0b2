"""A stream over a real mover: what the core says in the region, and what the mover answers there."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Key, Namespace
from nixl_tiers.base.row_words import ARRIVED
from nixl_tiers.config import schema
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from tests.runtime.test_stream_words import GEOMETRY
from tests.support.core import end_step
from tests.support.file_tier import file_tier
from tests.support.leaks import reclaim_all_host_rows
from tests.support.waiting import until, until_up

ROWS, TOKENS = 160, 64
KEYS = [b"chunk-%02d" % number for number in range(8)]


def store(coordinator: Coordinator, keys: list[Key]) -> None:
    plan = coordinator.prepare_store(keys, "writer")
    coordinator.region.rows_view[np.array(plan.rows), : GEOMETRY.payload_bytes] = np.arange(len(keys))[:, None]
    coordinator.region.mark(np.array(plan.rows), 0, plan.store_seq, True)
    coordinator.complete_store(plan.keys)
    with coordinator.core() as core:
        core.finish_request("writer")
        core.end_step()


def test_rows_arrive_while_their_load_is_open(tmp_path: Path) -> None:
    """In the time of the system, whatever pauses the core's leaves out."""
    config = schema.load(
        {"tiers": [{"type": "cpu", "capacity": ROWS * GEOMETRY.row_bytes}, file_tier(tmp_path, 64 << 20)]}
    )
    region = HostRegion.create(GEOMETRY, ROWS)
    if not region.streams_possible:
        pytest.skip("was installed without a C compiler")
    paused_s = 500.0
    coordinator = Coordinator(
        config, Namespace.of({"of": "streams"}), region, clock=lambda: time.monotonic() - paused_s
    )
    tiers = TieredStore(coordinator)
    try:
        coordinator.start()
        until_up(tiers)
        store(coordinator, KEYS)
        assert tiers.flush(60.0)
        until(lambda: reclaim_all_host_rows(tiers), "every host row to be free")
        for _ in range(5):
            coordinator.prefill.observe(2000, 1000.0, 2000.0)
        with coordinator.core() as core:
            core.tiers[0].loads.record(GEOMETRY.row_bytes, 0.001, coordinator.now())
            scan = core.scan("reader", Chain((Group(KEYS, TOKENS),)), 0, coordinator.now(), early=8 * TOKENS)
            assert (scan.waits, scan.end, scan.coming) == (False, TOKENS * 8, 8)
        plan = coordinator.plan_load(KEYS, "reader", tokens=[TOKENS] * 8, end=TOKENS * 8)
        end_step(coordinator)
        assert plan.stream is not None
        left_s = plan.stream.deadline_s - time.monotonic()
        assert left_s <= config.wait_s + 1.0
        assert left_s > config.wait_s - paused_s / 2
        assert int(region.limits[plan.stream.slot]) == plan.stream.stream << 32 | 8
        until(lambda: set(region.words[plan.rows].tolist()) == {ARRIVED}, "all rows")
        assert (region.rows_view[plan.rows, 0] == np.arange(8)).all()
        with coordinator.core() as core:
            core.streams.cut("reader")
        assert int(region.limits[plan.stream.slot]) == plan.stream.stream << 32
        coordinator.complete_load("reader", loaded=8)
        counters = coordinator.counters()["file"]
        assert (counters["streams"], counters["hits"], counters["streams_cut_aborted"]) == (1, 8, 1)
    finally:
        tiers.close()
