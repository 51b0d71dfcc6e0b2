"""The memory in which downloads land."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from nixl_tiers.tiers.s3.data import _staging


def test_staging_rows_stay_out_of_core_dumps() -> None:
    staging = _staging(16, 1 << 20)
    address = np.frombuffer(staging, np.uint8).ctypes.data
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (flags,) = (
        lines.rpartition("VmFlags:")[2].split()
        for lines in mappings
        if int(lines.partition("-")[0], 16) <= address < int(lines.partition("-")[2].partition(" ")[0], 16)
    )
    assert "dd" in flags
