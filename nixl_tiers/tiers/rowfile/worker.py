"""The native worker of a tier with row files: threads that store and load rows by calls that may wait for a server,
beside the interpreter's lock (csrc/row_files.c)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import Final, NamedTuple

from nixl_tiers.base import native
from nixl_tiers.base.chunk import MAX_KEY_BYTES, Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.move_queue import Steps
from nixl_tiers.tiers.native_worker import Namespace, NativeWorker, functions_of
from nixl_tiers.tiers.rowfile.names import fanout_of

_THREADS: Final = (4, 16)  # as MAX_THREADS of csrc/row_files.c; each has a buffer of one row, within so many bytes
_BUFFERS_BYTES: Final = 64 << 20

_ROW: Final = struct.Struct(f"=QIIBBB{MAX_KEY_BYTES}s5x")  # of a unit; numpy is slower for so few
_RESULT: Final = struct.Struct("=QQqii")


class Trouble(Enum):
    """Why a row has no verdict, as in csrc/row_files.c."""

    FOUND = "was there before"
    CUT = "is no whole row"
    FOREIGN = "is no file, or belongs to another user, and stays"
    ABSENT = "is not there"
    NOT_MOVED = "could not be moved"


_VERDICTS: Final[list[Verdict | Trouble]] = [*Verdict, *Trouble]  # -1, the last one: NOT_MOVED


class Moved(NamedTuple):
    """What became of a row: OK for a store that went well. `error`: an errno. Of a file that was read: its inode, and
    when it was last used before."""

    verdict: Verdict | Trouble
    error: int = 0
    sealed_at: int = 0
    inode: int = 0
    mtime_ns: int = 0

    @classmethod
    def of(cls, sealed_at: int, inode: int, mtime_ns: int, verdict: int, error: int) -> Moved:
        return cls(_VERDICTS[verdict], error, sealed_at, inode, mtime_ns)


@dataclass(frozen=True)
class Place:
    """Where rows are: the tier's directory, open, and the owner of what is in it; how the names of unfinished files
    begin; whether files are opened with O_DIRECT. When, in Unix seconds: what seals say, or the server's time; a row
    that was last used before `touch_before_s` is touched, unless its age began by `expired_s`. `keep`: a row that is
    there is not stored again."""

    base: int
    uid: int
    prefix: str
    direct: bool
    now_s: float
    touch_before_s: float = 0
    expired_s: float = 0
    keep: bool = False


class _Order(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("id", "now")),
        *((name, ctypes.c_int64) for name in ("touch_before", "expired")),
        ("rows", ctypes.c_char_p),
        ("namespace", Namespace),
        ("epoch", ctypes.c_uint64),
        ("base", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("uid", "count", "write", "direct", "keep")),
        ("prefix", ctypes.c_char * 88),
    )


class Worker(NativeWorker):
    """Of row files."""

    def __init__(self, region: HostRegion, geometry: Geometry, *, in_memory: bool = False) -> None:
        """`in_memory`: nothing waits for a medium, so there are as many threads as processors: more would only take
        turns. Raises OSError: no threads or no memory."""
        least, most = _THREADS
        threads = max(least, min(most, _BUFFERS_BYTES // geometry.row_bytes))
        if in_memory:
            threads = min(threads, len(os.sched_getaffinity(0)))
        super().__init__(_library(), "threads for row files", _RESULT, region, geometry, threads)

    def move(
        self, moves: Sequence[Move], numbers: Sequence[int], place: Place, sealer: Sealer, *, write: bool
    ) -> Steps[Sequence[Moved]]:
        """Store or load the rows of a unit, and wait until all have ended. `numbers`: of the unfinished file of each.
        Raises OSError if nothing could begin."""
        count = len(moves)
        table = b"".join(
            _ROW.pack(number, m.row, m.missing, m.seal, int(fanout_of(m.key), 16), len(m.key), m.key)
            for m, number in zip(moves, numbers, strict=True)
        )
        unit = next(self._ids)
        order = _Order(
            unit,
            int(place.now_s),
            int(place.touch_before_s),
            int(place.expired_s),
            table,
            Namespace.from_buffer_copy(sealer.namespace),
            sealer.epoch,
            place.base,
            place.uid,
            count,
            write,
            place.direct,
            place.keep,
            place.prefix.encode(),
        )
        moved = yield from self._run(unit, order, count)
        return [Moved.of(*row) for row in moved]


@cache
def _library() -> SimpleNamespace:
    return functions_of(native.ROW_FILES, "row_files", ctypes.c_uint32)
