"""Directories and real file systems that fail under a running file tier: it goes down, and comes up with the rest."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Down, Heartbeat, Open, Opened, Refused
from tests.mover.harness import NAMESPACE, MoverProcess, shard_dir, wait_until
from tests.support.disks import Ext4, disk_bytes, ext4
from tests.support.file_tier import LAYOUTS

GEOMETRY = Geometry(1, 120_000)
CAPACITY = 24 << 20
ROWS = 24
EXT4_SHUTDOWN = 0x8004587D
READ_ONLY = os.strerror(errno.EROFS)


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def mover_on(path: Path, layout: str = "slabs") -> MoverProcess:
    tier = LAYOUTS[layout](path, CAPACITY, type="tests.mover.stub_tiers:DecidedConfig", staged=False)
    return MoverProcess(tier, GEOMETRY, ROWS)


def stored(mover: MoverProcess, rows: int = ROWS) -> MoverProcess:
    """The mover, serving keys 0 to rows - 1."""
    mover.open()
    mover.listed_rows()
    assert set(mover.store(range(rows))) == {Outcome.OK}
    return mover


def down_and_up(mover: MoverProcess) -> str:
    """Wait until it has reported that it is down and up again; returns the reason."""
    down = mover.expect(lambda m: isinstance(m, Down))
    assert isinstance(down, Down)
    mover.expect(lambda m: isinstance(m, Opened))
    mover.listed_rows()
    return down.reason


def rows_of(mover: MoverProcess, layout: str) -> int:
    """How many it lists, or says are there when it is asked."""
    listed = mover.listed_rows()
    return len(listed) if layout == "slabs" else len(mover.there(range(ROWS)))


def lines(mover: MoverProcess, text: str) -> int:
    return sum(text in line for line in mover.log().splitlines())


def test_deleted_directory_is_made_again(tmp_path: Path, layout: str) -> None:
    place = tmp_path / "kv"
    with stored(mover_on(place, layout)) as mover:
        shutil.rmtree(place)
        assert set(mover.load(range(ROWS))) <= {Outcome.OK, Outcome.MISSING, Outcome.FAILED}
        assert down_and_up(mover) == f"{_root(place, layout)} has been deleted"
        assert set(mover.load(range(ROWS))) == {Outcome.MISSING}
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        assert set(mover.load(range(ROWS))) == {Outcome.OK}
        assert disk_bytes(place) > ROWS * GEOMETRY.row_bytes
        mover.stop()
        assert lines(mover, "has been deleted") == 0  # the coordinator logs the reason, not the mover
    with mover_on(place, layout) as mover:
        mover.open()
        assert rows_of(mover, layout) == ROWS


def _root(place: Path, layout: str) -> Path:
    return place if layout == "files" else shard_dir(place).parent


def test_file_size_limit_fails_only_stores(tmp_path: Path, layout: str) -> None:
    with stored(mover_on(tmp_path, layout), ROWS // 2) as mover:
        pid, most = mover.process.pid, GEOMETRY.row_bytes // 2
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        refused = Outcome.NO_SPACE if layout == "slabs" else Outcome.FAILED  # no slab grows, which is no failed write
        assert set(mover.store(range(100, 100 + ROWS))) == {refused}
        denied(mover, lambda denials: "File too large" in denials.get("writing", ""))
        assert set(mover.load(range(ROWS // 2))) == {Outcome.OK}
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert wait_until(lambda: set(mover.store(range(100, 100 + ROWS))) == {Outcome.OK})
        denied(mover, lambda denials: not denials)
        assert set(mover.load(range(ROWS // 2))) == {Outcome.OK}
        mover.stop()
        assert lines(mover, "File too large") == 1


def denied(mover: MoverProcess, what: Callable[[Mapping[str, str]], bool]) -> None:
    mover.expect(lambda message: isinstance(message, Heartbeat) and what(message.denials))


@pytest.mark.parametrize("there", list(LAYOUTS))
def test_directory_of_the_other_layout_is_refused(tmp_path: Path, there: str) -> None:
    with stored(mover_on(tmp_path, there)) as mover:
        mover.stop()
    (other,) = set(LAYOUTS) - {there}
    with mover_on(tmp_path, other) as mover:
        mover.send(Open(NAMESPACE, 0))
        refused = mover.expect(lambda m: isinstance(m, Refused))
        assert isinstance(refused, Refused)
        assert refused.reason.startswith(f"path: {tmp_path} holds ")
        assert "one layout" in refused.reason
    with mover_on(tmp_path, there) as mover:
        mover.open()
        assert rows_of(mover, there) == ROWS


# --- file systems, where they may be mounted ---


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
