"""What the native workers of slabs and of row files have in common: threads in C that move units of rows between the
host region and files, beside the interpreter's lock."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from types import SimpleNamespace
from typing import Any

from nixl_tiers.base import native
from nixl_tiers.base.chunk import NAMESPACE_BYTES, Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.move_queue import Steps

Namespace = ctypes.c_uint8 * NAMESPACE_BYTES


class Shape(ctypes.Structure):
    """As `shape` of csrc/seal.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("row_bytes", "cell_payload", "cell_bytes", "seal_bytes")),
        *((name, ctypes.c_uint32) for name in ("cells", "sub_blocks")),
    )


def functions_of(library: native.Library, name: str, *more: type) -> SimpleNamespace:
    """The functions of a worker's library, `nixl_tiers_<name>_...`. `more`: types of what `new` takes beside shape,
    region, rows and error. Raises NotBuilt."""
    found, pointer, count = native.opened(library), ctypes.c_void_p, ctypes.c_uint32
    types: dict[str, tuple[list[Any], Any]] = {
        "new": ([pointer, pointer, ctypes.c_uint64, *more, pointer], pointer),
        "fd": ([pointer], ctypes.c_int),
        "submit": ([pointer, pointer], ctypes.c_int),
        "take": ([pointer, pointer, pointer, count], count),
        "close": ([pointer], None),
    }
    functions = {each: found[f"nixl_tiers_{name}_{each}"] for each in types}
    for each, function in functions.items():
        function.argtypes, function.restype = types[each]
    return SimpleNamespace(**functions)


class NativeWorker:
    """Belongs to the mover's loop. A unit's rows are not touched any more once its steps have ended; rows of the region
    that were loaded and are not OK may hold anything."""

    def __init__(
        self,
        library: SimpleNamespace,
        what: str,
        result: struct.Struct,
        region: HostRegion,
        geometry: Geometry,
        *more: int,
    ) -> None:
        """`result`: of a row, as C has it; `more`: as the types given to `functions_of`. Raises OSError, which names
        `what` cannot be had."""
        self._library = library
        self._result = result
        shape, error = Shape(*(getattr(geometry, field[0]) for field in Shape._fields_)), ctypes.c_int32()
        self._worker = library.new(ctypes.byref(shape), region.address, region.rows, *more, ctypes.byref(error))
        if not self._worker:
            raise OSError(error.value, f"{what}: {os.strerror(error.value)}")
        self.fd: int = library.fd(self._worker)
        """Readable when `poll` will find something."""
        self._region = region
        self._ids = itertools.count(1)
        self._ended: dict[int, list[tuple[int, ...]]] = {}
        self._results = ctypes.create_string_buffer(0)

    def _run(self, unit: int, order: ctypes.Structure, count: int) -> Steps[list[tuple[int, ...]]]:
        """Wait until all rows of a unit have ended; their results. Raises OSError if nothing could begin."""
        if error := self._library.submit(self._worker, ctypes.byref(order)):
            raise OSError(error, os.strerror(error))
        if len(self._results) < count * self._result.size:
            self._results = ctypes.create_string_buffer(count * self._result.size)
        yield lambda: unit in self._ended
        return self._ended.pop(unit)

    def poll(self) -> None:
        """Note the units that have ended."""
        number, results, size = ctypes.c_uint64(), self._results, self._result.size
        while self._worker and (
            count := self._library.take(self._worker, ctypes.byref(number), results, len(results) // size)
        ):
            self._ended[number.value] = [*self._result.iter_unpack(memoryview(results)[: count * size])]

    def close(self) -> None:
        """Nothing is in flight. May be called twice; `poll` finds nothing then."""
        worker, self._worker = self._worker, None
        if worker:
            self._library.close(worker)
