"""What was put comes back from every tier, byte for byte, or not at all: also after a restart, or by another engine."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.seal import read
from nixl_tiers.tiers.rowfile.budget import Budget
from tests.support import load
from tests.support.disks import assert_never_exceeds, least_disk_bytes, tmpfs, volume_bytes
from tests.support.file_tier import file_tier, files_tier
from tests.support.leaks import host_rows_in_use, resident_bytes
from tests.support.servers import ACCESS_KEY, SECRET_KEY, S3Server
from tests.support.times import open_patient
from tests.support.waiting import serves, until, until_up
from tests.system.tiers.s3.harness import faulty_s3

KIB, MIB = 1 << 10, 1 << 20


def chunks(count: int, size: int, seed: int = 0) -> tuple[list[bytes], np.ndarray]:
    random = np.random.default_rng(seed)
    return [b"%04d" % n + random.bytes(28) for n in range(count)], random.integers(0, 256, (count, size), np.uint8)


@pytest.fixture
def objects(
    any_s3: S3Server,
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
    s3_credentials: Callable[[S3Server], None],
) -> dict[str, Any]:
    """An s3 tier without its capacity."""
    s3_credentials(any_s3)
    return {"type": "s3", "bucket": s3_bucket(any_s3), "prefix": s3_prefix, "endpoint": any_s3.endpoint}


def config(*storage: dict[str, Any], host: int) -> dict[str, Any]:
    return {"tiers": [{"type": "cpu", "capacity": host}, *storage], "wait_s": 120.0}


def known(store: nixl_tiers.TieredStore, tier: str, count: int) -> None:
    """Wait until a tier has listed what it held before."""
    until(lambda: serves(store.stats()[tier]) and store.stats()[tier]["rows"] >= count, "the tier's listing")


def check(store: nixl_tiers.TieredStore, keys: list[bytes], rows: np.ndarray) -> None:
    out = np.full_like(rows, 0xEE)
    assert store.get(keys, out) == [True] * len(keys)
    assert np.array_equal(out, rows)


@pytest.mark.parametrize("size", [pytest.param(64 * KIB, marks=pytest.mark.smoke), 8 * MIB])
def test_each_tier_returns_what_was_put(size: int, tmp_path: Path, objects: dict[str, Any]) -> None:
    keys, rows = chunks(10, size)
    room = 64 * size
    files, objects = file_tier(tmp_path / "kv", room), {**objects, "capacity": room}
    with open_patient(config(files, objects, host=room), size, "n") as store:
        until_up(store)
        assert store.put(keys, rows) == 10
        assert store.flush(300)
        assert store.locate(keys) == ["cpu"] * 10
        check(store, keys, rows)
        assert store.stats()["file"]["bytes_read"] == 0
    with open_patient(config(files, objects, host=room), size, "n") as store:
        known(store, "file", 10)
        assert store.locate(keys) == ["file"] * 10
        check(store, keys, rows)
        assert store.stats()["file"]["hits"] == 10
        assert store.stats()["file"]["bytes_read"] >= 10 * size
    shutil.rmtree(tmp_path / "kv")
    with open_patient(config(files, objects, host=room), size, "n") as store:
        until_up(store)
        until(lambda: all(store.get(keys, np.zeros_like(rows))), "what is asked for")
        check(store, keys, rows)
        assert store.stats()["s3"]["hits"] == 10
        assert store.flush(300)  # what came from below is written to the tiers above
        assert store.stats()["file"]["rows"] == 10


@pytest.mark.smoke
def test_another_namespace_salt_or_chunk_size_never_hits(tmp_path: Path) -> None:
    keys, rows = chunks(4, 64 * KIB)
    files = file_tier(tmp_path, 16 * MIB)
    with open_patient(config(files, host=4 * MIB), 64 * KIB, "n") as store:
        until_up(store)
        store.put(keys, rows)
        assert store.flush(300)
    salted = {**config(files, host=4 * MIB), "salt": "pepper"}
    for other, size, name in [
        (config(files, host=4 * MIB), 64 * KIB, "m"),
        (salted, 64 * KIB, "n"),
        (config(files, host=4 * MIB), 128 * KIB, "n"),
    ]:
        with open_patient(other, size, name) as store:
            until_up(store)
            assert store.get(keys, np.zeros((4, size), np.uint8)) == [False] * 4
    with open_patient(config(files, host=4 * MIB), 64 * KIB, "n") as store:
        known(store, "file", 4)
        check(store, keys, rows)


def test_concurrent_resets_puts_and_gets_give_no_wrong_byte_and_leak_no_row() -> None:
    rows, done = 32, threading.Event()

    def checked(keys: list[bytes]) -> int:
        hits, wrong = load.get(store, keys)
        assert not wrong
        return sum(hits)

    def traffic(seed: int) -> int:
        random = np.random.default_rng(seed)
        hits = 0
        while not done.is_set():
            keys = [b"%d" % n for n in random.choice(3 * rows, rows // 2, replace=False)]
            if random.random() < 0.5:
                load.put(store, keys)
            else:
                hits += checked(keys)
        return hits

    # A page for the seal of each row.
    with nixl_tiers.open(config(host=rows * 8 * KIB), 4 * KIB, "n") as store, ThreadPoolExecutor(4) as others:
        threads = [others.submit(traffic, seed) for seed in range(4)]
        try:
            for number in range(2000):
                if number % 10 == 0:
                    store.reset()
                key = b"%d" % (number % (3 * rows))
                if not checked([key]):
                    load.put(store, [key])
        finally:
            done.set()
        assert sum(thread.result(120) for thread in threads) > 0
        store.reset()
        assert host_rows_in_use(store) == 0
        keys = [b"after-%d" % n for n in range(rows)]
        assert load.put(store, keys) == checked(keys) == rows


@pytest.mark.smoke
def test_any_corruption_is_a_counted_miss(tmp_path: Path) -> None:
    """One bit flipped, two rows swapped, a row replaced by another tenant's of the same key."""
    size, setting = 60_000, config(file_tier(tmp_path / "kv", 16 * MIB), host=4 * MIB)
    row_bytes = Geometry(1, size).row_bytes

    def rows_on_disk() -> dict[tuple[bytes, bytes], tuple[Path, int, bytes]]:
        """By namespace and key."""
        slabs = [(file, file.read_bytes()) for file in (tmp_path / "kv").rglob("slab-*")]
        rows = [(file, at, held[at : at + row_bytes]) for file, held in slabs for at in range(0, len(held), row_bytes)]
        return {(seal.namespace, seal.key): row for row in rows if (seal := read(row[2])) is not None}

    keys, rows = chunks(6, size)
    with open_patient({**setting, "salt": "another tenant"}, size, "n") as store:
        until_up(store)
        assert store.put(keys[3:4], chunks(6, size, seed=1)[1][3:4]) == 1
        assert store.flush(300)
    ((foreign, _),) = theirs = rows_on_disk()
    with open_patient(setting, size, "n") as store:
        until_up(store)
        assert store.put(keys, rows) == 6
        assert store.flush(300)
    ours = {key: row for (namespace, key), row in rows_on_disk().items() if namespace != foreign}
    flipped = bytearray(ours[keys[0]][2])
    flipped[size // 2] ^= 1
    wrong = (bytes(flipped), ours[keys[2]][2], ours[keys[1]][2], theirs[foreign, keys[3]][2])
    for key, held in zip(keys, wrong, strict=False):
        file, at, _ = ours[key]
        with file.open("r+b") as slab:
            slab.seek(at)
            slab.write(held)

    with open_patient(setting, size, "n") as store:
        known(store, "file", 6)
        out = np.zeros_like(rows)
        assert store.get(keys, out) == [False] * 4 + [True] * 2
        assert np.array_equal(out[4:], rows[4:])
        assert not out[:4].any(), "not a byte of what was refused is handed out"
        assert store.stats()["file"]["corrupt"] == 4
        assert store.locate(keys[:4]) == [None] * 4
        assert store.get(keys[:4], out[:4]) == [False] * 4
        assert store.stats()["file"]["corrupt"] == 4, "what was found bad is not read again"


# Movers look again every 30 s, and upload only what a listing after their start has left room for.
SHARED_S = 400.0


@pytest.fixture(params=["files", pytest.param("s3", marks=pytest.mark.s3)])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "files":
        return files_tier(tmp_path / "kv", 256 * MIB)
    server: S3Server = request.getfixturevalue("fast_s3")
    bucket: Callable[[S3Server], str] = request.getfixturevalue("s3_bucket")
    request.getfixturevalue("s3_credentials")(server)
    place = {"bucket": bucket(server), "prefix": request.getfixturevalue("s3_prefix"), "endpoint": server.endpoint}
    return {"type": "s3", "capacity": 256 * MIB, **place}


def test_another_engine_hits_stored_rows_unless_the_salt_differs(shared: dict[str, Any], tmp_path: Path) -> None:
    name = shared["type"]
    config: dict[str, Any] = {
        "tiers": [{"type": "cpu", "capacity": 4 * MIB}, shared],
        "probe_s": 60.0 if name == "file" else 5.0,
        "wait_s": 120.0,
    }
    keys, rows = chunks(80, 64 * KIB)  # more than a host tier holds
    with (
        nixl_tiers.open(config, 64 * KIB, "n") as a,
        nixl_tiers.open(config, 64 * KIB, "n") as b,
        nixl_tiers.open({**config, "salt": "pepper"}, 64 * KIB, "n") as salted,
    ):
        until_up(a, b, salted)
        assert b.locate(keys) == [None] * 80

        tries = itertools.count(1)

        def stores() -> bool:
            # Before there is an account of a prefix, nothing is written there.
            a.put(*chunks(1, 64 * KIB, seed=next(tries)))
            return a.flush(10) and a.stats()[name]["rows"] > 0

        until(stores, "the account of the prefix", timeout_s=SHARED_S)
        held = a.stats()[name]["rows"]
        assert a.put(keys, rows) == 80
        assert a.flush(300)
        assert a.stats()[name]["rows"] == held + 80
        # Nothing waits for a listing: existence checks find unknown keys. A busy server may be too late the first time.
        until(lambda: all(b.get(keys, np.zeros_like(rows))), "what the other has stored", timeout_s=SHARED_S)
        check(b, keys, rows)
        assert b.stats()[name]["probes"] > 0
        assert b.stats()[name]["corrupt"] == 0
        assert salted.stats()[name]["rows"] == 0
        assert salted.get(keys, np.zeros_like(rows)) == [False] * 80
        if name == "file":  # what was deleted is a miss for both
            for path in (tmp_path / "kv").rglob("*.row"):
                path.unlink()
            gone = [key for key in keys if b.locate([key]) == ["file"]]
            assert b.get(gone, np.zeros_like(rows[: len(gone)])) == [False] * len(gone)


# --- ten times the budget, and the medium is looked at all the time: it never holds more. Below a prefix of a bucket,
# test_kill_rounds.py looks ---

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
