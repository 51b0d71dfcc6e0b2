"""Keys, row geometry and the namespace: what a chunk is, before anything moves it.

Everything here is a value. A key names a chunk's content; a geometry says how its bytes lie in a row;
a namespace is the fingerprint of all that must agree before two engines may share those bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Final

PAGE: Final = 4096
PIECE_BYTES: Final = 1 << 30
"""How much of the host region is allocated and page-locked at once: some kernels from 6.11 on lock less than 2 GiB
(TensorRT-LLM, PR 17773)."""
MAX_KEY_BYTES: Final = 112
NAMESPACE_BYTES: Final = 16
NAMESPACE_NAME: Final = re.compile(r"[0-9a-f]{32}")
"""A namespace in hexadecimal, as directories are named by it, and objects."""

Key = bytes
_KEY_SIZES: Final = range(1, MAX_KEY_BYTES + 1)


def align(size: int, to: int = PAGE) -> int:
    """`size` rounded up to a multiple of `to`, in bytes."""
    return -(-size // to) * to


def pieces_of(rows: int, row_bytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """The rows in pieces that end on row boundaries: from which row on, and before which."""
    step = max(1, piece_bytes // row_bytes)
    return [(begin, min(rows, begin + step)) for begin in range(0, rows, step)]


def check_key(key: Key) -> None:
    """Raise TypeError unless `key` is bytes, ValueError unless it has 1 to MAX_KEY_BYTES of them."""
    if not isinstance(key, bytes):
        raise TypeError(f"a key must be bytes, not {type(key).__name__}")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key must have 1 to {MAX_KEY_BYTES} bytes, this one has {len(key)}")


def check_keys(keys: Collection[Key]) -> None:
    """`check_key` of each."""
    if set(map(type, keys)) - {bytes} or not all(map(_KEY_SIZES.__contains__, map(len, keys))):
        for key in keys:
            check_key(key)


def object_name(key: Key) -> str:
    """A key's name below its namespace in an object store: a two-digit fan-out folder and the key in hexadecimal."""
    return f"{hashlib.blake2b(key, digest_size=1).hexdigest()}/{key.hex()}"


def key_of_object(name: str) -> Key | None:
    """The inverse of object_name, or None if `name` is not such a name."""
    fan_out, _, digits = name.partition("/")
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        return None
    if not 0 < len(key) <= MAX_KEY_BYTES or object_name(key) != f"{fan_out}/{digits}":
        return None
    return key


class Outcome(IntEnum):
    """The result of one move. Of a load, anything but OK is a miss for the requests that wait for the row."""

    OK = 0
    MISSING = 1  # nothing is stored there
    CORRUPT = 2  # its seal does not match: another row, or corrupt bytes
    FAILED = 3  # an I/O error: the bytes may still be good
    NO_SPACE = 4  # a store that the medium has no room for
    FOUND = 5  # a store of a row that the medium has already


FULL: Final = "full"
FAILING: Final = "writing"
UNREACHABLE: Final = "unreachable"
"""Kinds of what a medium does not do now (`StorageTier.denials`). Each other kind is one of requests that it denies."""


@dataclass(frozen=True)
class Geometry:
    """How one row is laid out: `cells` cells of `cell_payload` bytes, each padded to whole pages, then the seal.

    A cell is one rank's part of the chunk; inside a cell, the bytes of one block of vLLM (all layers of it)
    are contiguous: sub-block b is at b * (cell_payload // sub_blocks).
    """

    cells: int
    cell_payload: int
    sub_blocks: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1")
        if self.cell_payload % self.sub_blocks:
            raise ValueError(f"a cell of {self.cell_payload} bytes does not hold {self.sub_blocks} equal blocks")

    @cached_property
    def sub_block_bytes(self) -> int:
        return self.cell_payload // self.sub_blocks

    def present(self, missing: int) -> int:
        """The bitmap of a row's sub-blocks, bit b for sub-block b, where the first `missing` hold nothing."""
        return (1 << self.sub_blocks) - (1 << min(missing, self.sub_blocks))

    @cached_property
    def cell_bytes(self) -> int:
        """Distance from one cell to the next: a multiple of PAGE."""
        return align(self.cell_payload)

    @cached_property
    def seal_bytes(self) -> int:
        """Bytes that the seal takes at the row's end (format version 1, docs/reference/formats.md), a multiple of 8."""
        return 80 + MAX_KEY_BYTES + align(self.sub_blocks, 64) // 8 + 16 * self.cells + 16

    @cached_property
    def row_bytes(self) -> int:
        """Distance from one row to the next: a multiple of PAGE. The seal uses the last cell's padding if it fits."""
        cells = self.cells * self.cell_bytes
        padding = self.cell_bytes - self.cell_payload
        return cells if padding >= self.seal_bytes else cells + align(self.seal_bytes)

    @cached_property
    def payload_bytes(self) -> int:
        return self.cells * self.cell_payload


@dataclass(frozen=True)
class Namespace:
    """All that must agree before bytes may be shared, digested; `epoch` 0 means the weights as they were loaded."""

    facts: tuple[tuple[str, str], ...]
    epoch: int = 0

    @classmethod
    def of(cls, facts: Mapping[str, object], epoch: int = 0) -> Namespace:
        return cls(tuple(sorted((name, str(value)) for name, value in facts.items())), epoch)

    @property
    def digest(self) -> bytes:
        """16 bytes (BLAKE2b) over all facts and the epoch, length-prefixed so that no two sets read the same."""
        digest = hashlib.blake2b(digest_size=NAMESPACE_BYTES)
        for pair in (*self.facts, ("epoch", str(self.epoch))):
            for text in pair:
                raw = text.encode()
                digest.update(len(raw).to_bytes(4, "little") + raw)
        return digest.digest()
