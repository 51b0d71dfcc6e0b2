"""Which rows a file tier stages: a rule, of the region's pages and the size of its rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import staging
from nixl_tiers.tiers.staging import STORE_ROW_BYTES, Staging
from tests.support.file_tier import file_config

SMALL, LARGE = Geometry(1, STORE_ROW_BYTES - 8192), Geometry(1, STORE_ROW_BYTES)
AGENT: Any = SimpleNamespace(register_dram=lambda *_: None)


def opened(path: Path, region: HostRegion, **fields: Any) -> Staging:
    made = Staging(file_config(path, "1GiB", **fields), region, AGENT)
    made.open()
    return made


@pytest.mark.parametrize(
    ("geometry", "pages", "staged"),
    [
        (SMALL, (None, "write `advise`"), (True, False)),
        (LARGE, (None, "write `advise`"), (True, True)),
        (LARGE, (None, ""), (False, False)),  # it may get huge pages
        (SMALL, (0.5, ""), (True, False)),
        (LARGE, (0.5, ""), (True, True)),
        (LARGE, (1.0, ""), (False, False)),
        (SMALL, (1.0, ""), (False, False)),
    ],
)
def test_staged_are_loads_and_stores_of_large_rows_where_pages_are_small(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    geometry: Geometry,
    pages: tuple[float | None, str],
    staged: tuple[bool, bool],
) -> None:
    """`pages`: the share of the region's bytes in huge pages, None: it is not prefaulted yet; why the kernel gives it
    none."""
    huge_share, advice = pages
    assert SMALL.row_bytes < STORE_ROW_BYTES <= LARGE.row_bytes
    monkeypatch.setattr(staging, "advice", lambda: advice)
    huge = None if huge_share is None else (lambda region: int(huge_share * region.nbytes))
    monkeypatch.setattr(HostRegion, "huge_bytes", property(huge or (lambda _: None)))
    with HostRegion.create(geometry, 4) as region:
        assert opened(tmp_path, region).staged == staged


def test_no_buffer_where_nothing_can_be_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of small rows go directly."""
    monkeypatch.setattr(staging, "advice", lambda: "write `advise`")
    with HostRegion.create(SMALL, 4) as region:
        made = opened(tmp_path, region)
        assert made.loads._buffer is not None
        assert made.stores._buffer is None
