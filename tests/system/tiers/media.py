"""The media of our own tiers, and the ways past the tiers to them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from nixl_tiers.base.chunk import Geometry, Key, object_name
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.testing.config import MemoryConfig
from nixl_tiers.testing.medium import Medium
from nixl_tiers.testing.memory import MemoryMedium, MemoryTier
from nixl_tiers.tiers.base import StorageTier
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from nixl_tiers.tiers.s3.tier import S3Tier
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import shard_dir
from tests.support.disks import disk_bytes
from tests.support.file_tier import file_config
from tests.support.journals import journal_in, rows
from tests.support.servers import S3Server
from tests.support.times import KEEPS_ITS_RECORD


@dataclass
class Memory(Medium):
    rows: MemoryMedium = field(default_factory=MemoryMedium)
    keeps_recency: ClassVar[bool] = True

    def make(self, geometry: Geometry, region: HostRegion, capacity_bytes: int) -> StorageTier:
        return MemoryTier(MemoryConfig(type="memory", capacity=capacity_bytes), geometry, region, self.rows)

    def read(self, namespace: bytes, slot: int, key: Key) -> bytes:
        return bytes(self.rows.namespaces[namespace][slot].row)

    def write(self, namespace: bytes, slot: int, key: Key, raw: bytes) -> None:
        self.rows.namespaces[namespace][slot].row[:] = raw

    def cut(self, namespace: bytes, slot: int, key: Key, keep_bytes: int) -> None:
        del self.rows.namespaces[namespace][slot].row[keep_bytes:]

    def delete(self, namespace: bytes, slot: int, key: Key) -> None:
        del self.rows.namespaces[namespace][slot]

    def held_rows(self, namespace: bytes) -> int:
        return len(self.rows.namespaces[namespace])

    def held_bytes(self) -> int:
        return self.rows.used_bytes


@dataclass
class SlabFiles(Medium):
    """A directory of the file tier. A slab has no end of a row: what is cut off reads as zeroes, or as a short file."""

    path: Path
    backend: Literal["auto", "posix", "gds_mt"] = "auto"
    erases: ClassVar[bool] = False
    keeps_recency: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    def make(self, geometry: Geometry, region: HostRegion, capacity_bytes: int) -> StorageTier:
        config = file_config(self.path, capacity_bytes, backend=self.backend)
        return SlabTier(config, geometry, region)

    def read(self, namespace: bytes, slot: int, key: Key) -> bytes:
        path, at, size = self._place(namespace, slot)
        with path.open("rb") as file:
            file.seek(at)
            return file.read(size)

    def write(self, namespace: bytes, slot: int, key: Key, raw: bytes) -> None:
        path, at, _ = self._place(namespace, slot)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())

    def cut(self, namespace: bytes, slot: int, key: Key, keep_bytes: int) -> None:
        raw = self.read(namespace, slot, key)
        self.write(namespace, slot, key, raw[:keep_bytes].ljust(len(raw), b"\0"))

    def delete(self, namespace: bytes, slot: int, key: Key) -> None:
        self.cut(namespace, slot, key, 0)

    def held_rows(self, namespace: bytes) -> int:
        return len(rows(journal_in(shard_dir(self.path, namespace))))

    def held_bytes(self) -> int:
        return disk_bytes(self.path)

    def _place(self, namespace: bytes, slot: int) -> tuple[Path, int, int]:
        """File, offset and size of a slot."""
        directory = shard_dir(self.path, namespace)
        about = json.loads((directory / "namespace.json").read_bytes())
        slab, place = divmod(slot, about["slots_per_slab"])
        return directory / f"slab-{slab:05d}.kv", place * about["row_bytes"], about["row_bytes"]


@dataclass
class RowFiles(Medium):
    """A directory of row files."""

    path: Path
    physical_slots: ClassVar[bool] = False
    asked: ClassVar[bool] = True

    def make(self, geometry: Geometry, region: HostRegion, capacity_bytes: int) -> StorageTier:
        config = file_config(self.path, capacity_bytes, layout="files")
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
        self._row(namespace, key).unlink(missing_ok=True)

    def held_rows(self, namespace: bytes) -> int:
        return sum(1 for _ in self.path.glob(f"{namespace.hex()}/*/*.row"))

    def held_bytes(self) -> int:
        return disk_bytes(self.path)

    def _row(self, namespace: bytes, key: Key) -> Path:
        return self.path / namespace.hex() / f"{object_name(key)}.row"


MANY_WINDOWS = 64  # of which one is as large as what a test stores


@dataclass
class Objects(Medium):
    """A prefix of a bucket."""

    server: S3Server
    bucket: str
    prefix: str
    physical_slots: ClassVar[bool] = False
    asked: ClassVar[bool] = True

    def make(self, geometry: Geometry, region: HostRegion, capacity_bytes: int) -> StorageTier:
        where = {"bucket": self.bucket, "prefix": self.prefix, "endpoint": self.server.endpoint}
        config = S3Config(type="s3", capacity=MANY_WINDOWS * capacity_bytes, **where)
        return S3Tier(config, geometry, region, KEEPS_ITS_RECORD)

    def read(self, namespace: bytes, slot: int, key: Key) -> bytes:
        body: bytes = self.server.client().get_object(**self._at(namespace, key))["Body"].read()
        return body

    def write(self, namespace: bytes, slot: int, key: Key, raw: bytes) -> None:
        self.server.client().put_object(**self._at(namespace, key), Body=raw)

    def cut(self, namespace: bytes, slot: int, key: Key, keep_bytes: int) -> None:
        self.write(namespace, slot, key, self.read(namespace, slot, key)[:keep_bytes])

    def delete(self, namespace: bytes, slot: int, key: Key) -> None:
        self.server.client().delete_object(**self._at(namespace, key))

    def held_rows(self, namespace: bytes) -> int:
        return len(self._sizes(f"{self.prefix}/{namespace.hex()}/"))

    def held_bytes(self) -> int:
        return sum(self._sizes(f"{self.prefix}/"))

    def _at(self, namespace: bytes, key: Key) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": f"{self.prefix}/{namespace.hex()}/{object_name(key)}"}

    def _sizes(self, prefix: str) -> list[int]:
        pages: Any = self.server.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        objects = (found for page in pages for found in page.get("Contents", ()))
        return [found["Size"] for found in objects if found["Key"].count("/") > 1]
