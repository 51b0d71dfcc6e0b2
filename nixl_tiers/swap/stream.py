"""One direction of the swap: its CUDA streams, its submitting thread, and its order behind vLLM's compute."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from nixl_tiers.swap.driver import CudaError, Device
from nixl_tiers.swap.kernels import CAPACITIES, Kernels
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.step import Pairs
from nixl_tiers.swap.strategies import SLOT_BYTES, STAGE_BLOCKS, may_batch
from nixl_tiers.swap.submit import COPY_ENGINE, SLOTS, STAGED, DeviceTables, Request, Submitter

log = logging.getLogger(__name__)


class Fence:
    """An event behind the compute that transfers wait for. It is recorded anew as soon as they are submitted: a stream
    that was told to wait for it waits for what it stood for then."""

    def __init__(self, event: int) -> None:
        self.event = event
        self.last: Request | None = None  # that was queued behind it


class Marks(NamedTuple):
    """A transfer's events around it."""

    begin: int
    end: int


class Events:
    """A pool of events: to create one costs more than to record it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._closed = False
        self._free: list[Marks] = []
        self._all: list[int] = []

    def take(self) -> Marks:
        """Unused events. Raises CudaError."""
        with self._lock:
            if not self._free:
                with self._device.current() as driver:
                    self._all += (driver.event(timed=True), driver.event(timed=True))
                self._free.append(Marks(*self._all[-2:]))
            return self._free.pop()

    def give_back(self, marks: Marks) -> None:
        with self._lock:
            if self._all:  # not closed
                self._free.append(marks)

    @property
    def closed(self) -> bool:
        """Whether they are destroyed. All transfers have ended by then."""
        return self._closed

    def close(self) -> None:
        """Destroy all. May be called twice."""
        self._closed = True
        with self._lock, contextlib.suppress(CudaError), self._device.current() as driver:
            self._free.clear()
            while self._all:
                with contextlib.suppress(CudaError):
                    driver.destroy_event(self._all.pop())


class Transfer:
    """A copy queued, or in flight on the GPU. Thread-safe. The events of one that failed are not used again."""

    def __init__(self, device: Device, events: Events, marks: Marks, submitter: Submitter, request: Request) -> None:
        self._device = device
        self._events = events
        self._marks = marks
        self._submitter = submitter
        self._request = request
        self._waiting = threading.Lock()  # held for as long as a thread waits
        self._lock = threading.Lock()  # never held for long; without an elapsed time the events are this transfer's
        self._elapsed_s: float | None = None

    def done(self) -> bool:
        """Whether the bytes have arrived. Does not wait. Raises CudaError if they never will."""
        if not self._waiting.acquire(blocking=False):
            return False  # another thread waits for them
        try:
            if self._elapsed_s is None:
                elapsed_s = self._submitter.ended_s(self._request)
                if elapsed_s is None:
                    return False
                self._finish(elapsed_s)
            return True
        finally:
            self._waiting.release()

    def wait(self) -> None:
        """Return when the bytes have arrived. Raises CudaError if they never will."""
        with self._waiting:
            if self._elapsed_s is None:
                self._submitter.wait(self._request)
                if self._events.closed:
                    return
                with self._device.current() as driver:
                    driver.wait(self._marks.end)
                    self._finish(driver.elapsed_s(self._marks.begin, self._marks.end))

    def elapsed_s(self) -> float:
        """Seconds that it took on the GPU, from the end of the compute before it; waits for its end."""
        if self._elapsed_s is None:
            self.wait()
        return self._elapsed_s or 0.0  # not known any more once the swap is closed

    def hold(self, stream: int) -> None:
        """Have `stream` wait on the GPU for the bytes before its next work; the caller waits until all of the transfer
        is submitted. Raises CudaError if that failed."""
        with self._lock:
            if self._elapsed_s is None:
                self._submitter.wait(self._request)
                if self._events.closed:
                    return
                with self._device.current() as driver:
                    driver.wait_event(stream, self._marks.end)

    def _finish(self, elapsed_s: float) -> None:
        with self._lock:
            self._elapsed_s = elapsed_s
            self._events.give_back(self._marks)


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
        staged: bool,
        to_host: bool,
    ) -> None:
        """`staged`: whether to allocate what that strategy needs."""
        self._device = device
        self._tables = tables
        self._pinned = pinned
        self._kernels = kernels
        self._events = events
        self._lock = threading.Lock()
        self._streams: list[int] = []
        self._own_events: list[int] = []
        self._staging = self._slot_pairs = 0
        self._submitter: Submitter | None = None
        self._kept: deque[Request] = deque()  # in the order of submission: the thread reads those that are queued
        self._fences: deque[Fence] = deque()  # in the order of their use
        self._marked: Fence | None = None
        try:
            with device.current() as driver:
                for _ in range(2):
                    self._streams.append(driver.stream(urgent=not to_host))
                for _ in range(1 + 2 * SLOTS):
                    self._own_events.append(driver.event(blocking=True))
                if kernels and staged:
                    self._allocate_staging()
            self._submitter = self._open(to_host=to_host)
        except BaseException:
            self.close()
            raise

    def _allocate_staging(self) -> None:
        cell_bytes = self._tables.plan.geometry.sub_block_bytes
        pairs = max(1, min(SLOT_BYTES // cell_bytes, CAPACITIES[-1]))
        try:
            self._staging = self._device.driver.allocate(SLOTS * pairs * cell_bytes)
            self._slot_pairs = pairs
        except CudaError as error:
            log.warning("nixl_tiers: the copy engine replaces staged: %s", error)

    def _open(self, *, to_host: bool) -> Submitter:
        kernels, tail, slots = self._kernels, self._own_events[0], self._own_events[1:]
        return Submitter(
            self._tables,
            self._device.driver,
            self._device.context,
            streams=(self._streams[0], self._streams[1]),
            tail=tail,
            slots=(slots[:SLOTS], slots[SLOTS:]),
            staging=self._staging,
            slot_pairs=self._slot_pairs,
            stage=tuple(kernels.stage.values()) if kernels else (0,) * len(CAPACITIES),
            stage_blocks=STAGE_BLOCKS,
            batch=self._pinned.complete and may_batch(self._device.capability),
            to_host=to_host,
        )

    def supports(self, name: str) -> bool:
        """Whether the strategy can be had here; else the copy engine replaces it."""
        return name == "copy_engine" or self._staging != 0

    def mark(self, compute_stream: int) -> None:
        """Transfers from now on, until `unmark`, begin behind what `compute_stream` has to do now. Raises CudaError."""
        with self._lock:
            self._marked = None
            self._marked = self._recorded(compute_stream)

    def unmark(self) -> None:
        """Transfers begin behind what their stream has to do when they are queued."""
        self._marked = None

    def _recorded(self, compute_stream: int) -> Fence:
        """A fence behind what `compute_stream` has to do so far."""
        assert self._submitter is not None
        first = self._fences[0] if self._fences else None
        if first is None or first is self._marked or (first.last and self._submitter.queued(first.last)):
            with self._device.current() as driver:
                self._own_events.append(driver.event())
            fence = Fence(self._own_events[-1])
        else:
            fence = self._fences.popleft()
        fence.last = None
        self._fences.append(fence)
        self._submitter.record(fence.event, compute_stream)
        return fence

    def start(self, name: str, group: int, pairs: Pairs, compute_stream: int) -> Transfer:
        """Queue a transfer, behind the `mark` or what `compute_stream` has to do so far, and behind this direction's
        last transfer.

        Takes the same short time whatever is to be copied. Raises CudaError; later errors are raised by the transfer,
        after everything that was submitted of it has ended: its rows may be reused.
        """
        assert self._submitter is not None
        strategy = STAGED if name == "staged" and self._staging else COPY_ENGINE
        with self._lock:
            fence = self._marked or self._recorded(compute_stream)
            marks = self._events.take()
            request = Request(pairs, group, strategy, (fence.event, *marks))
            while self._kept and not self._submitter.queued(self._kept[0]):
                self._kept.popleft()
            self._kept.append(request)
            try:
                self._submitter.put(request)
            except BaseException:
                self._kept.pop()
                self._events.give_back(marks)
                raise
            fence.last = request
        return Transfer(self._device, self._events, marks, self._submitter, request)

    def drain(self) -> None:
        """Return when everything queued has been submitted and the streams are idle, or broken for good."""
        assert self._submitter is not None
        self._submitter.drain()
        self._synchronize()

    def _synchronize(self) -> None:
        with contextlib.suppress(CudaError), self._device.current() as driver:
            for stream in self._streams:
                with contextlib.suppress(CudaError):
                    driver.synchronize(stream)

    def close(self) -> None:
        """Wait for the last transfer and free everything. May be called twice."""
        with self._lock:
            if self._submitter is not None:
                self._submitter.close()
            self._synchronize()
            self._kept.clear()
            self._free()

    def _free(self) -> None:
        driver = self._device.driver
        calls: list[tuple[list[int], Callable[[int], None]]] = [
            (self._own_events, driver.destroy_event),
            (self._streams, driver.destroy_stream),
            ([self._staging] if self._staging else [], driver.free),
        ]
        self._staging = 0
        with contextlib.suppress(CudaError), self._device.current():
            for handles, release in calls:
                while handles:
                    with contextlib.suppress(CudaError):
                        release(handles.pop())
