"""vLLM's functions for files as bench.peers drives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.file_sides import Vllm
from bench.peers import Rows
from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.memory.region import HostRegion


@pytest.mark.parametrize("jobs", [1, 16])
def test_rows_come_back_as_they_were_stored(tmp_path: Path, jobs: int) -> None:
    folder = tmp_path / "vllm"
    folder.mkdir()
    with HostRegion.create(Geometry(1, PAGE), 32) as region:
        rows, side = Rows(region, PAGE), Vllm(folder, region, PAGE, jobs)
        rows.check("vllm", side)
        assert len(list(folder.rglob("*.bin"))) == 32
        side.store()
        assert len(list(folder.rglob("*.bin"))) == 64  # new files: those that exist would be left out
        side.close()
    assert not folder.exists()
