"""Where rows are stored, as the faults see it: each row can be read and written over while no engine runs."""

from __future__ import annotations

import json
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 4, 4, 32, 128
ROW_BYTES: Final = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * BLOCK_TOKENS
"""Payload of a row in float32."""
_JOURNAL_PAGE, _RECORD, _KEY_LENGTH_AT = 4096, 128, 6  # docs/reference/formats.md


class Place(ABC):
    @abstractmethod
    def rows(self) -> list[Any]:
        """All rows that are stored, in an order that follows their names."""

    @abstractmethod
    def read(self, row: Any) -> bytes: ...

    @abstractmethod
    def write(self, row: Any, content: bytes) -> None: ...

    @abstractmethod
    def keep(self, copy: Path) -> None:
        """A copy of all that is stored."""

    @abstractmethod
    def put_back(self, copy: Path) -> None:
        """Into a place where nothing is stored."""


@dataclass(frozen=True)
class Folder(Place):
    """A row a file: vLLM's, LMCache's, and `layout: files` of nixl_tiers."""

    path: Path

    def rows(self) -> list[Path]:
        return sorted(file for file, size in self.sizes().items() if size >= ROW_BYTES // 4 and file.suffix != ".tmp")

    def sizes(self) -> dict[Path, int]:
        found = {}
        for file in self.path.rglob("*"):
            try:
                if file.is_file():
                    found[file] = file.stat().st_size
            except OSError:
                continue  # gone meanwhile
        return found

    def read(self, row: Path) -> bytes:
        return row.read_bytes()

    def write(self, row: Path, content: bytes) -> None:
        row.write_bytes(content)

    def keep(self, copy: Path) -> None:
        shutil.copytree(self.path, copy)

    def put_back(self, copy: Path) -> None:
        shutil.copytree(copy, self.path, dirs_exist_ok=True)


class Slabs(Folder):
    """`layout: slabs` of nixl_tiers: many rows in a file."""

    def rows(self) -> list[Any]:
        found = []
        for about in sorted(self.path.glob("part-*/*/namespace.json")):
            shape, journal = json.loads(about.read_text()), about.with_name("manifest.journal").read_bytes()
            for slot in range(shape["slots"]):
                record = _JOURNAL_PAGE + _RECORD * slot
                if journal[record + _KEY_LENGTH_AT : record + _KEY_LENGTH_AT + 1] > b"\0":
                    slab, number = divmod(slot, shape["slots_per_slab"])
                    file = about.with_name(f"slab-{slab:05d}.kv")
                    found.append((file, number * shape["row_bytes"], shape["row_bytes"]))
        return found

    def read(self, row: Any) -> bytes:
        file, start, length = row
        with Path(file).open("rb") as opened:
            opened.seek(start)
            return opened.read(length)

    def write(self, row: Any, content: bytes) -> None:
        file, start, _ = row
        with Path(file).open("r+b") as opened:
            opened.seek(start)
            opened.write(content)


@dataclass(frozen=True)
class Bucket(Place):
    server: Any
    """tests.support.servers.S3Server"""
    name: str
    endpoint: str
    """Where engines find it: the server, or a proxy before it."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def rows(self) -> list[str]:
        return sorted(name for name, size in self._objects().items() if size >= ROW_BYTES // 4)

    def _objects(self) -> dict[str, int]:
        pages = self.server.client().get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return {found["Key"]: found["Size"] for page in pages for found in page.get("Contents", ())}

    def read(self, row: str) -> bytes:
        content: bytes = self.server.client().get_object(Bucket=self.name, Key=row)["Body"].read()
        return content

    def write(self, row: str, content: bytes) -> None:
        self.server.client().put_object(Bucket=self.name, Key=row, Body=content)

    def keep(self, copy: Path) -> None:
        for name in self._objects():
            file = copy / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.read(name))

    def put_back(self, copy: Path) -> None:
        for file in copy.rglob("*"):
            if file.is_file():
                self.write(str(file.relative_to(copy)), file.read_bytes())


def flip(place: Place, every: int = 1) -> int:
    """One byte of every row, or of every second: the highest of a float32 in the middle, in which one bit of its
    exponent is flipped. Returns how many rows there are."""
    rows = place.rows()
    for row in rows[::every]:
        content = bytearray(place.read(row))
        content[ROW_BYTES // 2 + 3] ^= 0x40
        place.write(row, bytes(content))
    return len(rows)


def swap(place: Place) -> int:
    """The bytes of each row with those of its neighbour by name."""
    rows = place.rows()
    for one, other in zip(rows[::2], rows[1::2], strict=False):
        first, second = place.read(one), place.read(other)
        place.write(one, second)
        place.write(other, first)
    return len(rows)


def wait_until_stored(place: Place, rows: int, quiet_s: float = 3.0, timeout_s: float = 120.0) -> int:
    """Until that many rows are stored, or none has come for `quiet_s` seconds. Returns how many there are."""
    until = time.monotonic() + timeout_s
    found, since = -1, time.monotonic()
    while found < rows and time.monotonic() - since < quiet_s and time.monotonic() < until:
        now = len(place.rows())
        if now != found:
            found, since = now, time.monotonic()
        time.sleep(0.1)
    return found
