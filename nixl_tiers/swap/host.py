"""The swap where vLLM's blocks are host memory: a small C function (csrc/swap_cpu.c)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from nixl_tiers.base import native
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.step import Pairs

KERNEL_AUTO: Final = 0


@cache
def _library() -> ctypes.CDLL:
    return _open(native.SWAP_CPU)


def _open(library: native.Library) -> ctypes.CDLL:
    found = native.opened(library)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    found.nixl_tiers_swap.argtypes = [pointer, pointer, size, pointer, size, pointer, size, number, number]
    return found


class HostSwap:
    """Copies blocks of one group between vLLM's host memory and this rank's cell of the region's rows.

    Calls return when the bytes have arrived, and hold no lock: several threads may call at once, on different places.
    The plan's memory must outlive the calls.
    """

    def __init__(self, plan: CopyPlan) -> None:
        """Raises NotBuilt."""
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

    def mark_loads(self) -> None:
        """What a load overwrites is not read any more when it is called: a step's forward has ended by then."""

    def unmark_loads(self) -> None: ...

    def copy(self, group: int, pairs: Pairs, *, to_host: bool) -> None:
        """As store or load, of pairs that are checked."""
        if not pairs.number:
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
