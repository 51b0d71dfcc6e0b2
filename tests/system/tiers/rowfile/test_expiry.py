"""`max_age` of row files: an expired row is a miss, and its file is deleted even if it was used recently."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Entry
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.rowfile import scanner
from nixl_tiers.tiers.rowfile.directory import ServerTime
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.scanner import ORPHAN_S
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from nixl_tiers.tiers.rowfile.transfers import TOUCH_S
from tests.mover.harness import NAMESPACE, key_of, wait_until
from tests.support.file_tier import file_config
from tests.support.hooked_files import DONE, build, installed
from tests.system.tiers import file_tiers
from tests.system.tiers.file_tiers import AGE_S, CAPACITY, DAY_S, GEOMETRY, Clock, gone, load


class Server(ServerTime):
    """A file server with the clock of the test; `store` sets the times of files by it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def refresh(self, directory: int) -> None:
        pass

    def touch(self, name: str | Path, directory: int | None = None) -> None:
        os.utime(name, (self.clock(),) * 2, dir_fd=directory)

    def now_s(self) -> float:
        return self.clock()


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("hooked"))


@pytest.fixture(autouse=True)
def _touches_by_the_server(hooked: str, clock: Clock) -> Iterator[None]:
    """Those of loads, too, are by the clock of the test."""

    def touch(call: str, descriptor: int, *_: object) -> int:
        if call != "futimens":
            return 0
        os.utime(descriptor, (clock(),) * 2)
        return DONE

    with installed(hooked, touch):
        yield


def open_tier(
    path: Path,
    region: HostRegion,
    clock: Clock,
    namespace: bytes = NAMESPACE,
    *,
    write: str = "through",
    ahead_s: float = 0.0,
) -> RowFileTier:
    """`clock` is the file server's; the engine's is ahead of it by `ahead_s`."""
    config = file_config(path, CAPACITY, layout="files", max_age=AGE_S, write=write)
    tier = RowFileTier(config, GEOMETRY, region, lambda: clock() + ahead_s, Server(clock))
    tier.open(namespace, 0)
    return tier


def listing(tier: RowFileTier) -> list[Entry]:
    """The entries of a listing, and of the one after the sweep."""
    entries = [entry for batch in tier.list_rows() for entry in batch]
    assert list(tier.maintain()) == []
    assert wait_until(tier._sweeping.done)
    return entries + [entry for batch in tier.list_rows() for entry in batch]


def store(tier: RowFileTier, region: HostRegion, numbers: range) -> None:
    """Files get the time of the test's clock, as from a server."""
    assert set(file_tiers.store(tier, region, numbers)) == {Outcome.OK}
    for number in numbers:
        tier._directory.server_time.touch(row_of(tier, number))


def row_of(tier: RowFileTier, number: int) -> Path:
    return tier._directory.absolute(RowPath.of(tier._served.name, key_of(number)))


def rows_in(path: Path) -> int:
    return len(list(path.rglob("*.row")))


def test_expired_rows_are_deleted_even_if_recently_used(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    assert listing(tier) == []
    store(tier, region, range(4))
    clock.now += 1800
    store(tier, region, range(4, 6))
    for path in tmp_path.rglob("*.row"):
        os.utime(path, (clock.now + 50,) * 2)  # just used
    clock.now += 1799
    assert listing(tier) == []
    clock.now += 61
    assert gone(listing(tier)) == [0, 1, 2, 3]
    assert rows_in(tmp_path) == 2
    assert set(load(tier, region, range(4, 6))) == {Outcome.OK}
    tier.close()


def test_expired_rows_of_others_are_deleted(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    other = bytes(reversed(NAMESPACE))
    for namespace in (other, NAMESPACE):
        tier = open_tier(tmp_path, region, clock, namespace)
        listing(tier)
        store(tier, region, range(3))
        tier.close()
    sealless = tier._directory.absolute(RowPath.of(NAMESPACE.hex(), key_of(3)))
    sealless.parent.mkdir(exist_ok=True)
    sealless.write_bytes(bytes(5000))  # without a seal, it ages by its modification time
    os.utime(sealless, (clock.now,) * 2)
    clock.now += 3000
    tier = open_tier(tmp_path, region, clock)  # so it must read their seals
    assert len(listing(tier)) == 3
    clock.now += 700
    assert gone(listing(tier)) == [0, 1, 2]
    assert rows_in(tmp_path) == 0
    tier.close()


def test_expired_row_is_a_miss_and_is_deleted(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(4))
    clock.now += AGE_S
    assert load(tier, region, range(2)) == [Outcome.MISSING] * 2
    assert wait_until(lambda: rows_in(tmp_path) == 2)
    tier.close()


def test_reader_forgets_expired_rows_and_deletes_none(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(2))
    tier.close()
    reader = open_tier(tmp_path, region, clock, write="off")
    assert len(listing(reader)) == 2
    clock.now += AGE_S
    assert load(reader, region, range(2)) == [Outcome.MISSING] * 2
    assert wait_until(lambda: listing(reader) == [])  # and it does not list them again
    assert rows_in(tmp_path) == 2
    reader.close()


def test_row_stored_again_ages_from_its_new_seal(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    first, second = (open_tier(tmp_path, region, clock) for _ in range(2))
    listing(first)
    store(first, region, range(2))
    assert len(listing(second)) == 2
    clock.now += 3000
    store(second, region, range(2))
    clock.now += 700
    assert listing(first) == []  # although it knew the old seals
    assert set(load(first, region, range(2))) == {Outcome.OK}
    assert rows_in(tmp_path) == 2
    first.close()
    second.close()


@pytest.mark.parametrize(("one_s", "other_s"), [(DAY_S, -DAY_S), (0.0, DAY_S), (-DAY_S, 0.0)])
def test_rows_expire_by_the_server_clock_with_engine_clocks_days_apart(
    tmp_path: Path, region: HostRegion, clock: Clock, one_s: float, other_s: float
) -> None:
    one, other = (open_tier(tmp_path, region, clock, ahead_s=ahead_s) for ahead_s in (one_s, other_s))
    listing(one)
    store(one, region, range(4))
    listing(other)
    store(other, region, range(4, 8))
    listing(one)
    for tier in (one, other):
        assert set(load(tier, region, range(8))) == {Outcome.OK}
    clock.now += AGE_S - 1
    for tier in (one, other):
        listing(tier)
        assert set(load(tier, region, range(8))) == {Outcome.OK}
    clock.now += 61
    assert load(one, region, range(4, 8)) == [Outcome.MISSING] * 4
    listing(other)
    assert rows_in(tmp_path) == 0
    one.close()
    other.close()


def test_row_sealed_ahead_of_the_clock_is_not_touched(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    """A touch would make it as young as its last use, forever if its seal is far ahead."""
    tier = open_tier(tmp_path, region, clock, ahead_s=365 * DAY_S)
    listing(tier)
    store(tier, region, range(2))
    written_s = row_of(tier, 0).stat().st_mtime
    clock.now += TOUCH_S + 1
    assert set(load(tier, region, range(2))) == {Outcome.OK}
    clock.now += AGE_S - TOUCH_S - 2
    listing(tier)  # waits for the workers
    assert set(load(tier, region, range(2))) == {Outcome.OK}
    assert row_of(tier, 0).stat().st_mtime == written_s
    clock.now += 1
    assert load(tier, region, range(2)) == [Outcome.MISSING] * 2
    tier.close()


def test_rows_written_while_the_server_clock_was_ahead_age_from_now_on(
    tmp_path: Path, region: HostRegion, clock: Clock
) -> None:
    right, clock.now = clock.now, clock.now + 365 * DAY_S
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(2))
    tier.close()
    clock.now = right
    tier = open_tier(tmp_path, region, clock)
    assert len(listing(tier)) == 2
    assert [row_of(tier, n).stat().st_mtime for n in range(2)] == [right] * 2  # when they were first seen
    clock.now += AGE_S - 1
    listing(tier)
    assert set(load(tier, region, range(2))) == {Outcome.OK}
    clock.now += 61
    assert gone(listing(tier)) == [0, 1]
    tier.close()


@pytest.mark.parametrize("ahead_s", [DAY_S, -DAY_S])
def test_orphans_and_changed_directories_are_judged_by_the_server_clock(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    real = time.time
    monkeypatch.setattr(scanner, "_SETTLED_NS", int(1e9 * ORPHAN_S))  # however late the scan after a change is
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (real() + ahead_s)))
    config = file_config(tmp_path, CAPACITY, layout="files")
    tier = RowFileTier(config, GEOMETRY, region)
    tier.open(NAMESPACE, 0)
    fresh, old = (tmp_path / INCOMING / f"{name}-01234567-1-01234567-0.tmp" for name in ("fresh", "old"))
    for path in (fresh, old):
        path.write_bytes(bytes(4096))
    os.utime(old, (real() - ORPHAN_S - 60,) * 2)
    tier._quota.wait_for_scan()
    assert fresh.exists()
    assert not old.exists()
    home = tmp_path / NAMESPACE.hex() / "00"
    home.mkdir()
    tier._quota.wait_for_scan()
    assert tier._quota._dirs[NAMESPACE.hex(), "00"].mtime_ns == -1  # may change again in the same tick
    assert abs(tier._directory.server_time.now_s() - real()) < 600
    tier.close()
