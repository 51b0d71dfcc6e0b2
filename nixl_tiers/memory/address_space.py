"""Tells when the memory of another process is gone, for until then the kernel may write to what it has mapped.

Linux waits for a process's asynchronous I/O (AIO) when the last user lets go of its address space, and unmaps it then.
As a rule that is before the process can be reaped. But who reads its memory or its page tables at that moment is a user
too (a monitor that reads /proc/PID/smaps_rollup, a debugger): then it is reaped first, and I/O under way still lands.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from nixl_tiers.base.chunk import PAGE
from nixl_tiers.memory.memfd import memfd


class AddressSpace:
    """That of a child process, which must have it `marked` before it maps anything else. `fd`: to be passed to it."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.fd = memfd("nixl_tiers-mover")
        os.ftruncate(self.fd, PAGE)

    def is_gone(self) -> bool:
        """Whether nothing is mapped there any more, or was not yet: ask once the process has exited. Then it stays so:
        what is sealed cannot be mapped to be written to."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    def close(self) -> None:
        os.close(self.fd)


def marked(fd: int) -> mmap.mmap:
    """In the child process: mark its address space by the descriptor, which is closed. To be kept until it ends."""
    mapping = mmap.mmap(fd, PAGE)
    mapping.madvise(mmap.MADV_DONTFORK)  # what it forks has another one
    os.close(fd)
    return mapping
