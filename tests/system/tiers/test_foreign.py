"""Odd foreign directories below a tier's path: deep, with long names, with names that are no UTF-8."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.folder import tree_bytes
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.eviction import Evictor
from nixl_tiers.tiers.rowfile.quota import DirQuota
from nixl_tiers.tiers.rowfile.scanner import DirScanner
from tests.tiers.slab.test_quota import MIB, SlabQuota, room


@pytest.fixture(params=["deep", "long", "no UTF-8"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A foreign directory with a file of 1 MiB at its end."""
    names = {"deep": [b"d"] * 1100, "long": [b"n" * 250] * 20, "no UTF-8": [b"\xff\xfe", b"\x80"]}[str(request.param)]
    top = tmp_path / "odd"
    top.mkdir()
    descriptor = os.open(top, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=descriptor)
        below = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    file = os.open(b"\xff.bin", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=descriptor)
    os.write(file, bytes(MIB))
    os.close(file)
    os.close(descriptor)
    yield top
    subprocess.run(["rm", "-rf", str(top)], check=True)  # too deep for rmtree


def test_odd_tree_is_measured(odd: Path) -> None:
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    assert MIB <= tree_bytes(str(odd)) < 16 * MIB
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files


def test_odd_tree_does_not_stop_growth_of_slabs(odd: Path, tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 64 * MIB)
    assert room(quota, MIB)
    assert quota.used_bytes >= MIB


def test_odd_tree_does_not_stop_scans_of_row_files(odd: Path, tmp_path: Path) -> None:
    quota = DirQuota(64 * MIB, 4096)
    with closing(RowDirectory(tmp_path, quota)) as directory:
        directory.prepare("0" * 32)
        log_once = LogOnce(logging.getLogger(__name__))
        DirScanner(directory, quota, Evictor(directory, quota, log_once), log_once)._scan_all()
    assert quota.used_bytes >= MIB
