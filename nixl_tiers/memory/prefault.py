"""Prefaulting: allocate a mapping's pages ahead of use, on separate threads.

One page fault for each page runs at a fraction of memory speed, and the first requests that are offloaded would pay it.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from nixl_tiers.base.chunk import PAGE

_libc: Final = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_CHUNK_BYTES: Final = 32 << 20  # how much a thread asks for at once, which bounds how long a stop takes
_ALLOCATED_POLL_S: Final = 0.2
_PAUSE_S: Final = 0.004  # after each chunk of pages that are only mapped, which takes 2 ms

_log = logging.getLogger(__name__)


def populate(memory: mmap.mmap, start: int, size: int) -> int:
    """Allocate the pages of a part of a mapping, whatever their contents; returns 0 or an errno: EINVAL on kernels
    before 5.14. Releases the GIL."""
    first = ctypes.c_char.from_buffer(memory)
    try:
        return _madvise(ctypes.addressof(first) + start, size)
    finally:
        del first  # a buffer that is exported cannot be unmapped


def _madvise(address: int, size: int) -> int:
    if not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
        return 0
    return ctypes.get_errno()


class Prefault:
    """Populates [address, address + nbytes), never changing a byte: others may use the memory meanwhile.

    In order from `begin` on, and then from the start to there. So processes that share the memory and begin at
    different places allocate its pages in parallel; what others have allocated by then only has to be mapped, which is
    fast. None waits for another one, which may have died.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        threads: int,
        at_end: Callable[[bool], None] | None = None,
        begin: int = 0,
        *,
        allocated: Callable[[], bool | None] | None = None,
    ) -> None:
        """`at_end` is called by the last thread when all is populated (True), or by one that fails (False). `begin`: a
        byte offset. `allocated`: whether others, who allocate the pages, have, None if they could not; wait for that,
        and then leave pauses: to map pages is no hurry."""
        self._at_end = at_end
        self._allocated = allocated
        self._address = address
        self._nbytes = nbytes
        self._chunks = -(-nbytes // _CHUNK_BYTES)
        self._first = begin // _CHUNK_BYTES
        self._next = itertools.count()
        self._stopping = threading.Event()
        self._count = threading.Lock()
        self._populated_bytes = 0
        workers = max(1, min(threads, len(os.sched_getaffinity(0)), self._chunks))
        self._threads = [
            threading.Thread(target=self._work, name=f"nixl_tiers prefault {n}", daemon=True) for n in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def populated_bytes(self) -> int:
        """How much is populated; the whole size at the end."""
        return self._populated_bytes

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all threads have ended; False after `timeout_s`, which holds for each thread."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """End early. When this returns, no thread touches the memory any more."""
        self._stopping.set()
        self.wait()

    def _work(self) -> None:
        if self._allocated is not None and not self._wait_until_allocated(self._allocated):
            return
        while not self._stopping.is_set():
            number = next(self._next)
            if number >= self._chunks:
                return
            start = (self._first + number) % self._chunks * _CHUNK_BYTES
            size = min(_CHUNK_BYTES, self._nbytes - start)
            error = self._populate_part(self._address + start, size)
            if error:
                _log.warning("prefaulting ends at %d bytes: %s; pages are allocated on use", start, os.strerror(error))
                self._stopping.set()
                if self._at_end is not None:
                    self._at_end(False)
                return
            with self._count:
                self._populated_bytes += size
                all_populated = self._populated_bytes == self._nbytes
            if all_populated and self._at_end is not None:
                self._at_end(True)
            if self._allocated is not None:
                self._stopping.wait(_PAUSE_S)

    def _wait_until_allocated(self, allocated: Callable[[], bool | None]) -> bool:
        while not (known := allocated()):
            if known is None:
                _log.info(
                    "the host region's pages were not all allocated ahead of use: they are mapped at their first use"
                )
                return False
            if self._stopping.wait(_ALLOCATED_POLL_S):
                return False
        return True

    def _populate_part(self, address: int, size: int) -> int:
        """On any kernel; returns 0 or an errno."""
        error = _madvise(address, size)
        if error != errno.EINVAL:
            return error
        # An older kernel. Reading is enough to make a shared mapping's page exist, and cannot undo what others write.
        np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))[::PAGE].max()
        return 0
