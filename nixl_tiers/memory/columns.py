"""Columns: many rows that a medium lists, as slots, ticks and keys side by side in a memfd that a mover hands over.

One by one, five million rows would cost the engine's interpreter most of a minute; from columns the core takes them by
the thousand (`core/rows.py`). A mover is not trusted: size and bytes are sealed, so that nothing changes while it
is read, and the size is what the header says. The rows may be anything: what is loaded is verified by its seal.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from typing import TYPE_CHECKING, Final, Self

from xxhash import xxh3_64_intdigest

from nixl_tiers.memory.memfd import CHECK, SIZE_SEALS, header_of, memfd

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_ROWS: Final = 1 << 20  # of one memfd
MOST_WIDTH: Final = 256
_MAGIC: Final = b"nixlcols"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sQQQ")  # magic, version, rows, width
_SLOTS_AT: Final = 64
_SEALS: Final = SIZE_SEALS | fcntl.F_SEAL_WRITE


class ColumnsError(RuntimeError):
    """The descriptor holds no columns. One sentence that says why."""


class ListedColumns:
    """`count` rows: uint32 slots, uint64 ticks, and records of `width` bytes: a byte of length, the key, padding."""

    def __init__(self, memory: mmap.mmap, count: int, width: int) -> None:
        """Not for callers: use `attach`."""
        self.count = count
        self.width = width
        self._memory = memory
        whole = memoryview(memory)
        ticks_at, records_at, end = _places(count, width)
        self.slots = whole[_SLOTS_AT : _SLOTS_AT + 4 * count]
        self.ticks = whole[ticks_at : ticks_at + 8 * count]
        self.records = whole[records_at:end]
        self._views = [self.slots, self.ticks, self.records, whole]

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map the columns behind `fd`, and close `fd`. ColumnsError unless it is a sealed memfd of the right size."""
        try:
            _, _, count, width = header_of(fd, _HEADER, _MAGIC, _VERSION, "listing")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ColumnsError(f"the bytes of the listing behind descriptor {fd} are not sealed")
            size = os.fstat(fd).st_size
            if count > MOST_ROWS or not 2 <= width <= MOST_WIDTH or size != _places(count, width)[2]:
                raise ColumnsError(
                    f"the listing behind descriptor {fd} has {size} bytes, which is not what its header says"
                )
            # Private: before Linux 6.7 nobody may map what is sealed against writes and share it, even to read.
            return cls(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ), count, width)
        except OSError as error:
            raise ColumnsError(f"cannot map the listing behind descriptor {fd}: {error.strerror}") from error
        except ValueError as error:
            raise ColumnsError(str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)

    def close(self) -> None:
        """Release the memory. May be called again."""
        for view in self._views:
            view.release()
        self._memory.close()


def write(slots: NDArray[np.uint32], ticks: NDArray[np.uint64], records: NDArray[np.uint8]) -> int:
    """A new memfd with these columns, (n,), (n,) and (n, width), for another process to `attach`: its descriptor, which
    the caller closes. OSError if there is no memory."""
    count, width = records.shape
    header = _HEADER.pack(_MAGIC, _VERSION, count, width)
    ticks_at, records_at, end = _places(count, width)
    fd = memfd("nixl_tiers_listing")
    try:
        os.ftruncate(fd, end)
        parts = ((0, header + CHECK.pack(xxh3_64_intdigest(header))), (_SLOTS_AT, slots.tobytes()))
        for at, part in (*parts, (ticks_at, ticks.tobytes()), (records_at, records.tobytes())):
            _write_all(fd, part, at)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_all(fd: int, part: bytes, at: int) -> None:
    view = memoryview(part)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _places(count: int, width: int) -> tuple[int, int, int]:
    """Where the ticks begin, where the records begin, and the size."""
    ticks_at = _SLOTS_AT + (4 * count + 7) // 8 * 8
    records_at = ticks_at + 8 * count
    return ticks_at, records_at, max(records_at + width * count, _SLOTS_AT)
