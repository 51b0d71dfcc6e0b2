"""Many times the budget through whole stores into one prefix of a bucket, which never holds more than it may."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry, Namespace, object_name
from nixl_tiers.config import schema as configuration
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from tests.support.engines import least_s3_bytes
from tests.support.servers import ACCESS_KEY, SECRET_KEY, S3Server
from tests.support.waiting import until, until_up
from tests.system.integration.test_round_trips import KIB, check, chunks, config
from tests.system.tiers.s3.harness import faulty_s3

SIZE = 64 * KIB
GEOMETRY = Geometry(1, SIZE)
ROW = GEOMETRY.row_bytes
BUDGET_ROWS = 32
WINDOW_ROWS = 8
HOST_ROWS = 32
TIMEOUT_S = 300.0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize(("capacity", "size"), [("1EiB", 64 * KIB), ("1PiB", 8 << 20)])
def test_huge_capacity_is_served_without_memory_in_advance(
    monkeypatch: pytest.MonkeyPatch, capacity: str, size: int
) -> None:
    """More slots than are counted, and 2^27 of them: a byte for each would be 128 MiB or more. The mover takes 110 to
    140 MiB without it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with faulty_s3() as server:
        kind = "tests.mover.stub_tiers:PatientConfig"  # the prefix is swept before anything is stored
        tier = {"type": kind, "bucket": "kv-huge", "endpoint": server.endpoint, "capacity": capacity}
        keys, rows = chunks(4, size)
        ours = resident_bytes(os.getpid())
        for stored in (False, True):
            with nixl_tiers.open(config(tier, host=4 * size), size, "n") as store:
                if stored:
                    until_up(store)
                    until(lambda store=store: all(store.get(keys, np.zeros_like(rows))), "what is asked for")
                    check(store, keys, rows)
                else:
                    until_up(store)
                    assert store.put(keys, rows) == 4
                    assert store.flush(120)
                    assert store.stats()["s3"]["rows"] == 4
                (mover,) = store.coordinator.mover_pids
                assert mover is not None
                assert resident_bytes(os.getpid()) < ours + (100 << 20)
                assert resident_bytes(mover) < 230 << 20


@pytest.fixture
def place(fast_s3: S3Server, s3_prefix: str, s3_credentials: Any, s3_bucket: Any) -> dict[str, Any]:
    s3_credentials(fast_s3)
    return {"bucket": s3_bucket(fast_s3), "prefix": s3_prefix, "endpoint": fast_s3.endpoint}


@contextmanager
def store_of(place: dict[str, Any]) -> Iterator[TieredStore]:
    """One of several engines, with a mover process of its own, on a shared prefix."""
    fast = {"type": "tests.mover.stub_tiers:FastBudgetConfig", "window_share": BUDGET_ROWS // WINDOW_ROWS}
    tier = {**fast, "capacity": BUDGET_ROWS * ROW, **place}
    setting = configuration.load(config(tier, host=HOST_ROWS * ROW))
    region = HostRegion.create(GEOMETRY, HOST_ROWS)
    coordinator = Coordinator(setting, Namespace.of({"name": "budget"}), region)
    with TieredStore(coordinator) as store:
        coordinator.start(30.0)
        yield store


def test_two_engines_on_a_prefix_keep_one_budget_plus_one_upload_window(
    fast_s3: S3Server, place: dict[str, Any]
) -> None:
    for number in range(BUDGET_ROWS - WINDOW_ROWS):  # others' rows: there is room for one window, and both are let in
        name = f"{place['prefix']}/{'0f' * 16}/{object_name(b'other-%04d' % number)}"
        fast_s3.client().put_object(Bucket=place["bucket"], Key=name, Body=bytes(ROW))
    client = fast_s3.client()
    samples: list[int] = []
    done = threading.Event()
    seeds = itertools.count(1)
    deadline = time.monotonic() + TIMEOUT_S

    def sample() -> None:
        while not done.wait(0.01):
            samples.append(least_s3_bytes(client, place))

    def fill(store: TieredStore) -> int:
        """Offer far more than there is room for; bytes that got there."""
        written = 0
        while written < 3 * WINDOW_ROWS * ROW and time.monotonic() < deadline:
            store.put(*chunks(HOST_ROWS // 2, SIZE, next(seeds)))
            store.flush(30.0)
            written = int(store.stats()["s3"]["bytes_written"])
        return written

    with ExitStack() as stack, ThreadPoolExecutor(3) as threads:
        stores = [stack.enter_context(store_of(place)) for _ in range(2)]
        sampling = threads.submit(sample)
        try:
            written = sum(threads.map(fill, stores))
        finally:
            done.set()
            sampling.result()
    assert written >= 6 * WINDOW_ROWS * ROW
    assert (BUDGET_ROWS - WINDOW_ROWS) * ROW <= max(samples) <= (BUDGET_ROWS + WINDOW_ROWS) * ROW
