"""The copy strategies. Each submits the copies of one transfer to its streams and returns; nothing here waits.

copy_engine  one descriptor per layer and block, for the copy engine: takes no SM, slow for small pages
staged       gather on the GPU into a buffer, whole rows over the bus by the copy engine; the reverse for loads
ring         a few blocks of threads read and write host memory themselves, with many loads in flight
"""

from __future__ import annotations

import contextlib
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.swap.device_tables import DeviceTables
from nixl_tiers.swap.driver import CudaError, Device
from nixl_tiers.swap.kernels import CAPACITIES, RING_SHARED_BYTES, THREADS, Kernels

# Both are estimates, not measured on a GPU yet.
HALF_BYTES: Final = (
    8 << 20
)  # of the staging buffer: 150 us of PCIe 5, so that the gather of the other half is never waited for
STAGE_BLOCKS: Final = 64  # enough to gather at the speed of the GPU's memory, not enough to fill an H100
RINGS: Final = (2, 4, 8)  # blocks of threads of the ring, which has this many 64 KiB in flight
NAMES: Final = ("copy_engine", "staged", *(f"ring{n}" for n in RINGS))
_WARPS: Final = THREADS // 32


class CopyStrategy(Protocol):
    """One strategy, in one direction. `first` and `last`: the streams on which a transfer begins and ends."""

    first: int
    last: int

    def supports(self, group: int) -> bool:
        """Whether this strategy can copy the group at all."""
        ...

    def copy(self, group: int, pairs: NDArray[np.uint32]) -> None:
        """Submit checked pairs (CopyPlan.pairs). The device is current. CudaError: some copies may be in flight."""
        ...

    def close(self) -> None:
        """Free what it holds; its streams are idle. May be called twice."""
        ...


class CopyEngineStrategy:
    """Copies by the copy engine, on one stream."""

    def __init__(self, device: Device, tables: DeviceTables, stream: int, *, to_host: bool, batch: bool) -> None:
        """`batch`: submit copies in batches, which the region must be page-locked for."""
        self.first = self.last = stream
        self._driver = device.driver
        self._plan = tables.plan
        self._zeros = tables.zeros
        self._to_host = to_host
        self._batch = batch
        self._segments = [
            np.array([segment[:4] for segment in group.segments], np.uint64).reshape(-1, 4)
            for group in tables.plan.groups
        ]
        self._gaps = [np.array(group.gaps, np.uint64).reshape(-1, 2) for group in tables.plan.groups]

    def supports(self, group: int) -> bool:
        return True

    def copy(self, group: int, pairs: NDArray[np.uint32]) -> None:
        address, stride, nbytes, offset = self._segments[group].T
        cells = self._plan.place_offsets(pairs[:, 1]).astype(np.uint64) + np.uint64(self._plan.region_address)
        pages = address + pairs[:, :1].astype(np.uint64) * stride
        rows = cells[:, None] + offset
        sizes = np.broadcast_to(nbytes, pages.shape)
        if self._whole_blocks(group):
            pages, rows, sizes = _merged(pages[:, 0], rows[:, 0], int(nbytes[0]))
        to, source = (rows, pages) if self._to_host else (pages, rows)
        self._many(to, source, sizes)
        gap_offset, gap_bytes = self._gaps[group].T
        if self._to_host and len(gap_bytes):
            gaps = cells[:, None] + gap_offset
            zeros = np.full(gaps.shape, self._zeros, np.uint64)
            self._many(gaps, zeros, np.broadcast_to(gap_bytes, gaps.shape))

    def close(self) -> None:
        pass

    def _whole_blocks(self, group: int) -> bool:
        """Whether neighbouring blocks are contiguous on both sides: one segment that leaves nothing out."""
        segments = self._plan.groups[group].segments
        whole = self._plan.geometry.sub_block_bytes
        return len(segments) == 1 and segments[0].nbytes == segments[0].block_stride == whole

    def _many(self, to: NDArray[np.uint64], source: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> None:
        # Rows are complete when a load is submitted; pages may still be computed when a store is.
        self._driver.copy_many(
            np.ascontiguousarray(to).reshape(-1),
            np.ascontiguousarray(source).reshape(-1),
            np.ascontiguousarray(sizes).reshape(-1),
            self.first,
            stable=not self._to_host,
            batch=self._batch,
        )


class StagedStrategy:
    """Whole rows over the bus, through two halves of a buffer on the GPU: one fills while the other empties."""

    def __init__(
        self,
        device: Device,
        tables: DeviceTables,
        kernels: Kernels,
        work: int,
        copies: int,
        *,
        to_host: bool,
        batch: bool,
        half_bytes: int = HALF_BYTES,
    ) -> None:
        """`work`, `copies`: a stream for the kernels, and one for the copies."""
        self.first, self.last = (work, copies) if to_host else (copies, work)
        self._device = device
        self._tables = tables
        self._kernels = kernels
        self._work = work
        self._copies = copies
        self._to_host = to_host
        self._batch = batch
        self._cell_bytes = tables.plan.geometry.sub_block_bytes
        self._pairs = max(1, min(half_bytes // self._cell_bytes, CAPACITIES[-1]))
        self._turn = 0
        self._events: list[int] = []
        with device.current() as driver:
            self._buffer = driver.allocate(2 * self._pairs * self._cell_bytes)
            try:
                # Recorded behind what last read a half, and behind what last filled it.
                self._free = [self._event() for _ in range(2)]
                self._full = [self._event() for _ in range(2)]
            except CudaError:
                self.close()
                raise

    def _event(self) -> int:
        self._events.append(self._device.driver.event())
        return self._events[-1]

    def supports(self, group: int) -> bool:
        return True

    def copy(self, group: int, pairs: NDArray[np.uint32]) -> None:
        driver = self._device.driver
        filler, emptier = (self._work, self._copies) if self._to_host else (self._copies, self._work)
        for first in range(0, len(pairs), self._pairs):
            part, half = pairs[first : first + self._pairs], self._turn % 2
            self._turn += 1
            staging = self._buffer + half * self._pairs * self._cell_bytes
            driver.wait_event(filler, self._free[half])
            self._move(filler, group, part, staging)
            driver.record(self._full[half], filler)
            driver.wait_event(emptier, self._full[half])
            self._move(emptier, group, part, staging)
            driver.record(self._free[half], emptier)

    def _move(self, stream: int, group: int, pairs: NDArray[np.uint32], staging: int) -> None:
        if stream == self._work:
            for capacity, warps, parameter in self._tables.launches(
                group, pairs, to_host=self._to_host, staging=staging
            ):
                self._device.driver.launch(
                    self._kernels.stage[capacity],
                    stream,
                    parameter,
                    blocks=min(STAGE_BLOCKS, -(-warps // _WARPS)),
                    threads=THREADS,
                    shared_bytes=0,
                )
            return
        plan, size = self._tables.plan, self._cell_bytes
        cells = plan.place_offsets(pairs[:, 1]).astype(np.uint64) + np.uint64(plan.region_address)
        staged = np.uint64(staging) + np.arange(len(pairs), dtype=np.uint64) * np.uint64(size)
        staged, cells, sizes = _merged(staged, cells, size)
        to, source = (cells, staged) if self._to_host else (staged, cells)
        self._device.driver.copy_many(to, source, sizes, stream, stable=not self._to_host, batch=self._batch)

    def close(self) -> None:
        with contextlib.suppress(CudaError), self._device.current() as driver:
            while self._events:
                with contextlib.suppress(CudaError):
                    driver.destroy_event(self._events.pop())
            if self._buffer:
                with contextlib.suppress(CudaError):
                    driver.free(self._buffer)
                self._buffer = 0


class RingStrategy:
    """Threads of the GPU that read or write rows over the bus themselves. The region must be mapped for the GPU."""

    def __init__(
        self, device: Device, tables: DeviceTables, kernels: Kernels, stream: int, blocks: int, *, to_host: bool
    ) -> None:
        self.first = self.last = stream
        self._driver = device.driver
        self._tables = tables
        self._functions = kernels.ring
        self._blocks = blocks
        self._to_host = to_host

    def supports(self, group: int) -> bool:
        return self._tables.groups[group].vector

    def copy(self, group: int, pairs: NDArray[np.uint32]) -> None:
        for capacity, warps, parameter in self._tables.launches(group, pairs, to_host=self._to_host):
            self._driver.launch(
                self._functions[capacity],
                self.first,
                parameter,
                blocks=min(self._blocks, -(-warps // _WARPS)),
                threads=THREADS,
                shared_bytes=RING_SHARED_BYTES,
            )

    def close(self) -> None:
        pass


def _merged(
    left: NDArray[np.uint64], right: NDArray[np.uint64], size: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Copies of `size` bytes each, with those made one that continue the copy before them on both sides.

    Rows never continue one another (a seal stands between), so that no copy leaves the row that it begins in.
    """
    step = np.uint64(size)
    breaks = np.flatnonzero((np.diff(left) != step) | (np.diff(right) != step)) + 1
    firsts = np.concatenate([np.zeros(1, breaks.dtype), breaks])
    counts = np.diff(np.append(firsts, len(left))).astype(np.uint64)
    return left[firsts], right[firsts], counts * step
