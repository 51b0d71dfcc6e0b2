"""Disks that are full, broken, read-only, slow or deleted; and wall clocks that jump."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from errno import EIO, ENOSPC, EROFS
from pathlib import Path

import msgspec
import pytest

from tests.support.disks import run, tmpfs
from tests.support.file_tier import LAYOUTS
from tests.support.no_gpu import NoGpu
from tests.support.waiting import until
from tests.system.faults.interposer import Interposer
from tests.system.faults.rig import KILLS, TIMEOUT_S, TIMES, FaultRig
from tests.system.faults.test_mover import matrix

pytestmark = pytest.mark.timeout(900)

BROKEN = {"write_errno": EIO, "read_errno": EIO}
FAULTS: dict[str, dict[str, int]] = {
    "disk full": {"write_errno": ENOSPC, "change_errno": ENOSPC},
    "I/O errors (EIO)": BROKEN,
    "disk read-only": {"write_errno": EROFS, "change_errno": EROFS},
    "disk slow (50 ms per I/O)": {"delay_us": 50_000},
    "disk hangs (5 s per I/O)": {"delay_us": 5_000_000},
}
UNMARKED: set[tuple[str, ...]] = {
    ("disk full", "slabs"),
    ("I/O errors (EIO)", "slabs"),
    ("disk read-only", "files"),
}


@pytest.mark.parametrize(("fault", "layout"), matrix(tuple(FAULTS), tuple(LAYOUTS), unmarked=UNMARKED))
def test_disk_fault(make_rig: Callable[..., FaultRig], disk: Interposer, fault: str, layout: str) -> None:
    inject(make_rig(fault, layout), disk, fault)


def inject(rig: FaultRig, disk: Interposer, fault: str) -> None:
    """Inject one of FAULTS under load, end it, and wait for the tier to heal."""

    def begin() -> None:
        before = disk.injected
        disk.inject(**FAULTS[fault])
        if "write_errno" in FAULTS[fault]:
            until(lambda: disk.injected > before or rig.load.stats.errors, "an I/O to fail", TIMEOUT_S)

    rig.ride_out(begin, disk.inject, answers=40)


@pytest.mark.parametrize("layout", ["slabs", pytest.param("files", marks=pytest.mark.faults)])
def test_io_errors_from_the_start(make_rig: Callable[..., FaultRig], disk: Interposer, layout: str) -> None:
    make_rig("I/O errors (EIO), from the start", layout).ride_out(
        lambda: disk.inject(**BROKEN), disk.inject, warm=False
    )


@pytest.mark.parametrize("layout", [pytest.param("slabs", marks=pytest.mark.faults), pytest.param("files")])
def test_deleted_directory(make_rig: Callable[..., FaultRig], tmp_path: Path, layout: str) -> None:
    rig = make_rig("directory deleted", layout)
    rig.ride_out(lambda: shutil.rmtree(tmp_path / "kv", ignore_errors=True))


@pytest.mark.faults
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unmounted(make_rig: Callable[..., FaultRig], tmp_path: Path, layout: str) -> None:
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
        rig = make_rig("unmounted, its mover killed", layout)
        rig.ride_out(unmount, mount, answers=40)


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
        disk.inject(clock_offset_s=offset_s)
        rig.wait_for_answers(40)
        rig.wait_until_healed()
        disk.inject()
        monkeypatch.setattr(time, "time", real_time)
        rig.wait_for_answers(10)


# --- through NVIDIA's cuFile and NIXL's GDS_MT plugin, the real ones, in cuFile's compatibility mode, without a GPU ---

BACKEND = {"backend": "gds_mt"}


@pytest.fixture
def cufile(no_gpu: NoGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """cufile(udev=False): what every mover that is started from here on has of cuFile."""
    if not os.major(tmp_path.stat().st_dev):
        pytest.skip("needs temporary files on a block device")

    def use(**lacks: bool) -> None:
        for name, value in no_gpu.environment(tmp_path, **lacks).items():
            monkeypatch.setenv(name, value)

    return use


@pytest.mark.parametrize("when", matrix(("idle", "store", "load"), unmarked={("store",)}))
def test_mover_with_cufile_is_killed(make_rig: Callable[..., FaultRig], cufile: Callable[..., None], when: str) -> None:
    cufile()
    rig = make_rig(f"SIGKILL, {when}", "slabs", fields=BACKEND)
    rig.ride_out(lambda: rig.kill(KILLS["SIGKILL"], when), answers=8)


@pytest.mark.parametrize("fault", matrix(tuple(FAULTS), unmarked={("disk full",)}))
def test_disk_fault_below_cufile(
    make_rig: Callable[..., FaultRig], disk: Interposer, cufile: Callable[..., None], fault: str
) -> None:
    cufile()
    inject(make_rig(fault, "slabs", fields=BACKEND), disk, fault)


def test_driver_open_never_returns(
    make_rig: Callable[..., FaultRig],
    cufile: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """cuFile 1.20 spins in cuFileDriverOpen where /proc/modules is missing. The engine is served by its cpu tier."""
    caplog.set_level(logging.INFO)
    cufile(modules=False)
    short = msgspec.structs.replace(TIMES, start_timeout_s=3.0)
    rig = make_rig("cuFileDriverOpen never returns", "slabs", fields=BACKEND, times=short)

    def down() -> list[str]:
        """One line for each outage."""
        return [record.getMessage() for record in caplog.records if " is down: " in record.getMessage()]

    with rig.under_load(warm=False):
        until(down, "the tier to be down", TIMEOUT_S)
        assert not rig.is_up()
        rig.wait_for_answers(20)
        (line,) = down()
        cufile()
        configures = rig.store.coordinator._link.supervisor._configures
        configures[0] = msgspec.structs.replace(configures[0], times=TIMES)
        os.kill(rig.wait_for_mover(), signal.SIGKILL)  # one that spins already
        rig.fault_ended()
        rig.wait_until_healed()
    assert line.endswith("is down: its mover is killed: it did not start in time")
    assert "opening cuFile" in caplog.text
