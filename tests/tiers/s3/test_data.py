"""The memory in which downloads land, and the names of rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import NAMESPACE_BYTES, object_name
from nixl_tiers.tiers.s3.concurrency import MOST
from nixl_tiers.tiers.s3.data import MIN_STAGING_ROWS, SPARE_STAGING_ROWS, STAGING_BYTES, _staging
from nixl_tiers.tiers.s3.names import RECENT_NAMES, RowNames

MIB = 1 << 20


@pytest.mark.parametrize(
    ("row_bytes", "rows"),
    [(8 * MIB, MOST + SPARE_STAGING_ROWS), (32 * MIB, 32), (512 * MIB, MIN_STAGING_ROWS)],
)
def test_as_many_downloads_as_are_allowed_have_room_within_a_bound(row_bytes: int, rows: int) -> None:
    staging = _staging(row_bytes)
    assert len(staging) == rows * row_bytes
    assert len(staging) <= max(STAGING_BYTES, MIN_STAGING_ROWS * row_bytes)
    staging.close()


def test_names_of_all_that_may_run_are_kept() -> None:
    assert 2 * MOST <= RECENT_NAMES


def test_staging_rows_stay_out_of_core_dumps() -> None:
    staging = _staging(1 << 20)
    address = np.frombuffer(staging, np.uint8).ctypes.data
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (flags,) = (
        lines.rpartition("VmFlags:")[2].split()
        for lines in mappings
        if int(lines.partition("-")[0], 16) <= address < int(lines.partition("-")[2].partition(" ")[0], 16)
    )
    assert "dd" in flags


@pytest.mark.parametrize(
    "name",
    [
        lambda space, row: f"vk/{space}/{row}",
        lambda space, row: f"kv/{space[:-1]}g/{row}",
        lambda space, row: f"kv/{space[:-1]}/{row}",
        lambda space, row: f"kv/{space}/{row}0",
        lambda space, row: f"kv/x/{space}/{row}",
        lambda space, row: f"kv/{space}/zz/{row[3:]}",
    ],
    ids=["another prefix", "no digits", "too short", "half a byte", "deeper", "another folder"],
)
def test_an_object_with_any_other_name_is_no_row(name: Callable[[str, str], str]) -> None:
    names, space, key = RowNames("kv"), "ab" * NAMESPACE_BYTES, b"key"
    assert names.parse(names.name(space, key)) == (space, key)
    assert names.parse(name(space, object_name(key))) is None
