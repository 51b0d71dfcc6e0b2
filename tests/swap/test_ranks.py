"""Two ranks page-lock the same memory, each in a process of its own; one dies, and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.memory.region import HostRegion
from tests.swap.conftest import ROOT
from tests.swap.rank_process import GEOMETRY, ROWS, STORED, blocks_of

PROCESS = Path(__file__).with_name("rank_process.py")


class RankProcess:
    def __init__(self, region: HostRegion, cell: int, stack: ExitStack) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESS), str(region.fd), str(cell)],
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
