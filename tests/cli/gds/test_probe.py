"""What nvidia-fs counts, read from made-up files: the second witness of the verdict `native`."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.cli.gds.probe import nvidia_fs

STATS = """GDS Version: 1.10.0.4
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.20.5)
IO stats: Enabled, peer IO stats: Enabled

Active Shadow-Buffer (MiB): 0
Batches\t\t\t\t: n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0
Reads\t\t\t\t: n=12 ok=11 err=1 readMiB=3 io_state_err=0
Reads\t\t\t\t: Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Sparse Reads\t\t        : n=6 io=0 holes=0 pages=0
Writes\t\t\t\t: n=8 ok=8 err=0 writeMiB=2 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Ops\t\t\t\t: Read=0 Write=0 BatchIO=0
"""
STATS_OFF = """IO stats: Disabled, peer IO stats: Enabled
Reads                           : err=0 io_state_err=0
Sparse Reads                    : n=0 io=0 holes=0 pages=0
Writes                          : err=0 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
"""


def with_stats(root: Path, text: str) -> Path:
    folder = root / "proc/driver/nvidia-fs"
    folder.mkdir(parents=True)
    (folder / "stats").write_text(text)
    return root


def test_counters_of_nvidia_fs_are_those_that_succeeded(tmp_path: Path) -> None:
    assert nvidia_fs(with_stats(tmp_path, STATS)) == {"reads": 11, "writes": 8}


@pytest.mark.parametrize("text", [STATS_OFF, "", "Reads: none"])
def test_counters_that_are_off_are_none_and_not_zero(text: str, tmp_path: Path) -> None:
    assert nvidia_fs(with_stats(tmp_path, text)) == {"reads": None, "writes": None}


def test_without_the_module_there_are_no_counters(tmp_path: Path) -> None:
    assert nvidia_fs(tmp_path) is None
