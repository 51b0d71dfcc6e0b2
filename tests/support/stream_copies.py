"""A rank whose copies of streamed loads go wrong: they are late, or its stream ends before all has come."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from nixl_tiers.swap import streams
from nixl_tiers.swap.streams import LoadCall

How = Literal["", "late", "overdue", "cancelled"]
_COPY: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Disturbed:
    """From now on streamed loads of this NixlTiersWorker, one at a time, go like this. "late": no copy ends before
    there is `file`. "overdue": the deadline passes during the first copy. "cancelled": the first copy ends when
    `cancel` is called."""

    def __init__(self, worker: Any, how: How, file: Path) -> None:
        self.how = how
        self._worker = worker
        self._file = file
        self._copies = threading.Event()
        self._after = {"late": self._late, "overdue": self._overdue, "cancelled": self._cancelled}.get(how)
        self._swap = worker._swap
        self._load_call = self._swap.load_call
        self._swap.load_call = self._watched

    def until_it_copies(self) -> None:
        """The first copy has got what there was, and what comes later is left to the next."""
        assert self._copies.wait(100)

    def cancel(self) -> None:
        """As a flush does."""
        self.until_it_copies()
        self._worker.wait({*self._worker._streamed.open})

    def end(self) -> None:
        self._swap.load_call = self._load_call

    def _watched(self, group: int) -> LoadCall:
        call = self._load_call(group)
        inner = _COPY(call.function)

        def copy(_: object, pairs: int, n: int) -> int:
            failed: int = inner(call.context, pairs, n)
            if self._after is not None:
                self._after()
            self._copies.set()
            return failed

        outer = _COPY(copy)
        return LoadCall(ctypes.cast(outer, ctypes.c_void_p).value or 0, 0, (call, outer))

    def _late(self) -> None:
        self._copies.set()
        _wait(self._file.exists)

    def _overdue(self) -> None:
        self._stream().deadline_s = 0.0

    def _cancelled(self) -> None:
        stream = self._stream()
        self._copies.set()
        _wait(lambda: stream.cancelled)

    def _stream(self) -> Any:
        opened = self._worker._streamed.open
        _wait(lambda: opened)  # the worker's own thread may still be about to note it
        (load,) = opened.values()
        return load.stream.raw


def copy_at_once(worker: Any, rows: int) -> None:
    """Call before the first stream: so many rows of one are a copy."""
    streams.RUN_BYTES = rows * worker._plan.geometry.cell_bytes  # type: ignore[misc]


def _wait(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.001)
