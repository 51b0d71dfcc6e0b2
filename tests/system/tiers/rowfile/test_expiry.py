"""`max_age` of row files: an expired row is a miss, and its file is deleted even if it was used recently."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.rowfile.budget import Budget
from nixl_tiers.tiers.rowfile.contents import Contents
from nixl_tiers.tiers.rowfile.directory import ServerTime
from nixl_tiers.tiers.rowfile.names import ORPHAN_S, RowPath
from nixl_tiers.tiers.rowfile.sweep import Sweeper
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from nixl_tiers.tiers.rowfile.transfers import TOUCH_S
from tests.mover.harness import NAMESPACE, key_of, wait_until
from tests.support.file_tier import file_config
from tests.support.hooked_files import DONE, build, installed
from tests.system.tiers import file_tiers
from tests.system.tiers.file_tiers import AGE_S, CAPACITY, DAY_S, GEOMETRY, Clock, load


class Server(ServerTime):
    """A file server with the clock of the test; `store` sets the times of files by it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def refresh(self, directory: int | None) -> None:
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


@pytest.fixture(autouse=True)
def _sweeps_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished files have another clock's times: beside a store, a thread would take them for orphans."""
    monkeypatch.setattr(Sweeper, "start", Sweeper.step)


def open_tier(path: Path, region: HostRegion, clock: Clock, ahead_s: float = 0.0) -> RowFileTier:
    """`clock` is the file server's; the engine's is ahead of it by `ahead_s`."""
    config = file_config(path, CAPACITY, layout="files", max_age=AGE_S)
    tier = RowFileTier(config, GEOMETRY, region, lambda: clock() + ahead_s, Server(clock))
    tier.open(NAMESPACE, 0)
    return tier


def sweep(tier: RowFileTier) -> None:
    """As its own thread does from time to time."""
    contents = Contents(tier.directory, tier.served.name, tier.new_budget().row_bytes, tier.log_once)
    sweeper = Sweeper(contents, Budget(CAPACITY, tier.new_budget().row_bytes), AGE_S)
    while sweeper.step() == 0.0:
        pass


def there(tier: RowFileTier, numbers: range) -> list[int]:
    """Which an existence check finds."""
    return [number for number in numbers if tier._found_at_s(key_of(number))]


def store(tier: RowFileTier, region: HostRegion, numbers: range) -> None:
    """Files get the time of the test's clock, as from a server."""
    assert set(file_tiers.store(tier, region, numbers)) == {Outcome.OK}
    for number in numbers:
        tier.directory.server_time.touch(row_of(tier, number))


def row_of(tier: RowFileTier, number: int) -> Path:
    return tier.directory.absolute(RowPath.of(tier.served.name, key_of(number)))


def rows_in(path: Path) -> int:
    return len(list(path.rglob("*.row")))


def test_expired_rows_are_deleted_even_if_recently_used(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    store(tier, region, range(4))
    clock.now += 1800
    store(tier, region, range(4, 6))
    for path in tmp_path.rglob("*.row"):
        os.utime(path, (clock.now + 50,) * 2)  # just used
    clock.now += 1799
    sweep(tier)
    assert rows_in(tmp_path) == 6
    clock.now += 61
    sweep(tier)
    assert there(tier, range(6)) == [4, 5]
    assert rows_in(tmp_path) == 2
    assert set(load(tier, region, range(4, 6))) == {Outcome.OK}
    tier.close()


def test_expired_row_is_a_miss_and_is_deleted(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    store(tier, region, range(4))
    clock.now += AGE_S
    assert load(tier, region, range(2)) == [Outcome.MISSING] * 2
    assert wait_until(lambda: rows_in(tmp_path) == 2)
    tier.close()


def test_row_that_was_not_used_for_so_long_needs_no_seal_to_be_a_miss(
    tmp_path: Path, region: HostRegion, clock: Clock
) -> None:
    tier = open_tier(tmp_path, region, clock)
    store(tier, region, range(2))
    clock.now += AGE_S - 1
    assert there(tier, range(2)) == [0, 1]
    os.utime(row_of(tier, 0), (clock.now,) * 2)
    clock.now += 1
    assert there(tier, range(2)) == [0], "that its seal is too old shows when it is loaded"
    tier.close()


def test_row_stored_again_ages_from_its_new_seal(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    """Where rows have an age, one that is there is stored all the same."""
    first, second = (open_tier(tmp_path, region, clock) for _ in range(2))
    store(first, region, range(2))
    clock.now += 3000
    store(second, region, range(2))
    clock.now += 700
    sweep(first)
    assert set(load(first, region, range(2))) == {Outcome.OK}
    assert rows_in(tmp_path) == 2
    first.close()
    second.close()


@pytest.mark.parametrize(("one_s", "other_s"), [(DAY_S, -DAY_S), (0.0, DAY_S), (-DAY_S, 0.0)])
def test_rows_expire_by_the_server_clock_with_engine_clocks_days_apart(
    tmp_path: Path, region: HostRegion, clock: Clock, one_s: float, other_s: float
) -> None:
    one, other = (open_tier(tmp_path, region, clock, ahead_s=ahead_s) for ahead_s in (one_s, other_s))
    store(one, region, range(4))
    store(other, region, range(4, 8))
    sweep(one)
    for tier in (one, other):
        assert set(load(tier, region, range(8))) == {Outcome.OK}
    clock.now += AGE_S - 1
    for tier in (one, other):
        sweep(tier)
        assert set(load(tier, region, range(8))) == {Outcome.OK}
    clock.now += 61
    assert load(one, region, range(4, 8)) == [Outcome.MISSING] * 4
    sweep(other)
    assert rows_in(tmp_path) == 0
    one.close()
    other.close()


def test_row_sealed_ahead_of_the_clock_is_not_touched(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    """A touch would make it as young as its last use, forever if its seal is far ahead."""
    tier = open_tier(tmp_path, region, clock, ahead_s=365 * DAY_S)
    store(tier, region, range(2))
    written_s = row_of(tier, 0).stat().st_mtime
    clock.now += TOUCH_S + 1
    assert set(load(tier, region, range(2))) == {Outcome.OK}
    clock.now += AGE_S - TOUCH_S - 2
    assert set(load(tier, region, range(2))) == {Outcome.OK}
    assert row_of(tier, 0).stat().st_mtime == written_s
    clock.now += 1
    assert load(tier, region, range(2)) == [Outcome.MISSING] * 2
    tier.close()


@pytest.mark.parametrize("ahead_s", [DAY_S, -DAY_S])
def test_orphans_are_judged_by_the_server_clock(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (real() + ahead_s)))
    (tmp_path / INCOMING).mkdir(mode=0o700)
    fresh, old = (tmp_path / INCOMING / f"{name}-01234567-1-01234567-0.tmp" for name in ("fresh", "old"))
    for path in (fresh, old):
        path.write_bytes(bytes(4096))
    os.utime(old, (real() - ORPHAN_S - 60,) * 2)
    config = file_config(tmp_path, CAPACITY, layout="files")
    tier = RowFileTier(config, GEOMETRY, region)
    tier.open(NAMESPACE, 0)
    sweep(tier)
    assert fresh.exists()
    assert not old.exists()
    assert abs(tier.directory.server_time.now_s() - real()) < 600
    tier.close()
