"""Ten times the budget through the whole store, and the medium is looked at all the time: it never holds more. Below a
prefix of a bucket, test_kill_rounds.py looks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.tiers.rowfile.budget import Budget
from tests.support.disks import assert_never_exceeds, least_disk_bytes, tmpfs, volume_bytes
from tests.support.file_tier import file_tier
from tests.support.leaks import resident_bytes
from tests.support.servers import ACCESS_KEY, SECRET_KEY
from tests.support.times import open_patient
from tests.support.waiting import until, until_up
from tests.system.integration.test_round_trips import KIB, MIB, check, chunks, config
from tests.system.tiers.s3.harness import faulty_s3

SIZE = 64 * KIB
BUDGET = 12 * MIB
BATCH, GETS = 32, 8
HOST = 64 * SIZE


def use(store: nixl_tiers.TieredStore, nbytes: int, seed: int, tier: str = "file") -> int:
    """Put chunks until `nbytes` have gone down to this tier, and get others meanwhile; bytes gone down."""
    random = np.random.default_rng(seed)
    _, (row,) = chunks(1, SIZE, seed)
    batch = np.tile(row, (BATCH, 1))
    out = np.empty_like(batch[:GETS])
    put: list[bytes] = []
    hits = 0
    while store.stats()[tier]["bytes_written"] < nbytes:
        keys, _ = chunks(BATCH, 0, int(random.integers(1 << 30)))
        batch[:, :8] = np.frombuffer(b"".join(key[4:12] for key in keys), np.uint8).reshape(BATCH, 8)
        put += keys[: store.put(keys, batch)]
        # The medium holds the newest tenth; the host some of that.
        wanted = [put[-1 - n] for n in random.choice(min(len(put), 2 * HOST // SIZE), GETS, replace=False)]
        for key, hit, got in zip(wanted, store.get(wanted, out), out, strict=True):
            assert not hit or (got[:8].tobytes() == key[4:12] and np.array_equal(got[8:], row[8:]))
            hits += hit
    assert hits > 0
    return int(store.stats()[tier]["bytes_written"])


@pytest.mark.parametrize("layout", [pytest.param("slabs", marks=pytest.mark.smoke), "files"])
def test_ten_times_the_budget_in_three_namespaces_in_turn(tmp_path: Path, layout: str) -> None:
    """Two replicas on one path at once. Slabs have a part for each; engines with row files count what is
    there from time to time, and are ahead of each other by a window at most."""
    engines = 2
    ahead = 0 if layout == "slabs" else Budget(BUDGET, SIZE + (8 << 10)).window_bytes
    setting = config(file_tier(tmp_path / "kv", BUDGET, layout=layout), host=HOST) | {"replicas": engines}
    taken: Callable[[Path], int] = least_disk_bytes
    written = 0
    with ExitStack() as around:
        if layout == "files":  # a walk would count rows that come and go meanwhile
            around.enter_context(tmpfs(tmp_path, "256m"))
            taken = volume_bytes
        looks = around.enter_context(assert_never_exceeds(tmp_path, BUDGET + ahead, taken))
        for number in range(3):
            with ExitStack() as stack, ThreadPoolExecutor(engines) as threads:
                stores = [stack.enter_context(open_patient(setting, SIZE, f"n{number}")) for _ in range(engines)]
                share = 10 * BUDGET // 3 // engines
                written += sum(threads.map(use, stores, [share] * engines, range(engines)))
                for store in stores:
                    assert store.stats()["file"]["rows"] > 0
    assert written >= 9.9 * BUDGET
    assert max(looks) > 0.6 * BUDGET  # a budget that is kept by not using it would be no feat


def test_huge_capacity_is_served_without_memory_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2^27 slots: a byte for each would be 128 MiB. The mover takes 110 to 140 MiB without it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    size = 8 * MIB
    keys, rows = chunks(4, size)
    with faulty_s3() as server:
        kind = "tests.mover.stub_tiers:PatientConfig"  # the prefix is swept before anything is stored
        tier = {"type": kind, "bucket": "kv-huge", "endpoint": server.endpoint, "capacity": "1PiB"}
        ours = resident_bytes()
        for stored in (False, True):
            with nixl_tiers.open(config(tier, host=4 * size), size, "n") as store:
                until_up(store)
                if stored:
                    until(lambda store=store: all(store.get(keys, np.zeros_like(rows))), "what is asked for")
                    check(store, keys, rows)
                else:
                    assert store.put(keys, rows) == 4
                    assert store.flush(120)
                    assert store.stats()["s3"]["rows"] == 4
                (mover,) = store.coordinator.mover_pids
                assert mover is not None
                assert resident_bytes() < ours + (100 << 20)
                assert 0 < resident_bytes(mover) < 230 << 20
