"""A mover's first load costs what later ones do: the region's pages are mapped before, not at their first touch."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

import nixl_tiers
from tests.support.file_tier import file_tier
from tests.support.waiting import until, until_up

ROW = 1 << 20
ROWS = 32
KEYS = [bytes([number]) * 32 for number in range(ROWS)]


def shared_bytes(pid: int) -> int:
    """How much shared memory this process has mapped, and can use without a page fault."""
    found = re.search(r"RssShmem:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return 1024 * int(found[1])


def minor_faults(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[7])


@pytest.mark.parametrize(("backend", "huge_pages"), [("auto", "off"), ("posix", "auto")])
def test_first_load_of_a_mover_has_no_page_fault_a_page(backend: str, huge_pages: str, tmp_path: Path) -> None:
    rows = np.repeat(np.arange(ROWS, dtype=np.uint8)[:, None], ROW, axis=1)
    config = {
        "tiers": [
            {"type": "cpu", "capacity": "48MiB", "huge_pages": huge_pages},
            file_tier(tmp_path, "64MiB", backend=backend),
        ],
        "wait_s": 120.0,  # on a busy machine a load is late, and then no hit
    }
    with nixl_tiers.open(config, ROW, "test") as store:
        until_up(store)
        store.put(KEYS, rows)
        assert store.flush(120)
    with nixl_tiers.open(config, ROW, "test") as store:
        until_up(store)
        (mover,) = store.coordinator.mover_pids
        assert mover is not None
        until(lambda: shared_bytes(mover) >= store.coordinator.region.nbytes, "the mover has mapped the region")
        faults, out = minor_faults(mover), np.zeros_like(rows)
        assert all(store.get(KEYS, out))
        assert minor_faults(mover) - faults < ROWS * ROW // mmap.PAGESIZE // 4
        assert np.array_equal(out, rows)
