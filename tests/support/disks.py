"""Disks for tests: measuring and watching disk usage, and file systems of their own where mounting is permitted."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_SAMPLE_S = 0.001


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
