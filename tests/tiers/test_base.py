"""What all tiers share: ages, text that can be sent, and which rows a file tier stages."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, decode_to_coordinator, encode, sendable_text
from nixl_tiers.tiers import staging
from nixl_tiers.tiers.base import expire_if_due, expired, sweep_s
from nixl_tiers.tiers.staging import Staging
from tests.support.file_tier import file_config


def test_what_is_too_old_and_how_often_to_look() -> None:
    now, age_s = 1_800_000_000.0, 3600.0
    ages = [0.0, now - age_s - 1, now - age_s, now - age_s + 1, now, now + 1e8]
    old = [True, True, True, False, False, False]
    assert [expire_if_due(sealed_at, now, age_s) for sealed_at in ages] == old
    assert expired(np.array(ages, np.uint32), now, age_s).tolist() == old
    assert not expire_if_due(0.0, now, None)
    assert [sweep_s(age_s) for age_s in (1.0, 600.0, 86400.0)] == [0.1, 60.0, 60.0]


def test_name_of_a_foreign_file_that_is_no_utf8_can_be_sent() -> None:
    reason = sendable_text(f"{os.fsdecode(bytes([255]))} cannot be read" + "x" * 5000)
    found = decode_to_coordinator(encode(Down(reason, 0)))
    assert isinstance(found, Down)
    assert found.reason.startswith("\\udcff cannot be read")


@pytest.mark.parametrize(
    ("huge_share", "advice", "staged"),
    [(None, "write `advise`", True), (None, "", False), (0.5, "", True), (1.0, "", False)],
    ids=["none to be had", "may get them", "half", "all"],
)
def test_rows_are_staged_where_pages_are_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, huge_share: float | None, advice: str, staged: bool
) -> None:
    """`huge_share`: of the region's bytes in huge pages, None: it is not prefaulted yet; `advice`: why the kernel gives
    it none."""
    monkeypatch.setattr(staging, "advice", lambda: advice)
    huge = None if huge_share is None else (lambda region: int(huge_share * region.nbytes))
    monkeypatch.setattr(HostRegion, "huge_bytes", property(huge or (lambda _: None)))
    agent: Any = SimpleNamespace(register_dram=lambda *_: None)
    with HostRegion.create(Geometry(1, 65536), 4) as region:
        made = Staging(file_config(tmp_path, "1GiB"), region, agent)
        made.open()
        assert made.staged == (staged, staged)
