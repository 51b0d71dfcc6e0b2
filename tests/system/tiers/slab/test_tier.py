"""The slab tier inside the test process, with failing system calls and directories."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import disk
from nixl_tiers.tiers.base import Move, TierDown, TierRefused
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab import layout, slabs
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import NAMESPACE, key_of
from tests.support.file_tier import file_config
from tests.system.tiers.file_tiers import CAPACITY, GEOMETRY, ROWS, load, outcomes, store


def make(path: Path, region: HostRegion, times: Times = PRODUCTION, **fields: Any) -> SlabTier:
    return SlabTier(file_config(path, **{"capacity": CAPACITY, **fields}), GEOMETRY, region, times=times)


def test_without_o_direct_and_fallocate_rows_are_served_with_two_warnings(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slabs, "direct_works", lambda _: False)
    monkeypatch.setattr(disk, "fallocate", lambda *_: errno.EOPNOTSUPP)
    tier = make(tmp_path, region)
    slots = tier.open(NAMESPACE, 0)
    for start in range(0, slots, ROWS):
        numbers = range(start, min(start + ROWS, slots))
        assert set(store(tier, region, numbers)) == {Outcome.OK}
    assert set(load(tier, region, range(ROWS))) == {Outcome.OK}
    tier.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]  # each logged once


def test_used_bytes_are_never_negative(tmp_path: Path, region: HostRegion) -> None:
    """As they would be if slabs are cut that no measurement has counted yet: a heartbeat with them ends the mover."""
    tier = make(tmp_path, region)
    tier.open(NAMESPACE, 0)
    assert set(store(tier, region, range(ROWS))) == {Outcome.OK}
    tier._quota.used_bytes = 0
    slabs_open = tier.served.slabs
    slabs_open.free(slabs_open.truncate(0))
    assert tier.used_bytes == 0
    tier.close()


@pytest.mark.parametrize(("error", "outcome"), [(errno.ENOSPC, Outcome.NO_SPACE), (errno.EIO, Outcome.FAILED)])
def test_failed_allocation_fails_stores_until_it_works_again(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch, error: int, outcome: Outcome
) -> None:
    tier = make(tmp_path, region)
    tier.open(NAMESPACE, 0)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "fallocate", lambda *_: error)
        assert set(store(tier, region, range(ROWS))) == {outcome}
    assert sum(file.stat().st_size for file in tmp_path.rglob("slab-*")) == 0
    deadline = time.monotonic() + 120
    while set(store(tier, region, range(ROWS))) != {Outcome.OK}:
        assert time.monotonic() < deadline
    assert set(load(tier, region, range(ROWS))) == {Outcome.OK}
    tier.close()


def test_new_model_below_min_free_is_down_until_there_is_room(tmp_path: Path, region: HostRegion) -> None:
    tier = make(tmp_path, region, min_free=1 << 60)
    with pytest.raises(TierDown, match=r".* is full: min_free keeps 1 EiB of its file system free"):
        tier.open(NAMESPACE, 0)
    tier.close()
    tier = make(tmp_path, region, min_free=0)
    assert tier.open(NAMESPACE, 0) > 0
    tier.close()


def test_slab_that_cannot_be_cut_is_logged_and_the_others_are_cut(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row_bytes = GEOMETRY.row_bytes
    monkeypatch.setattr(layout, "SLAB_BYTES", 32 * row_bytes)
    tier = make(tmp_path, region)
    tier.open(NAMESPACE, 0)
    while any(True for _ in tier.list_rows()):
        pass
    for first in range(0, 128, ROWS):
        assert set(store(tier, region, range(first, first + ROWS))) == {Outcome.OK}
    files = sorted(tmp_path.rglob("slab-*.kv"))
    sizes = [file.stat().st_size for file in files]
    assert len(files) == 4
    used_bytes = tier.used_bytes
    tier.delete([(slot, key_of(slot)) for slot in range(8, 128)])
    with monkeypatch.context() as patch:
        real = Folder.unlink
        patch.setattr(Folder, "unlink", lambda self, name: _io_error() if name == files[1].name else real(self, name))
        for _ in tier.maintain():
            pass
    assert [file.exists() for file in files] == [True, True, False, False]
    freed_bytes = sum(sizes) - sum(file.stat().st_size for file in files[:2])
    assert files[0].stat().st_size < sizes[0]
    assert tier.used_bytes == used_bytes - freed_bytes
    assert [record.getMessage() for record in caplog.records] == [
        f"{files[0].parent}: empty slabs cannot be freed (Input/output error)"
    ]
    assert store(tier, region, range(32, 33)) == [Outcome.OK]  # what was left is used again
    assert tier.used_bytes >= sum(file.stat().st_size for file in files[:2])
    for first in range(0, 128, ROWS):
        assert set(store(tier, region, range(first, first + ROWS))) == {Outcome.OK}
    tier.close()


def test_process_that_stands_still_with_the_lock_holds_up_no_store(
    tmp_path: Path, region: HostRegion, caplog: pytest.LogCaptureFixture
) -> None:
    """Growth takes no lock of the path: who takes a part needs it."""
    tier = make(tmp_path, region)
    slots = tier.open(NAMESPACE, 0)
    lock = os.open(tmp_path / ".ledger", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    moves = [Move(slot % ROWS, slot, key_of(slot), seal=True) for slot in (slots - 1, 1)]
    assert outcomes(tier, tier.store(moves)) == [[Outcome.OK, Outcome.OK]]
    assert tier.slots == slots
    assert caplog.records == []
    os.close(lock)
    tier.close()


def _io_error(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_loads_and_stores_run_at_once_with_more_rows_than_one_kernel_queue(tmp_path: Path) -> None:
    """More descriptors in flight than NIXL has in one kernel queue."""
    geometry = Geometry(1, 3000)
    rows = 4096
    with HostRegion.create(geometry, rows) as region:
        tier = SlabTier(file_config(tmp_path, 64 << 20), geometry, region)
        assert tier.open(NAMESPACE, 0) >= rows
        half = rows // 2
        region.rows_view[:, :3000] = 5
        first = [Move(row, row, key_of(row), seal=True) for row in range(half)]
        assert set(outcomes(tier, tier.store(first))[0]) == {Outcome.OK}
        second = [Move(row, row, key_of(row), seal=True) for row in range(half, rows)]
        region.rows_view[:half] = 0
        ended = outcomes(tier, tier.store(second), tier.load(first))
        assert [set(part) for part in ended] == [{Outcome.OK}, {Outcome.OK}]
        assert (region.rows_view[:half, :3000] == 5).all()
        tier.close()


def test_path_that_is_a_file_is_refused_and_missing_parent_is_down(tmp_path: Path, region: HostRegion) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierRefused, match=r"path: .*file"):
        make(tmp_path / "file", region).open(NAMESPACE, 0)
    missing = make(tmp_path / "not" / "mounted", region)
    with pytest.raises(TierDown, match="mounted"):
        missing.open(NAMESPACE, 0)
    (tmp_path / "not").mkdir()
    assert missing.open(NAMESPACE, 0) > 0
    missing.close()


def test_empty_batch_is_reported(tmp_path: Path, region: HostRegion) -> None:
    tier = make(tmp_path, region)
    tier.open(NAMESPACE, 0)
    assert outcomes(tier, tier.store([]), tier.load([])) == [[], []]
    tier.close()
