"""The swap where engine blocks are GPU memory, with torch alone: gather into a staging buffer, then copy whole rows.

A block's layers lie apart on the GPU and together in its row. Gathering them there first, at the speed of the GPU's
own memory, leaves one long copy per run of places for the bus, instead of one short copy per layer and block.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from nixl_tiers.swap.plan import CopyPlan, Memory, Segment

logger = logging.getLogger(__name__)

STAGING_BYTES: Final = 16 << 20
PIN_CHUNK_BYTES: Final = 64 << 30  # one registration of 512 GiB or more fails
_PORTABLE_AND_MAPPED: Final = 0x1 | 0x2
_ALREADY_REGISTERED: Final = 712
_WIDTHS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class StagedCopy:
    """Gather and scatter of one direction through a staging buffer on `device`, in the current stream's order.

    Raises ValueError where a segment does not say how many blocks it has: a tensor needs a size.
    """

    def __init__(self, plan: CopyPlan, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        sub_block_bytes = plan.geometry.sub_block_bytes
        self._plan = plan
        self._device = device
        self._region = _bytes_at(plan.region_address, (plan.rows * plan.geometry.row_bytes,), (1,), torch.device("cpu"))
        batch = min(max(1, staging_bytes // sub_block_bytes), plan.rows * plan.geometry.sub_blocks)
        self._staging = torch.empty((batch, sub_block_bytes), dtype=torch.uint8, device=device)
        # Per group: each segment's pages and where they stand in the staging buffer, both in the widest type that fits.
        self._views = [[self._pages_and_staging(segment) for segment in group.segments] for group in plan.groups]

    def _pages_and_staging(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        if segment.blocks is None:
            raise ValueError(f"the segment at offset {segment.offset} does not say how many blocks it has")
        address, stride, nbytes, offset = segment[:4]
        sizes = (address, stride, nbytes, offset, self._staging.shape[1])
        dtype = next(dtype for width, dtype in _WIDTHS if all(size % width == 0 for size in sizes))
        pages = _bytes_at(address, (segment.blocks, nbytes), (stride, 1), self._device)
        return pages.view(dtype), self._staging[:, offset : offset + nbytes].view(dtype)

    def store(self, group: int, pairs: NDArray[np.uint32]) -> None:
        """Engine -> region, for checked pairs (CopyPlan.pairs)."""
        for ids, part in self._batches(pairs):
            for gap in self._plan.groups[group].gaps:
                self._staging[: len(part), gap.offset : gap.offset + gap.nbytes].zero_()
            for pages, staged in self._views[group]:
                torch.index_select(pages, 0, ids, out=staged[: len(part)])
            for staged_run, row_run in self._runs(part):
                row_run.copy_(staged_run, non_blocking=True)

    def load(self, group: int, pairs: NDArray[np.uint32]) -> None:
        """Region -> engine, for checked pairs (CopyPlan.pairs)."""
        for ids, part in self._batches(pairs):
            for staged_run, row_run in self._runs(part):
                staged_run.copy_(row_run, non_blocking=True)
            for pages, staged in self._views[group]:
                pages.index_copy_(0, ids, staged[: len(part)])

    def _batches(self, pairs: NDArray[np.uint32]) -> Iterator[tuple[torch.Tensor, NDArray[np.uint32]]]:
        """As many pairs at a time as staging holds: their block ids on the device, and the pairs."""
        if not len(pairs):
            return
        host_ids = torch.from_numpy(pairs[:, 0].astype(np.int64))
        if self._device.type == "cuda":
            host_ids = host_ids.pin_memory()
        ids = host_ids.to(self._device, non_blocking=True)
        batch = self._staging.shape[0]
        for first in range(0, len(pairs), batch):
            yield ids[first : first + batch], pairs[first : first + batch]

    def _runs(self, pairs: NDArray[np.uint32]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(staged bytes, region bytes) of each run of places that stand side by side in the region."""
        size = self._staging.shape[1]
        for first, last, offset in runs(self._plan.place_offsets(pairs[:, 1]), size):
            yield self._staging[first:last].view(-1), self._region[offset : offset + (last - first) * size]


def runs(offsets: NDArray[np.int64], size: int) -> Iterator[tuple[int, int, int]]:
    """(first, last, offset) of each longest run offsets[first:last] whose neighbours are exactly `size` apart."""
    breaks = np.flatnonzero(np.diff(offsets) != size) + 1
    for first, last in pairwise([0, *breaks.tolist(), len(offsets)]):
        yield first, last, int(offsets[first])


def _bytes_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> torch.Tensor:
    cuda = device.type == "cuda"
    memory = Memory(address, shape, strides, cuda=cuda)
    view = torch.as_tensor(memory, device=device) if cuda else torch.from_numpy(np.asarray(memory))
    if view.data_ptr() != address:  # torch copies, silently, what stands on another device
        raise ValueError(f"address {address:#x} is not memory of {device}")
    return view


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Transfer:
    """A copy under way on the GPU."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin = begin
        self._end = end

    def done(self) -> bool:
        """Whether the bytes have arrived. Does not wait."""
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when the bytes have arrived."""
        self._end.synchronize()

    def elapsed_s(self) -> float:
        """Seconds that it took on the device, once it is done."""
        return float(self._begin.elapsed_time(self._end)) / 1e3


class CudaSwap:
    """Copies blocks of one group between GPU memory and this rank's cell of the region's rows, without waiting.

    Stores run on a low-priority stream and loads on a high-priority one, each in the order of the calls. Both wait for
    what the caller's current stream has been given so far: a store reads blocks that were just computed, and
    a load must not overwrite what is still being read. Call from one thread; `close` before the region is unmapped.
    """

    def __init__(
        self,
        plan: CopyPlan,
        device: torch.device | str = "cuda",
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self.plan = plan
        self._device = torch.device(device)
        with torch.cuda.device(self._device):
            self._store_stream = torch.cuda.Stream(priority=0)  # type: ignore[no-untyped-call]
            self._load_stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            self._out = StagedCopy(plan, self._device, staging_bytes)
            self._in = StagedCopy(plan, self._device, staging_bytes)
            self._pinned = PinnedRegion(plan, ctypes.CDLL("libcuda.so.1"))

    @property
    def pinned(self) -> bool:
        """Whether the region is page-locked; if not, copies are correct and slow."""
        return self._pinned.complete

    def store(self, group: int, blocks: ArrayLike, places: ArrayLike) -> Transfer:
        """Engine -> region: blocks[i] to places[i]; what the group does not cover of a sub-block becomes zero.
        ValueError where one is out of range, before a byte has moved."""
        return self._start(self._out.store, self._store_stream, group, self.plan.pairs(group, blocks, places))

    def load(self, group: int, blocks: ArrayLike, places: ArrayLike) -> Transfer:
        """Region -> engine: places[i] to blocks[i]. ValueError as for store."""
        return self._start(self._in.load, self._load_stream, group, self.plan.pairs(group, blocks, places))

    def _start(self, copy: Any, stream: torch.cuda.Stream, group: int, pairs: NDArray[np.uint32]) -> Transfer:
        begin, end = _event(), _event()
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                begin.record()
                copy(group, pairs)
                end.record()
        return Transfer(begin, end)

    def close(self) -> None:
        """Wait for everything under way and release the region's pages. May be called twice."""
        self._store_stream.synchronize()
        self._load_stream.synchronize()
        with torch.cuda.device(self._device):
            self._pinned.release()


class PinnedRegion:
    """The plan's rows, page-locked for the GPU in chunks that end on row boundaries; all of them, or none.

    Uses the driver's call: a failure of the runtime's own would come up again in torch's next, unrelated one.
    The device's context must be current.
    """

    def __init__(self, plan: CopyPlan, driver: Any, chunk_bytes: int = PIN_CHUNK_BYTES) -> None:
        self._driver = driver
        self._ours: list[int] = []
        self.complete = True
        row_bytes = plan.geometry.row_bytes
        total = plan.rows * row_bytes
        step = max(1, chunk_bytes // row_bytes) * row_bytes
        for offset in range(0, total, step):
            address = plan.region_address + offset
            size = min(step, total - offset)
            error = driver.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE_AND_MAPPED)
            )
            if error == 0:
                self._ours.append(address)
            elif error != _ALREADY_REGISTERED:
                logger.warning(
                    "the host region could not be pinned (CUDA error %d at %.1f of %.1f GiB), GPU copies will be slow: "
                    "raise the limit of locked memory (ulimit -l) or the container's memory, or shrink the cpu tier",
                    error,
                    offset / 2**30,
                    total / 2**30,
                )
                self.release()
                return

    def release(self) -> None:
        """Unpin what was pinned here. May be called twice."""
        self.complete = False
        while self._ours:
            self._driver.cuMemHostUnregister(ctypes.c_void_p(self._ours.pop()))
