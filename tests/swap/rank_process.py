"""One rank of an engine with two: `rank_process.py FD CELL`, on a real GPU.

Page-locks the whole region, prints whether it could, and carries out commands from standard input until it is closed.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.cuda import CudaSwap
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from tests.support.places import places_of

BLOCKS, LAYERS, PAGE, ROWS = 8, 3, 4096, 16
GEOMETRY: Final = Geometry(cells=2, cell_payload=LAYERS * PAGE)
STORED: Final = {5: 1, 0: 14, 3: 7}  # block -> row


def blocks_of(cell: int) -> NDArray[np.uint8]:
    """uint8 (LAYERS, BLOCKS, PAGE): what a rank's KV cache holds at first."""
    return np.random.default_rng(cell).integers(0, 256, (LAYERS, BLOCKS, PAGE), np.uint8)


class Rank:
    def __init__(self, region: HostRegion, cell: int) -> None:
        import torch

        self.cell = cell
        self._tensor = torch.from_numpy(blocks_of(cell)).cuda()
        address = self._tensor.data_ptr()
        segments = [
            Segment(address + layer * BLOCKS * PAGE, PAGE, PAGE, layer * PAGE, BLOCKS) for layer in range(LAYERS)
        ]
        self._plan = CopyPlan([segments], GEOMETRY, Share(cell), region.address, region.rows)
        self.swap = CudaSwap(self._plan)

    def store(self) -> None:
        self.swap.store(0, [*STORED], self._places()).wait()

    def load(self) -> bool:
        """Whether what was stored is loaded, over blocks that were overwritten; and nothing else."""
        self._tensor[:] = 0
        self.swap.load(0, [*STORED], self._places()).wait()
        wanted = blocks_of(self.cell)
        wanted[:, [block for block in range(BLOCKS) if block not in STORED]] = 0
        return bool(np.array_equal(self._tensor.cpu().numpy(), wanted))

    def _places(self) -> NDArray[np.uint32]:
        return places_of(self._plan, [*STORED.values()], 0, len(STORED))


def main() -> None:
    region = HostRegion.attach(int(sys.argv[1]))
    rank = Rank(region, int(sys.argv[2]))
    print("locked" if rank.swap.pinned else "not locked", flush=True)
    for line in sys.stdin:
        if line.strip() == "store":
            rank.store()
            print("stored", flush=True)
        else:
            print("loaded" if rank.load() else "wrong", flush=True)
    rank.swap.close()
    region.close()


if __name__ == "__main__":
    main()
