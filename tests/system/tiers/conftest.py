"""What tests of both file tiers use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nixl_tiers.memory.region import HostRegion
from tests.system.tiers.file_tiers import GEOMETRY, ROWS


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(GEOMETRY, ROWS) as region:
        yield region
