"""Which rows a file tier stages: a rule, of the region's pages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import staging
from nixl_tiers.tiers.staging import Staging
from tests.support.file_tier import file_config

GEOMETRY = Geometry(1, 65536)
AGENT: Any = SimpleNamespace(register_dram=lambda *_: None)


def opened(path: Path, region: HostRegion) -> Staging:
    made = Staging(file_config(path, "1GiB"), region, AGENT)
    made.open()
    return made


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
    with HostRegion.create(GEOMETRY, 4) as region:
        assert opened(tmp_path, region).staged == (staged, staged)
