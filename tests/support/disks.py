"""Disks for tests: what is taken on them, looked at all the time, and file systems of their own where one may mount."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_LOOK_S = 0.001
_PATIENCE_S = 30.0


def disk_bytes(path: Path) -> int:
    """Everything at and below `path`, as the disk counts it. A file that is renamed meanwhile may count twice."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            with suppress(FileNotFoundError):
                total += (Path(folder) / name).lstat().st_blocks * 512
    return total


def volume_bytes(path: Path) -> int:
    """What is taken of the file system at `path`, in one question: for one that nobody else writes to."""
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@contextmanager
def sampled(path: Path, capacity: int, taken: Callable[[Path], int] = disk_bytes) -> Iterator[list[int]]:
    """Look at the disk all the time; at the end, no look may have found more than the capacity."""
    looks: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            looks.append(taken(path))
            over.wait(_LOOK_S)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()
    assert max(looks) <= capacity, f"{max(looks) - capacity} bytes too many"


def run(*command: str | Path) -> bool:
    """Whether a command ends well."""
    return not subprocess.run(command, check=False, capture_output=True).returncode


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path]:
    """A file system of that size in memory, mounted at `place`; skips the test where that is not permitted."""
    if os.geteuid() or not run("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", place):
        pytest.skip("needs to mount a tmpfs")
    try:
        yield place
    finally:
        run("umount", "-l", place)


class Ext4:
    """A file system in an image, mounted."""

    def __init__(self, image: Path, place: Path) -> None:
        self.image = image
        self.place = place

    @property
    def options(self) -> list[str]:
        """Of the mount; none if there is none."""
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        return next((options.split(",") for _, place, _, options, *_ in mounts if place == str(self.place)), [])

    def mount(self) -> bool:
        return run("mount", "-o", "loop,errors=remount-ro", self.image, self.place)

    def unmount(self) -> bool:
        """Although files are open there: who holds them keeps the old file system."""
        return run("umount", "-l", self.place)

    def mount_anew(self) -> None:
        """As it is at rest: not before the last one has closed what it held open of the old one."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (self.mount() and "rw" in self.options and "emergency_ro" not in self.options):
            assert time.monotonic() < deadline, self.options
            self.unmount()
            time.sleep(0.05)

    def becomes_read_only(self) -> None:
        """Have the kernel find an error in it: then it lets nobody write any more, also not to files that are open.
        Skips the test where a kernel cannot be asked for that."""
        device = self.place.stat().st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        try:
            Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")
        except OSError:
            pytest.skip("needs a kernel that can be told to find an error")
        try:
            (self.place / "canary").touch()
        except OSError:
            return
        pytest.skip("needs a kernel that stops writing to a file system with errors")


@contextmanager
def ext4(folder: Path) -> Iterator[Ext4]:
    """A real file system of 128 MiB below `folder`; skips the test where one cannot be made and mounted."""
    disk = Ext4(folder / "image", folder / "mounted")
    disk.place.mkdir()
    with disk.image.open("wb") as file:
        file.truncate(128 << 20)
    if os.geteuid() or not shutil.which("mkfs.ext4") or not run("mkfs.ext4", "-q", "-F", disk.image):
        pytest.skip("needs to make a file system")
    if not disk.mount():
        pytest.skip("needs to mount an image")
    try:
        yield disk
    finally:
        while disk.unmount():
            pass
