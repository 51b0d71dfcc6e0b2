"""The native worker of a slab tier: moves, seals and verifies the rows of units on threads of its own, beside the
interpreter's lock (csrc/row_worker.c)."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import struct
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Final

from nixl_tiers.base import native
from nixl_tiers.base.chunk import MAX_KEY_BYTES, NAMESPACE_BYTES, Geometry
from nixl_tiers.config.file import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.move_queue import Steps
from nixl_tiers.tiers.nixl_agent import AgentError, Registrar, Registration
from nixl_tiers.tiers.slab.in_flight import request_bytes
from nixl_tiers.tiers.staging import DirectRows

logger = logging.getLogger(__name__)

CORES_A_THREAD: Final = 4  # the engine needs the others
LEAST_THREADS: Final = 2  # of a worker; each hashes some 10 GB/s
MOST_THREADS: Final = 8  # as MAX_THREADS of csrc/row_worker.h

_ROW: Final = struct.Struct(f"=QQiIIIIBB{MAX_KEY_BYTES}s2x")  # of a unit; numpy is slower for so few
_RESULT: Final = struct.Struct("=Qii")  # sealed at, verdict, errno
Moved = tuple[Verdict | None, int, int]
"""What became of a row: None for an I/O error, OK for a store that went well; when it was sealed, by its seal; and the
error, if any, for which it was not moved or, if it was stored, has no record."""
_VERDICTS: Final[list[Verdict | None]] = [*Verdict, None]  # -1, the last one: NOT_MOVED of csrc/row_worker.h


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("row_bytes", "cell_payload", "cell_bytes", "seal_bytes")),
        *((name, ctypes.c_uint32) for name in ("cells", "sub_blocks")),
    )


_Namespace = ctypes.c_uint8 * NAMESPACE_BYTES


class _Order(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint64),
        ("now", ctypes.c_uint64),
        ("stage", ctypes.c_void_p),
        ("rows", ctypes.c_char_p),
        ("records", ctypes.c_void_p),
        ("namespace", _Namespace),
        ("epoch", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("count", "places", "write")),
    )


class Worker(Registrar):
    """Belongs to the mover's loop. A unit's rows are not touched any more once its steps have ended; rows of the region
    that were loaded and are not OK may hold anything."""

    backend = "native"

    def __init__(self, region: HostRegion, geometry: Geometry, threads: int) -> None:
        """Raises OSError: Linux AIO cannot be had here, or is used up (fs.aio-max-nr)."""
        self._library = library = _library()
        shape = _Shape(*(getattr(geometry, field[0]) for field in _Shape._fields_))
        error = ctypes.c_int32()
        self._worker = library.nixl_tiers_row_worker_new(
            ctypes.byref(shape),
            region.address,
            region.rows,
            request_bytes(geometry.row_bytes),
            threads,
            ctypes.byref(error),
        )
        if not self._worker:
            raise OSError(error.value, f"Linux AIO: {os.strerror(error.value)}")
        self.fd: int = library.nixl_tiers_row_worker_fd(self._worker)
        """Readable when `poll` will find something."""
        self._region = region
        self._ids = itertools.count(1)
        self._ended: dict[int, list[tuple[int, int, int]]] = {}
        self._results = ctypes.create_string_buffer(0)

    def register_dram(self, address: int, nbytes: int) -> Registration:
        return Registration(None, (0,))

    def register_file(self, path: str, nbytes: int, *, direct: bool) -> Registration:
        flags = os.O_RDWR | (os.O_DIRECT if direct else 0) | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            raise AgentError(f"{path} cannot be opened ({error.strerror})") from error
        return Registration(descriptor, (descriptor,))

    def deregister(self, registration: Registration) -> None:
        if registration.descriptors is not None:
            os.close(registration.descriptors)

    def move(
        self,
        moves: Collection[Move],
        rows: DirectRows,
        slots: Sequence[tuple[int, int]],
        sealer: Sealer,
        now_s: float,
        *,
        write: bool,
        records: int | None = None,
    ) -> Steps[Sequence[Moved]]:
        """Move the rows of a unit, and wait until all have ended. `slots`: descriptor and offset of each. `records`:
        where rows that are written are recorded (`JournalFile.writer`). Raises OSError if nothing could begin."""
        count, (stage, stage_rows) = len(moves), rows.stage
        table = b"".join(
            _ROW.pack(
                offset,
                move.tick,
                descriptor,
                move.row,
                place,
                move.slot,
                move.missing,
                move.seal,
                len(move.key),
                move.key,
            )
            for move, (descriptor, offset), place in zip(moves, slots, rows.places or [0] * count, strict=True)
        )
        number = next(self._ids)
        namespace = _Namespace.from_buffer_copy(sealer.namespace)
        order = _Order(number, int(now_s), stage, table, records, namespace, sealer.epoch, count, stage_rows, write)
        if error := self._library.nixl_tiers_row_worker_submit(self._worker, ctypes.byref(order)):
            raise OSError(error, os.strerror(error))
        if len(self._results) < count * _RESULT.size:
            self._results = ctypes.create_string_buffer(count * _RESULT.size)
        yield lambda: number in self._ended
        results = self._ended.pop(number)
        assert len(results) == count
        return [(_VERDICTS[verdict], sealed_at, error) for sealed_at, verdict, error in results]

    def poll(self) -> None:
        """Note the units that have ended."""
        number, results = ctypes.c_uint64(), self._results
        take, most = self._library.nixl_tiers_row_worker_take, len(results) // _RESULT.size
        while self._worker and (count := take(self._worker, ctypes.byref(number), results, most)):
            self._ended[number.value] = [*_RESULT.iter_unpack(memoryview(results)[: count * _RESULT.size])]

    def close(self) -> None:
        """Nothing is in flight. May be called twice; `poll` finds nothing then."""
        worker, self._worker = self._worker, None
        if worker:
            self._library.nixl_tiers_row_worker_close(worker)


def threads_of(workers: int) -> int:
    """How many threads each of so many workers has, which share the cores that this process may use."""
    share = len(os.sched_getaffinity(0)) // (CORES_A_THREAD * workers)
    return max(LEAST_THREADS, min(MOST_THREADS, share))


def open_worker(config: FileConfig, region: HostRegion, geometry: Geometry, movers: int) -> Worker | None:
    """The worker, unless another backend is chosen; None: NIXL moves the rows, as it does where the worker cannot be
    had. `movers`: of the tier, in all engines that share its path."""
    if config.backend != "auto":
        return None
    try:
        return Worker(region, geometry, threads_of(movers))
    except OSError as error:
        logger.warning("rows are moved by NIXL: the native worker cannot start (%s)", error.strerror)
    return None


@cache
def _library() -> ctypes.CDLL:
    found = native.opened(native.ROW_WORKER)
    pointer, whole, count = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    functions: dict[str, tuple[list[Any], Any]] = {
        "new": ([pointer, pointer, whole, whole, count, pointer], pointer),
        "fd": ([pointer], ctypes.c_int),
        "submit": ([pointer, pointer], ctypes.c_int),
        "take": ([pointer, pointer, pointer, count], count),
        "close": ([pointer], None),
    }
    for name, (arguments, result) in functions.items():
        function = found[f"nixl_tiers_row_worker_{name}"]
        function.argtypes, function.restype = arguments, result
        setattr(found, f"nixl_tiers_row_worker_{name}", function)
    return found
