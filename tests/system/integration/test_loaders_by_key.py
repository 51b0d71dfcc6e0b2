"""Several movers of an S3 tier, or of one with row files: one does everything, others load, also while it is down."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import nixl_tiers
from nixl_tiers.core.types import Direction, TierState
from tests.support.checked_rows import SIZE, TIMEOUT_S, hits, put
from tests.support.servers import S3Server
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

HOST_ROWS = 40
KEYS = [b"key-%04d" % number for number in range(60)]
MOVERS = 3
CAPACITY = 8 << 30


class Tier:
    """One kind, and the way past it to its rows."""

    def __init__(self, kind: str, path: Path, server: S3Server | None, bucket: str, prefix: str) -> None:
        self.path = path
        self.server = server
        self.bucket = bucket
        self.prefix = prefix
        self.fields: dict[str, Any] = {"type": "file", "path": str(path), "layout": "files", "min_free": 0}
        if server is not None:
            where = {"bucket": bucket, "prefix": prefix, "endpoint": server.endpoint}
            self.fields = {"type": "s3", "shared": kind == "shared", **where}

    @contextmanager
    def opened(self, movers: int = MOVERS) -> Iterator[nixl_tiers.TieredStore]:
        tier = {"capacity": CAPACITY, "movers": movers, **self.fields}
        tiers = {"tiers": [{"type": "cpu", "capacity": HOST_ROWS * SIZE}, tier], "wait_s": 60.0}
        with nixl_tiers.open(tiers, SIZE, "loaders") as store:
            until_all_up(store)
            until_it_stores(store)
            yield store

    def damage(self, key: bytes) -> None:
        """Flip a byte of its row."""
        if self.server is None:
            (file,) = self.path.glob(f"*/*/{key.hex()}.row")
            before = file.stat()
            with file.open("r+b") as row:
                row.seek(100)
                byte = row.read(1)[0]
                row.seek(100)
                row.write(bytes([byte ^ 1]))
                os.fsync(row.fileno())
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a disk does; else it seems to be used
            return
        client = self.server.client()
        (name,) = [name for name in self.names() if key.hex() in name]
        body = bytearray(client.get_object(Bucket=self.bucket, Key=name)["Body"].read())
        body[100] ^= 1
        client.put_object(Bucket=self.bucket, Key=name, Body=bytes(body))

    def names(self) -> list[str]:
        """Of all rows."""
        if self.server is None:
            return [str(file) for file in self.path.glob("*/*/*.row")]
        pages = self.server.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", ()) if found["Size"] > SIZE]


@pytest.fixture(params=["files", "private", "shared"])
def tier(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> Tier:
    if request.param == "files":
        return Tier(request.param, tmp_path / "kv", None, "", "")
    server: S3Server = request.getfixturevalue("any_s3")
    s3_credentials(server)
    return Tier(request.param, tmp_path, server, s3_bucket(server), s3_prefix)


def until_all_up(store: nixl_tiers.TieredStore) -> None:
    movers = store.coordinator._core.movers
    until(lambda: all(mover.can_load for mover in movers) and movers[0].writable, "all movers", timeout_s=TIMEOUT_S)


def until_it_stores(store: nixl_tiers.TieredStore) -> None:
    """Before there is an account of a shared prefix, nothing is written there."""
    tries = itertools.count()

    def stores() -> bool:
        before = number(store, "rows")
        put(store, [b"try-%d-%d" % (os.getpid(), next(tries))])
        return number(store, "rows") > before

    until(stores, "it to store", timeout_s=TIMEOUT_S)


def has_loaded(store: nixl_tiers.TieredStore) -> list[bool]:
    """By mover, since this was asked last."""
    loaded = []
    for mover in store.coordinator._core.movers:
        samples = mover.throughput[Direction.LOAD]._samples
        loaded.append(bool(samples))
        samples.clear()
    return loaded


def number(store: nixl_tiers.TieredStore, name: str) -> float:
    (tier,) = (numbers for tier, numbers in store.stats().items() if tier != "cpu")
    return tier[name]


def kill(store: nixl_tiers.TieredStore, mover: int, *, for_s: float) -> None:
    """Until it is known to be dead. Another one is not started for so long."""
    coordinator = store.coordinator
    coordinator._link.supervisor._backoff[mover].died = lambda now: now + for_s  # type: ignore[method-assign]
    pid = coordinator.mover_pids[mover]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    member = coordinator._core.movers[mover]
    until(lambda: member.state is TierState.DOWN and not member.dead, "its death", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("tier", ["files", "private"], indirect=True)
def test_all_movers_load_what_one_stores(tier: Tier) -> None:
    with tier.opened() as store:
        put(store, KEYS)
        for _ in range(3):
            assert hits(store, KEYS) == len(KEYS)
        assert has_loaded(store) == [True] * MOVERS
        assert number(store, "corrupt") == number(store, "missing") == number(store, "failed_loads") == 0
        assert number(store, "capacity_bytes") == CAPACITY, "that of one, once"
        if tier.fields.get("shared") is not True:  # whose use the janitor knows, some time later
            assert number(store, "used_bytes") < 2 * len(KEYS) * SIZE


def test_while_the_mover_that_stores_is_dead_loaders_load_and_nothing_is_written(tier: Tier) -> None:
    with tier.opened() as store:
        put(store, KEYS)
        held = set(tier.names())
        kill(store, 0, for_s=3600.0)
        has_loaded(store)
        for _ in range(2):
            assert hits(store, KEYS) == len(KEYS)
        assert has_loaded(store) == [False, True, True]
        more = [b"more-%04d" % number for number in range(10)]
        put(store, more)
        assert hits(store, more) == len(more), "from host memory"
        assert set(tier.names()) == held
        store.coordinator._link.supervisor._spawn_at[0] = 0.0
        store.coordinator._link.supervisor.wake()
        until_all_up(store)
        until_it_stores(store)
        assert set(tier.names()) > held
        assert number(store, "failed_loads") == 0


@pytest.mark.parametrize("tier", ["files"], indirect=True)
def test_a_dead_loader_costs_its_jobs_only(tier: Tier) -> None:
    with tier.opened() as store:
        put(store, KEYS)
        pids = store.coordinator.mover_pids
        kill(store, 1, for_s=3600.0)
        has_loaded(store)
        assert hits(store, KEYS) == len(KEYS), "the others load its share"
        put(store, more := [b"more-%04d" % number for number in range(10)])
        assert hits(store, more) == len(more)
        assert has_loaded(store)[1] is False
        assert [store.coordinator.mover_pids[mover] for mover in (0, 2)] == [pids[0], pids[2]]
        assert number(store, "deaths") == 1


def test_what_a_loader_finds_bad_is_no_hit_and_the_mover_that_stores_deletes_it(tier: Tier) -> None:
    with tier.opened(movers=2) as store:
        put(store, KEYS)
        assert hits(store, KEYS) == len(KEYS)
        bad = KEYS[7]
        (name,) = [name for name in tier.names() if bad.hex() in name]
        tier.damage(bad)
        store.coordinator._core.movers[0].loads.trip(store.coordinator.now() + 3600.0)  # so that loaders load alone
        has_loaded(store)
        assert hits(store, [KEYS[30]]) == 1
        assert hits(store, KEYS[31:] + KEYS[8:31]) == len(KEYS) - 8, "it has left host memory"
        assert hits(store, [bad]) == 0
        assert has_loaded(store)[0] is False
        assert number(store, "corrupt") == 1
        until(lambda: name not in tier.names(), "it to be deleted", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("tier", ["private"], indirect=True)
def test_rows_of_before_a_reset_are_no_hits(tier: Tier) -> None:
    with tier.opened() as store:
        put(store, KEYS)
        store.coordinator.reset(changed=True)
        until_all_up(store)
        assert hits(store, KEYS) == 0
        put(store, KEYS)
        has_loaded(store)
        for _ in range(3):
            assert hits(store, KEYS) == len(KEYS)
        assert has_loaded(store) == [True] * MOVERS
        assert number(store, "corrupt") == 0
