"""The file tier keeps the contract, with one file a row."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from nixl_tiers.chunk import Geometry, Key, object_name
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from nixl_tiers.tiers.base import StorageTier
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from tests.support.disks import disk_bytes


@dataclass
class RowFiles(Medium):
    """A directory of row files."""

    path: Path
    physical_slots: ClassVar[bool] = False
    exact: ClassVar[bool] = False  # names in directories are counted ahead

    def make(self, geometry: Geometry, region: HostRegion, capacity_bytes: int) -> StorageTier:
        config = FileConfig(type="file", path=self.path, capacity=capacity_bytes, layout="files")
        return RowFileTier(config, geometry, region)

    def read(self, namespace: bytes, slot: int, key: Key) -> bytes:
        return self._row(namespace, key).read_bytes()

    def write(self, namespace: bytes, slot: int, key: Key, raw: bytes) -> None:
        with self._row(namespace, key).open("r+b") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())

    def cut(self, namespace: bytes, slot: int, key: Key, keep_bytes: int) -> None:
        os.truncate(self._row(namespace, key), keep_bytes)

    def delete(self, namespace: bytes, slot: int, key: Key) -> None:
        self._row(namespace, key).unlink()

    def held_rows(self, namespace: bytes) -> int:
        return sum(1 for _ in self.path.glob(f"{namespace.hex()}/*/*.row"))

    def held_bytes(self) -> int:
        return disk_bytes(self.path)

    def _row(self, namespace: bytes, key: Key) -> Path:
        return self.path / namespace.hex() / f"{object_name(key)}.row"


class TestFilesStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return RowFiles(tmp_path)
