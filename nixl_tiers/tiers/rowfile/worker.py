"""The native worker of a tier with row files: threads that store and load rows by calls that may wait for a server,
beside the interpreter's lock (csrc/row_files.c)."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, NamedTuple

from nixl_tiers.base import native
from nixl_tiers.base.chunk import MAX_KEY_BYTES, NAMESPACE_BYTES, Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.move_queue import Steps
from nixl_tiers.tiers.rowfile.names import fanout_of

_THREADS: Final = (4, 16)  # as MAX_THREADS of csrc/row_files.c; each has a buffer of one row, within so many bytes
_BUFFERS_BYTES: Final = 64 << 20

_ROW: Final = struct.Struct(f"=QIIBBB{MAX_KEY_BYTES}s5x")  # of a unit; numpy is slower for so few
_RESULT: Final = struct.Struct("=QQqii")


class Trouble(Enum):
    """Why a row has no verdict, as in csrc/row_files.c."""

    FOUND = "was there before"
    CUT = "is no whole row"
    FOREIGN = "is no file, or belongs to another user"
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


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("row_bytes", "cell_payload", "cell_bytes", "seal_bytes")),
        *((name, ctypes.c_uint32) for name in ("cells", "sub_blocks")),
    )


_Namespace = ctypes.c_uint8 * NAMESPACE_BYTES


class _Order(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("id", "now")),
        *((name, ctypes.c_int64) for name in ("touch_before", "expired")),
        ("rows", ctypes.c_char_p),
        ("namespace", _Namespace),
        ("epoch", ctypes.c_uint64),
        ("base", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("uid", "count", "write", "direct", "keep")),
        ("prefix", ctypes.c_char * 88),
    )


class Worker:
    """Belongs to the mover's loop. A unit's rows are not touched any more once its steps have ended; rows of the region
    that were loaded and are not OK may hold anything."""

    def __init__(self, region: HostRegion, geometry: Geometry) -> None:
        """Raises OSError: no threads or no memory."""
        self._library = library = _library()
        shape = _Shape(
            geometry.row_bytes,
            geometry.cell_payload,
            geometry.cell_bytes,
            geometry.seal_bytes,
            geometry.cells,
            geometry.sub_blocks,
        )
        least, most = _THREADS
        threads, error = max(least, min(most, _BUFFERS_BYTES // geometry.row_bytes)), ctypes.c_int32()
        self._worker = library.nixl_tiers_row_files_new(
            ctypes.byref(shape), region.address, region.rows, threads, ctypes.byref(error)
        )
        if not self._worker:
            raise OSError(error.value, f"threads for row files: {os.strerror(error.value)}")
        self.fd: int = library.nixl_tiers_row_files_fd(self._worker)
        """Readable when `poll` will find something."""
        self._region = region
        self._ids = itertools.count(1)
        self._ended: dict[int, list[Moved]] = {}
        self._results = ctypes.create_string_buffer(0)

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
            _Namespace.from_buffer_copy(sealer.namespace),
            sealer.epoch,
            place.base,
            place.uid,
            count,
            write,
            place.direct,
            place.keep,
            place.prefix.encode(),
        )
        if error := self._library.nixl_tiers_row_files_submit(self._worker, ctypes.byref(order)):
            raise OSError(error, os.strerror(error))
        if len(self._results) < count * _RESULT.size:
            self._results = ctypes.create_string_buffer(count * _RESULT.size)
        yield lambda: unit in self._ended
        return self._ended.pop(unit)

    def poll(self) -> None:
        """Note the units that have ended."""
        number, results = ctypes.c_uint64(), self._results
        take, most = self._library.nixl_tiers_row_files_take, len(results) // _RESULT.size
        while self._worker and (count := take(self._worker, ctypes.byref(number), results, most)):
            rows = _RESULT.iter_unpack(memoryview(results)[: count * _RESULT.size])
            self._ended[number.value] = [Moved.of(*row) for row in rows]

    def close(self) -> None:
        """Nothing is in flight. May be called twice; `poll` finds nothing then."""
        worker, self._worker = self._worker, None
        if worker:
            self._library.nixl_tiers_row_files_close(worker)


@cache
def _library() -> ctypes.CDLL:
    found = native.opened(native.ROW_FILES)
    pointer, whole, count = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    functions: dict[str, tuple[list[Any], Any]] = {
        "new": ([pointer, pointer, whole, count, pointer], pointer),
        "fd": ([pointer], ctypes.c_int),
        "submit": ([pointer, pointer], ctypes.c_int),
        "take": ([pointer, pointer, pointer, count], count),
        "close": ([pointer], None),
    }
    for name, (arguments, result) in functions.items():
        function = found[f"nixl_tiers_row_files_{name}"]
        function.argtypes, function.restype = arguments, result
        setattr(found, f"nixl_tiers_row_files_{name}", function)
    return found
