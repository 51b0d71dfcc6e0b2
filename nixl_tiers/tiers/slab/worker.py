"""The native worker of a slab tier: moves, seals and verifies the rows of units on threads of its own, beside the
interpreter's lock (csrc/row_worker.c)."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Collection, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Final

from nixl_tiers.base import native
from nixl_tiers.base.chunk import MAX_KEY_BYTES, Geometry
from nixl_tiers.config.file import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.move_queue import Steps
from nixl_tiers.tiers.native_worker import Namespace, NativeWorker, functions_of
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


class _Order(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint64),
        ("now", ctypes.c_uint64),
        ("stage", ctypes.c_void_p),
        ("rows", ctypes.c_char_p),
        ("records", ctypes.c_void_p),
        ("namespace", Namespace),
        ("epoch", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("count", "places", "write")),
    )


class Worker(NativeWorker, Registrar):
    """Of slabs."""

    backend = "native"

    def __init__(self, region: HostRegion, geometry: Geometry, threads: int) -> None:
        """Raises OSError: Linux AIO cannot be had here, or is used up (fs.aio-max-nr)."""
        request = request_bytes(geometry.row_bytes)
        super().__init__(_library(), "Linux AIO", _RESULT, region, geometry, request, threads)

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
        namespace = Namespace.from_buffer_copy(sealer.namespace)
        order = _Order(number, int(now_s), stage, table, records, namespace, sealer.epoch, count, stage_rows, write)
        results = yield from self._run(number, order, count)
        assert len(results) == count
        return [(_VERDICTS[verdict], sealed_at, error) for sealed_at, verdict, error in results]


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
        logger.warning("rows are moved by NIXL (io_setup: %s): raise fs.aio-max-nr, or permit the call", error.strerror)
    return None


@cache
def _library() -> SimpleNamespace:
    return functions_of(native.ROW_WORKER, "row_worker", ctypes.c_uint64, ctypes.c_uint32)
