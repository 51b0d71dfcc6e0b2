"""Real file systems that fail under a running file tier, where they may be mounted."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.mover.protocol import Down, Opened
from nixl_tiers.tiers.base import GONE
from tests.mover.harness import MoverProcess
from tests.support.disks import Ext4, ext4, run, tmpfs
from tests.support.file_tier import LAYOUTS
from tests.system.tiers.test_file_faults import ROWS, mover_on, stored

EXT4_SHUTDOWN = 0x8004587D
READ_ONLY = os.strerror(errno.EROFS)


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Ext4]:
    with ext4(tmp_path) as disk:
        yield disk


def served_again(mover: MoverProcess, layout: str) -> None:
    """The tier is up again with all its rows."""
    mover.expect(lambda m: isinstance(m, Opened))
    if layout == "slabs":
        assert len(mover.listed_rows()) == ROWS
    else:
        assert mover.there(range(2 * ROWS)) == [*range(ROWS)]
    assert set(mover.load(range(ROWS))) == {Outcome.OK}
    assert set(mover.store(range(ROWS))) == {Outcome.OK if layout == "slabs" else Outcome.FOUND}


def test_failed_disk_is_served_again_after_a_remount(disk: Ext4, layout: str) -> None:
    """A real file system is shut down: every access fails with EIO."""
    path = disk.place / "kv"
    path.mkdir()
    with stored(mover_on(path, layout)) as mover:
        os.sync()
        handle = os.open(disk.place, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, EXT4_SHUTDOWN, struct.pack("I", 0))
        except OSError:
            pytest.skip("needs a file system that can be shut down")
        finally:
            os.close(handle)
        for _ in range(3):
            assert set(mover.store(range(ROWS))) == {Outcome.FAILED}
            assert set(mover.load(range(ROWS))) <= {Outcome.OK, Outcome.FAILED}
        assert disk.unmount()
        mover.expect(lambda m: isinstance(m, Down) and "not mounted" in m.reason)
        assert list(disk.place.iterdir()) == []  # and it does not fill the disk below the mount point
        disk.remount()
        served_again(mover, layout)
        mover.stop()
        log = mover.log()
        assert len(log.splitlines()) < 12, log


def test_disk_remounted_read_only_by_the_kernel_still_serves_loads(disk: Ext4, layout: str) -> None:
    """As it does after an error: writes to open files fail too."""
    path = disk.place / "kv"
    path.mkdir()
    with stored(mover_on(path, layout)) as mover:
        os.sync()
        disk.make_read_only()
        refused = Outcome.NO_SPACE if layout == "slabs" else Outcome.FAILED  # no slab grows, which is no failed write
        for first in range(100, 100 + 4 * ROWS, ROWS):
            assert set(mover.store(range(first, first + ROWS), range(ROWS, 2 * ROWS))) == {refused}
            assert set(mover.load(range(ROWS))) == {Outcome.OK}
        assert disk.unmount()
        mover.expect(lambda m: isinstance(m, Down) and "not mounted" in m.reason)
        disk.remount()
        served_again(mover, layout)
        mover.stop()
        log = mover.log()
        lines = [line for line in log.splitlines() if READ_ONLY in line]
        assert lines, log
        assert len(lines) == len(set(lines)), log
        assert len(log.splitlines()) < 12, log


def test_nothing_is_made_below_a_mount_that_has_gone(tmp_path: Path, layout: str) -> None:
    """`path` is the mount point itself, and stores go on."""
    place = tmp_path / "kv"
    place.mkdir()
    with tmpfs(place, "64m"), stored(mover_on(place, layout)) as mover:
        assert run("umount", "-l", place)
        for first in range(100, 100 + 8 * ROWS, ROWS):
            mover.store(range(first, first + ROWS))
            assert list(place.iterdir()) == []
        mover.expect(lambda m: isinstance(m, Down))
        assert list(place.iterdir()) == []
        assert run("mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", place)
        mover.expect(lambda m: isinstance(m, Opened))
        if layout == "slabs":
            assert {entry.slot for entry in mover.listed_rows()} <= {GONE}
        else:
            assert mover.there(range(ROWS)) == []
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
