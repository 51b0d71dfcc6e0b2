"""Disks for tests: measuring and watching disk usage, and file systems of their own where mounting is permitted."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

_SAMPLE_S = 0.001
_TIMEOUT_S = 30.0


def disk_bytes(path: Path) -> int:
    """Allocated blocks of everything at and below `path`, in bytes. What changes meanwhile may count twice, or not: see
    `least_disk_bytes`."""
    return sum(_allocated(path).values())


def least_disk_bytes(path: Path) -> int:
    """What two walks in a row both found, in bytes: all of it was there at the moment between them, so this is never
    more than what was allocated then. One walk alone counts a file that is renamed, or deleted for another one, twice.
    """
    before, after = _allocated(path), _allocated(path)
    return sum(min(blocks, after.get(file, 0)) for file, blocks in before.items())


def _allocated(path: Path) -> dict[tuple[Path, int], int]:
    """Allocated bytes by name and inode."""
    found: dict[tuple[Path, int], int] = {}
    for folder, _, names in os.walk(path):
        for file in (Path(folder), *(Path(folder) / name for name in names)):
            with suppress(FileNotFoundError):
                status = file.lstat()
                found[file, status.st_ino] = status.st_blocks * 512
    return found


def volume_bytes(path: Path) -> int:
    """Bytes in use on the file system at `path`, by one statvfs: exact where nothing else writes to it."""
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@contextmanager
def assert_never_exceeds(
    path: Path, capacity: int, used: Callable[[Path], int] = least_disk_bytes, pause_s: float = _SAMPLE_S
) -> Iterator[list[int]]:
    """Sample the disk usage every millisecond, or so often, inside of it. Yields the samples; asserts at the end that
    none exceeds `capacity`, in bytes."""
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            samples.append(used(path))
            stop.wait(pause_s)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
    assert max(samples) <= capacity, f"{max(samples) - capacity} bytes over capacity"


def run(*command: str | Path) -> bool:
    """Whether a command succeeds."""
    return not subprocess.run(command, check=False, capture_output=True).returncode


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size, mounted at `place`; skips the test where mounting is not permitted."""
    if os.geteuid() or not run("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", place):
        pytest.skip("needs to mount a tmpfs")
    try:
        yield place
    finally:
        run("umount", "-l", place)


class Ext4:
    """An ext4 file system in an image file, mounted."""

    def __init__(self, image: Path, place: Path) -> None:
        self.image = image
        self.place = place

    @property
    def options(self) -> list[str]:
        """The mount options; empty if it is not mounted."""
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        return next((options.split(",") for _, place, _, options, *_ in mounts if place == str(self.place)), [])

    def mount(self) -> bool:
        return run("mount", "-o", "loop,errors=remount-ro", self.image, self.place)

    def unmount(self) -> bool:
        """Lazily, so that it works while files are open there: they stay on the old file system."""
        return run("umount", "-l", self.place)

    def remount(self) -> None:
        """Mount it again, writable: possible only when all files of the old mount are closed."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not (self.mount() and "rw" in self.options and "emergency_ro" not in self.options):
            assert time.monotonic() < deadline, self.options
            self.unmount()
            time.sleep(0.05)

    def make_read_only(self) -> None:
        """Trigger a file system error: the kernel then fails every write, also to files that are open. Skips the test
        where the kernel has no such trigger."""
        device = self.place.stat().st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        try:
            Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")
        except OSError:
            pytest.skip("needs a kernel with trigger_fs_error")
        try:
            (self.place / "canary").touch()
        except OSError:
            return
        pytest.skip("needs a kernel that makes a file system with errors read-only")


@contextmanager
def ext4(folder: Path) -> Iterator[Ext4]:
    """An ext4 of 128 MiB below `folder`; skips the test where one cannot be created and mounted."""
    disk = Ext4(folder / "image", folder / "mounted")
    disk.place.mkdir()
    with disk.image.open("wb") as file:
        file.truncate(128 << 20)
    if os.geteuid() or not shutil.which("mkfs.ext4") or not run("mkfs.ext4", "-q", "-F", disk.image):
        pytest.skip("needs to create a file system")
    if not disk.mount():
        pytest.skip("needs to mount an image")
    try:
        yield disk
    finally:
        while disk.unmount():
            pass


@contextmanager
def hung_mount(place: Path) -> Iterator[Path]:
    """A mount whose server never answers: every call below `place` waits, until its process is killed. Skips the test
    where FUSE cannot be mounted."""
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("needs FUSE")
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    try:
        if ctypes.CDLL(None).mount(b"hung", os.fsencode(place), b"fuse", 0, options):
            pytest.skip("needs to mount FUSE")
        yield place
    finally:
        os.close(server)  # what waits ends with an error
        run("umount", "-l", place)


class RefusingMount(NamedTuple):
    """A folder, where it is seen through FUSE, and the process that serves it."""

    behind: Path
    place: Path
    pid: int = 0


@contextmanager
def refusing_mount(folder: Path, refused: Mapping[str, int]) -> Iterator[RefusingMount]:
    """A mount below `folder` that refuses these things, each with an errno: see fuse_mount.py. Skips the test where
    FUSE cannot be mounted."""
    mount = RefusingMount(folder / "behind", folder / "mounted")
    for made in mount[:2]:
        made.mkdir()
    command = [sys.executable, "-m", "tests.support.fuse_mount", *map(str, mount[:2]), json.dumps(dict(refused))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True) as server:
        assert server.stdout is not None
        try:
            if (said := server.stdout.readline().strip()) != "mounted":
                pytest.skip(f"needs to mount FUSE: {said}")
            yield mount._replace(pid=server.pid)
        finally:
            server.kill()  # what waits ends with an error
            run("umount", "-l", mount.place)
