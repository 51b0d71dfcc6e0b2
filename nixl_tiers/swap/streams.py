"""Loads whose rows are copied as they arrive, by a native thread (csrc/streams.c): it looks at the rows' words and at
the streams' limits in the region, and is given the function that copies on this device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base import native
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.step import ABI, Pairs

RUN_BYTES: Final = 16 << 20  # copied by one call at most: so long a cancelled stream may take to end
STOP_S: Final = 2
_COMING: Final = 1

_P, _U64, _F64, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double, ctypes.c_int


class _Stream(ctypes.Structure):
    _fields_ = (
        ("next", _P), ("rows", ctypes.c_char_p), ("pairs", _P), ("places", _P),
        ("n_places", _U64), ("n_pairs", _U64), ("skipped", _U64), ("slot", _U64), ("number", _U64),
        ("deadline_s", _F64), ("copy", _P), ("context", _P),
        ("cancelled", _INT), ("ended", _INT), ("failed", _INT), ("gap", _U64), ("copied", _U64), ("copy_s", _F64),
    )  # fmt: skip


@cache
def _library() -> ctypes.CDLL | None:
    return _open(native.location("nixl_tiers.swap._swap_cpu"))


def _open(path: str | None) -> ctypes.CDLL | None:
    library = native.opened(path, "nixl_tiers_swap_abi", ABI)
    if library is not None:
        library.nixl_tiers_streams_size.restype = ctypes.c_size_t
        assert library.nixl_tiers_streams_size() == ctypes.sizeof(_Stream)
        library.nixl_tiers_streams_open.restype = _P
        library.nixl_tiers_streams_open.argtypes = [_P, _P, _P, _U64, _U64]
        for call, arguments in (("put", [_P, _P]), ("cancel", [_P, _P]), ("wait", [_P, _P])):
            function = getattr(library, f"nixl_tiers_streams_{call}")
            function.argtypes, function.restype = arguments, None
        library.nixl_tiers_streams_ended.argtypes = [_P]
        library.nixl_tiers_streams_close.argtypes = [_P, ctypes.c_uint]
    return library


def built() -> bool:
    return _library() is not None


class LoadCall(NamedTuple):
    """A C function that copies pairs from rows to blocks, `copy_fn` of streams.c, and what it is given first.
    `release`: to be called when the stream has ended, unless it has failed."""

    function: int
    context: int
    memory: object  # keeps them
    release: Callable[[], None] = lambda: None


class Ended(NamedTuple):
    """`gap`: the first place of the rows that was not copied. `pairs`: how many were. `copy_s`: what the copies took,
    which is not how long the stream was open. `failed`: whether one of them has failed."""

    gap: int
    pairs: int
    copy_s: float
    failed: bool


class Stream:
    """A load that began."""

    def __init__(self, raw: _Stream, call: LoadCall, memory: object) -> None:
        """Not for callers: use Streams.begin."""
        self.raw = raw
        self.call = call
        self._memory = memory


class Streams:
    """The streams of one rank, and their thread, which starts with the first. For one thread; `close` it before the
    region (`words`, `limits`, `bell`), the rows or the blocks are unmapped."""

    def __init__(
        self, plan: CopyPlan, words: NDArray[np.uint32], limits: NDArray[np.uint64], bell: NDArray[np.uint32]
    ) -> None:
        """Raises RuntimeError where C was not built."""
        library = _library()
        if library is None:
            raise RuntimeError("nixl_tiers was installed without its native library for copies (_swap_cpu)")
        self._library = library
        self._plan = plan
        self._words, self._limits, self._bell = words, limits, bell
        self._thread: int | None = None
        self._closed = False
        self._open: set[Stream] = set()  # the thread reads and writes them

    def begin(
        self, call: LoadCall, pairs: Pairs, rows: bytes, *,
        skipped: int, coming: Collection[int], limit: tuple[int, int], deadline_s: float,
    ) -> Stream:  # fmt: skip
        """Copy these pairs, which are checked: those of `rows` (32-bit numbers) that are to come, by their places, when
        they have arrived, the others at once. `skipped`: sub-blocks of the first row before the first pair. `limit`:
        its slot, and the number that stands beside it. `deadline_s`: of CLOCK_MONOTONIC; from then on nothing begins.

        Raises ValueError for places or a slot that do not exist, OSError where no thread can be started.
        """
        count, (slot, number) = len(rows) // 4, limit
        if not all(0 <= place < count for place in coming) or not 0 <= slot < len(self._limits):
            raise ValueError(f"a stream of {count} rows in slot {slot}, of which {sorted(coming)} are to come")
        if self._thread is None and not self._closed:
            self._thread = self._library.nixl_tiers_streams_open(
                self._words.ctypes.data, self._limits.ctypes.data, self._bell.ctypes.data,
                self._plan.geometry.sub_blocks, max(1, RUN_BYTES // self._plan.geometry.cell_bytes),
            )  # fmt: skip
        if not self._thread:
            raise OSError("no thread could be started to copy rows as they arrive")
        places = (ctypes.c_uint8 * count)()
        for place in coming:
            places[place] = _COMING
        raw = _Stream(
            rows=rows, pairs=pairs.address, places=ctypes.addressof(places), n_places=count,
            n_pairs=pairs.number, skipped=skipped, slot=slot, number=number, deadline_s=deadline_s,
            copy=call.function, context=call.context,
        )  # fmt: skip
        stream = Stream(raw, call, (pairs, rows, places))
        self._open.add(stream)
        self._library.nixl_tiers_streams_put(self._thread, ctypes.byref(raw))
        return stream

    def ended(self, stream: Stream) -> Ended | None:
        """What became of it; None until it has ended. Waits for nothing."""
        raw: Any = stream.raw
        if not self._library.nixl_tiers_streams_ended(ctypes.byref(raw)):
            return None
        if stream in self._open:
            self._open.remove(stream)
            if not raw.failed:
                stream.call.release()
        return Ended(raw.gap, raw.copied, raw.copy_s, bool(raw.failed))

    def cancel(self, streams: Collection[Stream]) -> None:
        """Return when nothing of these is copied any more, nor will be."""
        if self._thread:
            for stream in streams:
                self._library.nixl_tiers_streams_cancel(self._thread, ctypes.byref(stream.raw))
            for stream in streams:
                self._library.nixl_tiers_streams_wait(self._thread, ctypes.byref(stream.raw))

    def close(self, most_s: int = STOP_S) -> bool:
        """Cancel all, and end the thread; False if a copy hangs, so that this takes longer. May be called twice; no
        other call may run meanwhile."""
        self._closed = True
        thread, self._thread = self._thread, None
        return not thread or bool(self._library.nixl_tiers_streams_close(thread, most_s))
