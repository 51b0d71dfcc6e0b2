"""The swap where vLLM's blocks are host memory: a small C function, numpy where that was not built."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nixl_tiers.base import native
from nixl_tiers.swap.plan import CopyPlan, Memory
from nixl_tiers.swap.step import ABI, Pairs

KERNEL_AUTO: Final = 0


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled copy, or None where it was not built, is for another machine, or is older than this file."""
    return _open(native.location("nixl_tiers.swap._swap_cpu"))


def _open(path: str | None) -> ctypes.CDLL | None:
    library = native.opened(path, "nixl_tiers_swap_abi", ABI)
    if library is not None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.nixl_tiers_swap.argtypes = [pointer, pointer, size, pointer, size, pointer, size, number, number]
    return library


def backend() -> Literal["c", "numpy"]:
    """What HostSwap copies with in this process."""
    return "numpy" if _library() is None else "c"


class HostSwap:
    """Copies blocks of one group between vLLM's host memory and this rank's cell of the region's rows.

    Calls return when the bytes have arrived, and hold no lock: several threads may call at once, on different places.
    The plan's memory must outlive the calls.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        self._library = _library()
        self._rows = np.array(plan.row_layout, np.uint64)
        self._segments = [group.segment_table() for group in plan.groups]
        self._gaps = [group.gap_table() for group in plan.groups]

    def store(self, group: int, blocks: ArrayLike, places: ArrayLike) -> None:
        """vLLM -> region: blocks[i] to places[i] (integers, same length); what the group does not cover of a
        sub-block becomes zero. ValueError where one is out of range, before a byte has moved."""
        self.copy(group, Pairs.of(self.plan.pairs(group, blocks, places)), to_host=True)

    def load(self, group: int, blocks: ArrayLike, places: ArrayLike) -> None:
        """Region -> vLLM: places[i] to blocks[i] (integers, same length). ValueError as for store."""
        self.copy(group, Pairs.of(self.plan.pairs(group, blocks, places)), to_host=False)

    def copy(self, group: int, pairs: Pairs, *, to_host: bool) -> None:
        """As store or load, of pairs that are checked."""
        if not pairs.number:
            return
        if self._library is None:
            self._copy_numpy(group, pairs.view(), to_host=to_host)
            return
        segments, gaps = self._segments[group], self._gaps[group]
        self._library.nixl_tiers_swap(
            self._rows.ctypes.data,
            segments.ctypes.data,
            len(segments),
            gaps.ctypes.data,
            len(gaps),
            pairs.address,
            pairs.number,
            to_host,
            KERNEL_AUTO,
        )

    def _copy_numpy(self, group: int, pairs: NDArray[np.uint32], *, to_host: bool) -> None:
        """The same bytes, one slice at a time: whole slices are several times faster here than fancy indexing."""
        plan = self.plan.groups[group]
        blocks = pairs[:, 0].tolist()
        offsets = self.plan.place_offsets(pairs[:, 1]).tolist()
        region_bytes = self.plan.rows * self.plan.geometry.row_bytes
        region = np.asarray(Memory(self.plan.region_address, (region_bytes,), (1,)))
        for segment in plan.segments:
            pages = np.asarray(Memory(segment.address, (max(blocks) + 1, segment.nbytes), (segment.block_stride, 1)))
            for block, offset in zip(blocks, offsets, strict=True):
                start = offset + segment.offset
                part = region[start : start + segment.nbytes]
                if to_host:
                    part[:] = pages[block]
                else:
                    pages[block] = part
        if to_host:
            for gap in plan.gaps:
                for offset in offsets:
                    region[offset + gap.offset : offset + gap.offset + gap.nbytes] = 0
