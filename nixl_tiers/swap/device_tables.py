"""A plan's tables on the GPU, uploaded once: a launch adds eight bytes a block to them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.swap.driver import CudaError, Device
from nixl_tiers.swap.plan import CopyPlan, GroupPlan

TILE_BYTES: Final = 2048  # SWAP_TILE of swap.h


def parts_of(group: GroupPlan) -> NDArray[np.uint64]:
    """(n, 4) rows of swap_segment: segments and gaps (address 0) by offset, covering a sub-block exactly."""
    parts = [segment[:4] for segment in group.segments]
    parts += [(0, 0, gap.nbytes, gap.offset) for gap in group.gaps]
    return np.array(sorted(parts, key=lambda part: part[3]), dtype=np.uint64).reshape(-1, 4)


def first_parts(parts: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """(tiles,) the first part that reaches into each tile of a sub-block."""
    ends = parts[:, 2] + parts[:, 3]
    begins = np.arange(0, int(ends[-1]), TILE_BYTES, dtype=np.uint64)
    return np.searchsorted(ends, begins, side="right").astype(np.uint32)


@dataclass(frozen=True)
class GroupTable:
    """One group's addresses on the GPU."""

    parts: int
    first_part: int
    n_parts: int
    n_tiles: int


class DeviceTables:
    """The tables of every group, and as many zero bytes as the largest gap has. `close` frees them."""

    def __init__(self, device: Device, plan: CopyPlan) -> None:
        self.plan = plan
        self._device = device
        self._allocations: list[int] = []
        try:
            self.groups = [self._upload_group(group) for group in plan.groups]
            gaps = [gap.nbytes for group in plan.groups for gap in group.gaps]
            self.zeros = self._upload(np.zeros(max(gaps), np.uint8)) if gaps else 0
        except CudaError:
            self.close()
            raise

    def _upload_group(self, group: GroupPlan) -> GroupTable:
        parts = parts_of(group)
        first = first_parts(parts)
        return GroupTable(self._upload(parts), self._upload(first), len(parts), len(first))

    def _upload(self, data: NDArray[np.generic]) -> int:
        with self._device.current() as driver:
            address = driver.allocate(data.nbytes)
            self._allocations.append(address)
            driver.upload(address, data)
        return address

    def close(self) -> None:
        """Free the GPU's memory. May be called twice."""
        with contextlib.suppress(CudaError), self._device.current() as driver:
            while self._allocations:
                with contextlib.suppress(CudaError):
                    driver.free(self._allocations.pop())
