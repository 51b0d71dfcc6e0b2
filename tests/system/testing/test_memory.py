"""The in-memory tier keeps the contract."""

from __future__ import annotations

import pytest

from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from tests.system.tiers.media import Memory


class TestMemoryStorage(StorageTierTests):
    @pytest.fixture
    def medium(self) -> Medium:
        return Memory()
