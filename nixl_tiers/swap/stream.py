"""One direction of the swap: its CUDA streams, its copy strategies, and its order behind vLLM's compute."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.swap.device_tables import DeviceTables
from nixl_tiers.swap.driver import CudaError, Device
from nixl_tiers.swap.kernels import Kernels
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.strategies import RINGS, CopyEngineStrategy, CopyStrategy, RingStrategy, StagedStrategy

log = logging.getLogger(__name__)


class Choice(Protocol):
    """Which strategy a transfer takes: (to_host, group, blocks) -> a name of strategies.NAMES."""

    def __call__(self, to_host: bool, group: int, blocks: int) -> str: ...


class Events:
    """A pool of timed events: to create one costs more than to record it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._all: list[int] = []

    def take_two(self) -> tuple[int, int]:
        """Two unused events. The device is current. Raises CudaError."""
        with self._lock:
            while len(self._free) < 2:
                event = self._device.driver.event(timed=True)
                self._all.append(event)
                self._free.append(event)
            return self._free.pop(), self._free.pop()

    def give_back(self, *events: int) -> None:
        with self._lock:
            if self._all:  # not closed
                self._free.extend(events)

    def close(self) -> None:
        """Destroy all. May be called twice."""
        with self._lock, contextlib.suppress(CudaError), self._device.current() as driver:
            self._free.clear()
            while self._all:
                with contextlib.suppress(CudaError):
                    driver.destroy_event(self._all.pop())


class Transfer:
    """A copy in flight on the GPU. Thread-safe."""

    def __init__(self, device: Device, events: Events, begin: int, end: int) -> None:
        self._device = device
        self._events = events
        self._begin = begin
        self._end = end
        self._waiting = threading.Lock()  # held for as long as a thread waits
        self._lock = threading.Lock()  # never held for long; without an elapsed time the events are this transfer's
        self._elapsed_s: float | None = None

    def done(self) -> bool:
        """Whether the bytes have arrived. Does not wait. Raises CudaError if they never will."""
        if not self._waiting.acquire(blocking=False):
            return False  # another thread waits for them
        try:
            if self._elapsed_s is None:
                with self._device.current() as driver:
                    if not driver.query(self._end):
                        return False
                    self._finish()
            return True
        finally:
            self._waiting.release()

    def wait(self) -> None:
        """Return when the bytes have arrived. Raises CudaError if they never will."""
        with self._waiting:
            if self._elapsed_s is None:
                with self._device.current() as driver:
                    driver.wait(self._end)
                    self._finish()

    def elapsed_s(self) -> float:
        """Seconds that it took on the GPU, from the end of the compute before it; waits for its end."""
        self.wait()
        assert self._elapsed_s is not None
        return self._elapsed_s

    def hold(self, stream: int) -> None:
        """Have `stream` wait on the GPU for the bytes before its next work; the caller does not wait."""
        with self._lock:
            if self._elapsed_s is None:
                with self._device.current() as driver:
                    driver.wait_event(stream, self._end)

    def _finish(self) -> None:
        with self._lock:
            self._elapsed_s = self._device.driver.elapsed_s(self._begin, self._end)
            self._events.give_back(self._begin, self._end)


class CopyStream:
    """Transfers of one direction, one after the other. No other call may be running at `close`."""

    def __init__(
        self,
        device: Device,
        tables: DeviceTables,
        pinned: PinnedRegion,
        kernels: Kernels | None,
        events: Events,
        *,
        to_host: bool,
    ) -> None:
        self._device = device
        self._tables = tables
        self._pinned = pinned
        self._kernels = kernels
        self._events = events
        self._to_host = to_host
        self._lock = threading.Lock()
        self._streams: list[int] = []
        self._marks: list[int] = []  # untimed events
        self._strategies: dict[str, CopyStrategy] = {}
        self._last: CopyStrategy | None = None
        with device.current() as driver:
            try:
                for _ in range(2):
                    self._streams.append(driver.stream(urgent=not to_host))
                    self._marks.append(driver.event())
            except CudaError:
                self.close()
                raise
        self._work, self._copies = self._streams
        self._computed, self._tail = self._marks

    def strategy(self, name: str, group: int) -> CopyStrategy:
        """The strategy called `name`, or the copy engine where it is not available or does not support the group."""
        strategy = self._strategies.get(name)
        if strategy is None:
            try:
                strategy = self._make(name)
            except CudaError as error:
                log.warning("nixl_tiers: the copy engine replaces %s: %s", name, error)
            strategy = strategy or self.strategy("copy_engine", group)
            self._strategies[name] = strategy
        return strategy if strategy.supports(group) else self.strategy("copy_engine", group)

    def _make(self, name: str) -> CopyStrategy | None:
        to_host, batch, device, tables = self._to_host, self._pinned.complete, self._device, self._tables
        if name == "copy_engine":
            return CopyEngineStrategy(device, tables, self._work, to_host=to_host, batch=batch)
        if self._kernels is None:
            return None
        if name == "staged":
            return StagedStrategy(device, tables, self._kernels, self._work, self._copies, to_host=to_host, batch=batch)
        if not self._pinned.mapped:
            return None
        blocks = next(n for n in RINGS if name == f"ring{n}")
        return RingStrategy(device, tables, self._kernels, self._work, blocks, to_host=to_host)

    def start(self, name: str, group: int, pairs: NDArray[np.uint32], compute_stream: int) -> Transfer:
        """Submit a transfer, behind what `compute_stream` has to do so far and behind this stream's last transfer.

        Raises CudaError, after everything that was submitted has ended: its rows may be reused.
        """
        with self._lock, self._device.current() as driver:
            begin, end = self._events.take_two()
            try:
                # Without copies nothing would order a strategy's last stream behind its first.
                strategy = self.strategy(name if len(pairs) else "copy_engine", group)
                driver.record(self._computed, compute_stream)
                driver.wait_event(strategy.first, self._computed)
                if self._last is not None and self._last is not strategy:
                    driver.wait_event(strategy.first, self._tail)
                driver.record(begin, strategy.first)
                if len(pairs):
                    strategy.copy(group, pairs)
                driver.record(end, strategy.last)
                driver.record(self._tail, strategy.last)
            except BaseException:
                self.drain()
                self._events.give_back(begin, end)
                raise
            self._last = strategy
            return Transfer(self._device, self._events, begin, end)

    def drain(self) -> None:
        """Return when the streams are idle, or broken for good."""
        with contextlib.suppress(CudaError), self._device.current() as driver:
            for stream in self._streams:
                with contextlib.suppress(CudaError):
                    driver.synchronize(stream)

    def close(self) -> None:
        """Wait for the last transfer and free everything. May be called twice."""
        with self._lock:
            self.drain()
            for strategy in self._strategies.values():
                strategy.close()
            self._strategies.clear()
            calls: list[tuple[list[int], Callable[[int], None]]] = [
                (self._marks, self._device.driver.destroy_event),
                (self._streams, self._device.driver.destroy_stream),
            ]
            with contextlib.suppress(CudaError), self._device.current():
                for handles, destroy in calls:
                    while handles:
                        with contextlib.suppress(CudaError):
                            destroy(handles.pop())
