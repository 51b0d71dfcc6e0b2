"""Two ranks page-lock the same memory, each in a process of its own; one dies, and comes back.

`test_ranks.py FD CELL` is one of the ranks: it prints whether it could lock the whole region, and carries out commands
from standard input until it is closed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.cuda import CudaSwap
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from tests.support.places import places_of
from tests.swap.conftest import ROOT

BLOCKS, LAYERS, PAGE, ROWS = 8, 3, 4096, 16
GEOMETRY: Final = Geometry(cells=2, cell_payload=LAYERS * PAGE)
STORED: Final = {5: 1, 0: 14, 3: 7}  # block -> row


def blocks_of(cell: int) -> NDArray[np.uint8]:
    """uint8 (LAYERS, BLOCKS, PAGE): what a rank's KV cache holds at first."""
    return np.random.default_rng(cell).integers(0, 256, (LAYERS, BLOCKS, PAGE), np.uint8)


class RankProcess:
    def __init__(self, region: HostRegion, cell: int, stack: ExitStack) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(region.fd), str(cell)],
            stdin=-1,
            stdout=-1,
            text=True,
            pass_fds=[region.fd],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.answer()

    def ends(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(120)


@pytest.mark.gpu
def test_two_processes_page_lock_one_region_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    with ExitStack() as stack, HostRegion.create(GEOMETRY, ROWS) as region:
        ranks = [RankProcess(region, cell, stack) for cell in range(2)]
        assert [rank.answer() for rank in ranks] == ["locked"] * 2
        assert [rank.ask("store") for rank in ranks] == ["stored"] * 2
        for block, row in STORED.items():
            cells = region.rows_view[row, : GEOMETRY.cells * GEOMETRY.cell_payload].reshape(GEOMETRY.cells, -1)
            for cell in range(2):
                assert np.array_equal(cells[cell], blocks_of(cell)[:, block].reshape(-1)), (cell, block)
        others = [row for row in range(ROWS) if row not in STORED.values()]
        assert not region.rows_view[others].any()
        ranks[0].process.kill()
        ranks[0].process.wait()
        assert ranks[1].ask("load") == "loaded", "the memory stays locked for the other"
        again = RankProcess(region, 0, stack)
        assert again.answer() == "locked"
        assert again.ask("load") == "loaded"
        assert [rank.ends() for rank in (again, ranks[1])] == [0, 0]


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
