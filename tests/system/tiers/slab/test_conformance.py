"""The file tier keeps the contract, with slots in slab files."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from tests.system.tiers.media import SlabFiles


class TestFileStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path)
