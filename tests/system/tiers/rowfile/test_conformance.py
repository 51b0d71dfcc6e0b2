"""The file tier keeps the contract, with one file a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from tests.system.tiers.media import RowFiles


class TestFilesStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return RowFiles(tmp_path)
