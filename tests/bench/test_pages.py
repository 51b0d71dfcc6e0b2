"""Regions with pages of a chosen kind."""

from __future__ import annotations

import pytest

from bench.pages import PAGES, Unavailable, make_region
from nixl_tiers.base.chunk import PAGE, Geometry


@pytest.mark.parametrize("pages", PAGES)
def test_region_has_the_pages_or_says_why_not(pages: str) -> None:
    try:
        region = make_region(Geometry(1, PAGE), 600, pages)
    except Unavailable as error:
        if pages != "huge" or not any(reason in str(error) for reason in ("shmem_enabled", "in one piece")):
            raise
        return
    with region:
        assert region.huge_bytes is not None
        assert (region.huge_bytes >= 0.9 * region.nbytes) == (pages == "huge")
        assert not region.rows_view.any()
