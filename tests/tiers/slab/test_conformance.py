"""The file tier keeps the contract, with slots in slab files."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from nixl_tiers.tiers.slab import worker
from tests.tiers.media import SlabFiles


class TestFileStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path)


class TestStagedFileStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path, staging="on")


@pytest.mark.skipif(not worker.available(), reason="the native worker was not built")
class TestNativeFileStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path, backend="native")


@pytest.mark.skipif(not worker.available(), reason="the native worker was not built")
class TestStagedNativeFileStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path, staging="on", backend="native")
