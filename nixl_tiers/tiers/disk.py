"""What both layouts of the file tier ask of a disk: its directory and mount, health checks, allocation, O_DIRECT.

Files may be deleted or replaced, and a disk unmounted, under a running mover. An open file outlives its name: without
a check the tier would go on writing bytes that no restart finds and no quota counts, or beside another mover that has
created the same files again.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import FULL, PAGE, align
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.mounts import is_mount, make_private, not_mounted
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.config.fields import format_size, min_free_bytes
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import StorageTier, TierDown, TierRefused
from nixl_tiers.tiers.folder import Folder, fd_path
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registrar, Registration

SLAB_LOCK: Final = ".ledger"
INCOMING: Final = ".incoming"
"""The lock file of `layout: slabs` and the directory of unfinished files of `layout: files`, in the tier's path. Either
shows which layout the path has. The names are part of the formats on disk."""

PROBE: Final = re.compile(r"probe-[0-9a-f]{16}\.tmp")
"""The name of a file that is made for a moment, to learn what the file system can do."""

FULL_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT)
"""No other error means that there is no room."""
MEASURE_S: Final = 1.0  # between two looks at a file system's room
_PERMANENT: Final = (errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG)
_libc = ctypes.CDLL(None, use_errno=True)

logger = logging.getLogger(__name__)


# --- opening a tier's path ----------------------------------------------------------------------------------------


def open_agent(config: FileConfig, region: HostRegion) -> tuple[Agent, Registration | None]:
    """An agent with the configured backend, and the region registered with it, but for cuFile (`staging.py`). Raises
    TierRefused."""
    try:
        if config.backend == "gds_mt":
            logger.info("opening cuFile")  # the last line of a mover that hangs there
            return Agent.gds_mt(), None
        agent = Agent.posix()
        return agent, agent.register_region(region)
    except AgentError as error:
        raise TierRefused(f"backend: {error}") from error


def prepare_path(config: FileConfig, mount: MountGuard, log_once: LogOnce) -> None:
    """Make the tier's directory if it is missing (not for a reader, nor without the mount that it belongs on), and
    check that it has the configured layout. Raises TierDown, TierRefused, OSError."""
    if problem := mount.problem() or (not_mounted(config.path) if config.require_mount else ""):
        raise TierDown(problem)
    if config.write == "off":
        if not config.path.exists():
            raise TierDown(f"{config.path} does not exist yet, and this engine only reads there")
    else:
        if config.require_mount:
            make_private(config.path)
        else:  # parents may belong on a mount that is missing
            config.path.mkdir(mode=0o700, exist_ok=True)
        if problem := _exceeds_file_system(config):
            log_once.report("capacity", problem)
    if problem := other_layout(config):
        raise TierRefused(f"path: {problem}")


def other_layout(config: FileConfig) -> str:
    """Why the path cannot have the layout that is configured, as a sentence, or ""."""
    if config.layout == "slabs" and os.path.lexists(config.path / INCOMING):
        return f'{config.path} holds rows as files, and a directory has one layout: "files" or "slabs"'
    if config.layout == "files" and os.path.lexists(config.path / SLAB_LOCK):
        return f'{config.path} holds slabs, and a directory has one layout: "slabs" or "files"'
    return ""


def open_error(error: OSError) -> TierDown | TierRefused:
    """What to raise when a tier's directory cannot be opened: TierRefused for an error that retrying does not fix."""
    if isinstance(error, TierRefused):
        return error
    return TierRefused(f"path: {describe(error)}") if error.errno in _PERMANENT else TierDown(describe(error))


def _exceeds_file_system(config: FileConfig) -> str:
    """A sentence if the tier's capacity is more than the whole file system, or "". Raises OSError."""
    status = os.statvfs(config.path)
    size = status.f_blocks * status.f_frsize
    if not size or config.capacity <= size:  # some network file systems report no size
        return ""
    capacity = format_size(config.capacity)
    return f"capacity: {capacity} is more than the file system at {config.path} has ({format_size(size)})"


def describe(error: OSError) -> str:
    """One sentence."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


# --- health of what is open ---------------------------------------------------------------------------------------


class HealthMonitor:
    """Calls `check` every `interval_s` on its own thread, which may wait for the medium; the mover's loop may not.

    `check` returns a problem as one sentence, or "". An OSError that it raises is a problem too.
    """

    def __init__(self, check: Callable[[], str], interval_s: float = PRODUCTION.disk_check_s) -> None:
        self._check = check
        self._interval_s = interval_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="health")
        self._running: Future[str] | None = None
        self._next_s = time.monotonic() + interval_s
        self.problem = ""

    def check_soon(self) -> None:
        """A transfer or a call has failed: check at the next poll."""
        self._next_s = 0.0

    def poll(self) -> str:
        """The first problem that was found, or ""; once there is one it stays."""
        if self._running is not None and self._running.done():
            try:
                self.problem = self.problem or self._running.result()
            except OSError as error:
                self.problem = describe(error)
            self._running = None
        if self._running is None and not self.problem and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._interval_s
            self._running = self._thread.submit(self._check)
        return self.problem

    def close(self) -> None:
        """Stop checking. Does not wait for a check that is running."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class FileIdentity:
    """Device and inode of a file or directory when it was opened, to tell whether its path still leads to it."""

    def __init__(self, path: Path, status: os.stat_result | None = None) -> None:
        """`status`: of the open descriptor, if the path may lead to another file by now. Raises OSError."""
        self.path = path
        status = status or path.stat()
        self._identity = status.st_dev, status.st_ino

    def problem(self, min_bytes: int = 0) -> str:
        """Whether it was deleted, replaced or cut below `min_bytes`, as a sentence, or "". Raises OSError if it cannot
        be reached."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return f"{self.path} has been deleted"
        if (status.st_dev, status.st_ino) != self._identity:
            return f"{self.path} has been replaced"
        return f"{self.path} has been cut short" if status.st_size < min_bytes else ""


class MountGuard:
    """Keeps a tier on the mount point that its path was on when this engine last opened it."""

    def __init__(self, tier: StorageTier) -> None:
        self._tier = tier

    def remember(self, path: Path) -> None:
        """The path has been opened. Raises TierDown if the mount has gone meanwhile."""
        real = path.resolve()  # a symbolic link is no mount point, and its parents are not those of its target
        found = next(parent for parent in (real, *real.parents) if is_mount(parent))
        if problem := self.problem():
            raise TierDown(problem)
        self._tier.mount_point = os.fsencode(found)  # another one if a disk was mounted since, or a link leads there

    def problem(self) -> str:
        """A sentence if the mount has gone, or "". May wait for the medium."""
        mount_point = os.fsdecode(self._tier.mount_point)
        return f"{mount_point} is not mounted any more" if mount_point and not is_mount(Path(mount_point)) else ""


class FreeSpace:
    """What may still be taken of a file system, so that `min_free` stays free. Belongs on a thread that may wait."""

    def __init__(self, path: Path, min_free: int | str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`min_free`: as configured. `clock`: seconds."""
        self._path = path
        self._min_free = min_free
        self._clock = clock
        self._measured_at_s = -math.inf
        self.spare_bytes: float = 0
        """How much more may be taken, by the last call of `lacks`; negative: less than `min_free` is free."""
        self._least_bytes = 0
        self.problem = ""
        """The last answer of `lacks`."""

    def lacks(self, nbytes: int) -> str:
        """One sentence if `nbytes` more would leave less than `min_free`; else "", and they count as taken. The file
        system is asked at most once a second, and after `measure_again`. Raises OSError."""
        if self._clock() - self._measured_at_s >= MEASURE_S:
            self._measure()
        self.problem = ""
        if nbytes > 0 and self.spare_bytes < nbytes:
            least = format_size(self._least_bytes)
            self.problem = f"{self._path} is full: min_free keeps {least} of its file system free"
        else:
            self.spare_bytes -= nbytes
        return self.problem

    @property
    def denials(self) -> Mapping[str, str]:
        """For `StorageTier.denials`."""
        return {FULL: f"{self.problem}, so rows are evicted: make room, or lower min_free"} if self.problem else {}

    def measure_again(self) -> None:
        """Files were deleted: ask the file system anew at the next call."""
        self._measured_at_s = -math.inf

    def _measure(self) -> None:
        status = os.statvfs(self._path)
        size = status.f_blocks * status.f_frsize
        self._measured_at_s = self._clock()
        self._least_bytes = min_free_bytes(self._min_free, size)
        # Some network file systems report no size.
        counts = size > 0 and self._least_bytes > 0
        self.spare_bytes = status.f_bavail * status.f_frsize - self._least_bytes if counts else math.inf


# --- allocation and direct I/O ------------------------------------------------------------------------------------


def fallocate(descriptor: int, offset: int, nbytes: int, mode: int = 0) -> int:
    """fallocate(2) itself, without libc's emulation, which writes zeroes. Returns 0, or the errno."""
    if nbytes <= 0:
        return 0
    while True:
        if _libc.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) == 0:
            return 0
        if (error := ctypes.get_errno()) != errno.EINTR:
            return error


def extend(descriptor: int, begin: int, end: int, path: Path) -> bool:
    """Make a file of `begin` bytes longer, and allocate that; False: that cannot be done ahead here, and it has a hole
    there. Raises OSError."""
    if failed := fallocate(descriptor, begin, end - begin):
        # A failed call may have allocated a part, which would be used space without a row.
        os.ftruncate(descriptor, end if failed == errno.EOPNOTSUPP else begin)
        if failed != errno.EOPNOTSUPP:
            raise OSError(failed, os.strerror(failed), str(path))
    return not failed


def check_registration(agent: Registrar, folder: Folder) -> None:
    """cuFile looks at the file system and the disk of each file that it is given (without a udev record of the disk it
    takes none), and NIXL passes on no reason. Raises TierDown, before any row fails, and OSError."""
    if agent.backend != "GDS_MT":
        return
    name = probe_name()
    descriptor = folder.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        agent.deregister(agent.register_file(fd_path(descriptor), PAGE, direct=False))
    except AgentError as error:
        raise TierDown(f"cuFile takes no file in {folder.path}, and its log says why ({error})") from error
    finally:
        os.close(descriptor)
        with suppress(OSError):
            folder.unlink(name)


def probe_name() -> str:
    """Matches PROBE; no other process uses it."""
    return f"probe-{secrets.token_hex(8)}.tmp"


def read_past_cache(folder: Folder, name: str, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """These bytes of a file, fewer where it ends. Past the page cache where that is possible: an engine writes past it,
    too, and the cache is better used for something else. Raises OSError."""
    try:
        return _read(folder, name, offset, nbytes, os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return _read(folder, name, offset, nbytes, 0)


def _read(folder: Folder, name: str, offset: int, nbytes: int, flags: int) -> NDArray[np.uint8]:
    with folder.opened(name, os.O_RDONLY | flags) as descriptor, mmap.mmap(-1, align(nbytes)) as memory:
        count, got = 0, PAGE
        while got and count < nbytes and count % PAGE == 0:
            with memoryview(memory) as view, view[count:] as rest:
                got = os.preadv(descriptor, [rest], offset + count)
            count += got
        return np.frombuffer(memory[: min(count, nbytes)], np.uint8)


def try_out(folder: Folder, *, direct: bool, in_place: bool) -> None:
    """Do with one small file all that a layout does with its own, since a mount that is no disk may take some of it and
    keep nothing: create, allocate, write, `in_place` in the middle too, rename, read back, delete. A full disk must
    still serve its rows, and is not tried further. Raises TierDown."""
    name, new, doing = probe_name(), probe_name(), "created"
    flags = os.O_DIRECT if direct else 0
    try:
        with mmap.mmap(-1, 3 * PAGE) as pages:
            with folder.opened(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags) as descriptor:
                doing = "allocated"
                failed = fallocate(descriptor, 0, len(pages))
                if failed and failed != errno.EOPNOTSUPP:
                    raise OSError(failed, os.strerror(failed))
                doing = "written"
                pages[:] = bytes([1]) * len(pages)
                _write(descriptor, pages, 0)
                if in_place:
                    doing = "written in the middle"
                    pages[PAGE : 2 * PAGE] = bytes([2]) * PAGE
                    with memoryview(pages) as view, view[PAGE : 2 * PAGE] as page:
                        _write(descriptor, page, PAGE)
            doing = "renamed"
            folder.rename(name, folder, new)
            doing = "read back"
            if bytes(_read(folder, new, 0, len(pages), flags)) != pages[:]:
                raise OSError(errno.EIO, "it holds something else")
            doing = "deleted"
            folder.unlink(new)
    except OSError as error:
        if error.errno not in FULL_ERRORS:
            why = error.strerror or str(error)
            raise TierDown(
                f"{folder.path} is on a mount that does not work as a disk: no file can be {doing} ({why})"
            ) from error
    finally:
        for left in (name, new):
            with suppress(OSError):
                folder.unlink(left)


def _write(descriptor: int, data: mmap.mmap | memoryview, offset: int) -> None:
    if os.pwritev(descriptor, [data], offset) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # only a full disk cuts a write short


def direct_works(folder: Folder) -> bool:
    """Whether one page can be written and read with O_DIRECT: some file systems accept the flag and then refuse every
    transfer. Raises OSError."""
    name = probe_name()
    with mmap.mmap(-1, PAGE) as page:
        try:
            descriptor = folder.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return False
        finally:
            with suppress(OSError):  # some create the file and then refuse the flag
                folder.unlink(name)
        try:
            return os.pwritev(descriptor, [page], 0) == PAGE and os.preadv(descriptor, [page], 0) == PAGE
        except OSError as error:
            return error.errno in FULL_ERRORS  # inconclusive, and a full disk must still serve its rows
        finally:
            os.close(descriptor)
