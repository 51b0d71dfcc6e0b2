"""Disks that are full, broken, read-only, slow or deleted; and wall clocks that jump."""

from __future__ import annotations

import fcntl
import logging
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from tests.support.disks import run, tmpfs
from tests.support.file_tier import LAYOUTS, file_tier
from tests.support.waiting import until
from tests.system.faults.interposer import Interposer
from tests.system.faults.rig import HOST, TIMEOUT_S, FaultRig
from tests.system.faults.test_mover import matrix

pytestmark = pytest.mark.timeout(900)

FAULTS: dict[str, Callable[[Interposer], None]] = {
    "disk full": Interposer.fail_with_enospc,
    "I/O errors (EIO)": Interposer.fail_with_eio,
    "disk read-only": Interposer.fail_with_erofs,
    "disk slow (50 ms per I/O)": lambda disk: disk.delay(0.05),
    "disk hangs (5 s per I/O)": lambda disk: disk.delay(5.0),
}
UNMARKED: set[tuple[str, ...]] = {
    ("disk full", "slabs"),
    ("I/O errors (EIO)", "slabs"),
    ("disk read-only", "files"),
}


@pytest.mark.parametrize(("fault", "layout"), matrix(tuple(FAULTS), tuple(LAYOUTS), unmarked=UNMARKED))
def test_disk_fault(file_rig: Callable[..., FaultRig], disk: Interposer, fault: str, layout: str) -> None:
    inject(file_rig(fault, layout), disk, fault)


def inject(rig: FaultRig, disk: Interposer, fault: str) -> None:
    """Inject one of FAULTS under load, end it, and wait for the tier to heal."""

    def begin() -> None:
        before = disk.injected
        FAULTS[fault](disk)
        if "EIO" in fault or "full" in fault or "read-only" in fault:
            until(lambda: disk.injected > before or rig.load.stats.errors, "an I/O to fail", TIMEOUT_S)

    rig.ride_out(begin, disk.clear, answers=40)


def test_worker_that_is_stuck_is_ended_by_the_deadline_of_its_job(
    file_rig: Callable[..., FaultRig], disk: Interposer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its threads wait in calls that do not return; the mover's loop does not, and goes on sending heartbeats."""
    rig = file_rig("disk hangs for good", "slabs")
    with rig.under_load():
        rig.wait_for_answers()
        old = rig.wait_for_mover()
        disk.delay(3600.0)
        rig.wait_for_restart(old)
        disk.clear()
        rig.fault_ended()
        rig.wait_for_answers()
        rig.wait_until_healed()
    reasons = [text.partition("its mover is killed: ")[2] for text in map(logging.LogRecord.getMessage, caplog.records)]
    found = {reason for reason in reasons if reason}
    assert found
    # Both are of deadlines (core/health.py).
    assert all(reason.startswith(("a job is overdue", "too many rows are stuck")) for reason in found), found


@pytest.mark.parametrize("layout", ["slabs", pytest.param("files", marks=pytest.mark.faults)])
def test_io_errors_from_the_start(file_rig: Callable[..., FaultRig], disk: Interposer, layout: str) -> None:
    file_rig("I/O errors (EIO), from the start", layout).ride_out(disk.fail_with_eio, disk.clear, warm=False)


@pytest.mark.parametrize("layout", [pytest.param("slabs", marks=pytest.mark.faults), pytest.param("files")])
def test_deleted_directory(file_rig: Callable[..., FaultRig], tmp_path: Path, layout: str) -> None:
    rig = file_rig("directory deleted", layout)
    rig.ride_out(lambda: shutil.rmtree(tmp_path / "kv", ignore_errors=True))


@pytest.mark.faults
def test_lock_of_the_path_held_from_the_start(file_rig: Callable[..., FaultRig], tmp_path: Path) -> None:
    """As by a mover that was stopped while it made room. The tier says so after 10 s."""
    place = tmp_path / "kv"
    place.mkdir()
    with (place / ".ledger").open("w") as holder:
        (place / ".ledger").chmod(0o600)
        rig = file_rig("path's lock held, from the start", "slabs")

        def let_go() -> None:
            until(lambda: any(tier.log.problem for tier in rig.store.coordinator._link.movers), "a word", TIMEOUT_S)
            fcntl.flock(holder, fcntl.LOCK_UN)

        rig.ride_out(lambda: fcntl.flock(holder, fcntl.LOCK_EX), let_go, warm=False)


@pytest.mark.faults
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unmounted(file_rig: Callable[..., FaultRig], tmp_path: Path, layout: str) -> None:
    """`path` is the mount point itself, and its mover is killed, so that another one finds the directory below it.
    Another file system takes its place at the end. Skipped where none can be mounted."""
    place = tmp_path / "kv"
    place.mkdir()

    def unmount() -> None:
        assert run("umount", "-l", place)
        rig.signal_mover(signal.SIGKILL)

    def mount() -> None:
        assert list(place.iterdir()) == []
        assert run("mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", place)

    with tmpfs(place, "64m"):
        rig = file_rig("unmounted, its mover killed", layout)
        rig.ride_out(unmount, mount, answers=40)


@pytest.mark.faults
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_file_system(file_rig: Callable[..., FaultRig], tmp_path: Path, layout: str) -> None:
    """A tmpfs smaller than the capacity of the tier. Skipped where none can be mounted."""
    place = tmp_path / "kv"
    place.mkdir()
    with tmpfs(place, "8m"):
        rig = file_rig("disk full (8 MiB tmpfs)", layout)
        rig.ride_out(lambda: None, lambda: run("mount", "-o", "remount,size=64m", place), answers=60)


@pytest.mark.parametrize(
    ("by", "tier"),
    matrix(("a day ahead", "a day back"), ("slabs", "files", "s3"), unmarked={("a day back", "files")}),
)
def test_wall_clock_jumps(
    make_rig: Callable[..., FaultRig], disk: Interposer, monkeypatch: pytest.MonkeyPatch, by: str, tier: str
) -> None:
    """In the mover and in the engine. Deadlines use the monotonic clock."""
    rig = make_rig(f"clock jumps {by}", tier)
    offset_s = 86400 if by == "a day ahead" else -86400
    real_time = time.time
    with rig.under_load():
        rig.wait_for_answers()
        monkeypatch.setattr(time, "time", lambda: real_time() + offset_s)
        disk.shift_clock(offset_s)
        rig.wait_for_answers(40)
        rig.wait_until_healed()
        disk.clear()
        monkeypatch.setattr(time, "time", real_time)
        rig.wait_for_answers(10)


@pytest.mark.faults
def test_reader_beside_the_tier(file_rig: Callable[..., FaultRig], tmp_path: Path) -> None:
    """With less capacity than is there, and a `max_age` that has passed: it takes nothing away."""
    rig = file_rig("a reader of 1 MiB, max_age 1 s, beside it", "files")
    with rig.under_load():
        rows = {*(tmp_path / "kv").rglob("*.row")}
        tier = file_tier(tmp_path / "kv", "1MiB", layout="files", write="off", max_age="1s")
        config = configuration.load({"tiers": [{"type": "cpu", "capacity": HOST}, tier]})
        region = HostRegion.create(Geometry(cells=1, cell_payload=rig.chunk), 16)
        reader = Coordinator(config, Namespace.of({"of": "the fault matrix"}), region)
        reader.start(TIMEOUT_S)
        try:
            rig.wait_for_answers(40)
        finally:
            reader.close()
        assert rows
        assert rows <= {*(tmp_path / "kv").rglob("*.row")}
        rig.fault_ended()
        rig.wait_until_healed()
