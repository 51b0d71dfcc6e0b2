"""The memory in which downloads land."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.s3.data import MIN_STAGING_ROWS, STAGING_BYTES, S3Data, _staging, staging_rows
from nixl_tiers.tiers.s3.names import RECENT_NAMES

MIB = 1 << 20


@pytest.mark.parametrize(
    ("transfers", "row_bytes", "rows"),
    [(64, 8 * MIB, 68), (512, 64 << 10, 516), (512, 8 * MIB, 128), (2, 512 * MIB, MIN_STAGING_ROWS)],
)
def test_as_many_downloads_as_are_allowed_have_room_within_a_bound(transfers: int, row_bytes: int, rows: int) -> None:
    staging = _staging(transfers, row_bytes, 1)
    assert len(staging) == rows * row_bytes
    assert len(staging) <= max(STAGING_BYTES, MIN_STAGING_ROWS * row_bytes)
    staging.close()


@pytest.mark.parametrize("movers", [2, 3, 4, 16])
@pytest.mark.parametrize("row_bytes", [64 << 10, 8 * MIB, 64 * MIB, 512 * MIB])
@pytest.mark.parametrize("most", [16, 64, 512])
def test_movers_together_have_no_more_staging_than_one_may(most: int, row_bytes: int, movers: int) -> None:
    config = S3Config(type="s3", bucket="kv-loads", capacity=1 << 40, max_transfers=most, movers=movers)
    rows = staging_rows(config.downloads_each, row_bytes, movers)
    assert movers * rows * row_bytes <= max(STAGING_BYTES, max(MIN_STAGING_ROWS, movers) * row_bytes)
    assert movers * config.downloads_each <= most
    if movers * row_bytes * 24 <= STAGING_BYTES:
        assert rows >= min(config.downloads_each, 20), "each has room for its downloads"


def test_a_mover_of_four_takes_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    config = S3Config(type="s3", bucket="kv-loads", capacity=1 << 40, max_transfers=512, movers=4)
    region = HostRegion.create(Geometry(1, MIB), 1)
    data = S3Data(config, region.geometry, region)
    assert data._staging.nbytes <= STAGING_BYTES // 4
    region.close()


def test_names_of_all_that_may_run_are_kept() -> None:
    most = next(each.le for each in S3Config.model_fields["max_transfers"].metadata if hasattr(each, "le"))
    assert most == 512
    assert 2 * most <= RECENT_NAMES


def test_staging_rows_stay_out_of_core_dumps() -> None:
    staging = _staging(16, 1 << 20, 1)
    address = np.frombuffer(staging, np.uint8).ctypes.data
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (flags,) = (
        lines.rpartition("VmFlags:")[2].split()
        for lines in mappings
        if int(lines.partition("-")[0], 16) <= address < int(lines.partition("-")[2].partition(" ")[0], 16)
    )
    assert "dd" in flags
