"""The file tier keeps the contract, with slots in slab files."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from tests.tiers.media import LoadedBeside, SlabFiles


class TestFileStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path)


class TestFileStorageByNixl(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path, backend="posix")


class TestStagedFileStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path, staging="on")


class TestStagedFileStorageByNixl(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path, staging="on", backend="posix")


class TestFileStorageWithALoader(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return LoadedBeside(tmp_path)
