"""The records of a journal: 128 bytes a slot, encoded and checked many at a time with numpy.

A record never straddles a 512-byte sector, so a power failure usually leaves the old or the new one; the checksum
decides all the same. It covers the key, the times, the slot number and the file's salt: a record that was moved to
another slot, or comes from another file, is not valid. Anything that is not valid says nothing: its slot is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import MAX_KEY_BYTES

RECORD: Final = np.dtype(
    [
        ("check_low", "<u4"),
        ("check_high", "<u2"),
        ("key_bytes", "u1"),  # 0: the slot is empty
        ("tick_high", "u1"),
        ("tick_low", "<u4"),
        ("sealed_at", "<u4"),
        ("key", f"V{MAX_KEY_BYTES}"),  # zero-padded
    ]
)
RECORD_BYTES: Final = RECORD.itemsize
MAX_TICK: Final = (1 << 40) - 1
"""Ticks count requests; a higher one, which only a defect can make, is recorded as this."""

_CHECK_BITS: Final = np.uint64((1 << 48) - 1)
_MULTIPLIERS: Final = tuple(map(np.uint64, (0x9FB21C651E98DF25, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))  # odd
_FOLD: Final = np.uint64(32)


class Records(NamedTuple):
    """Decoded records, by place. Of invalid ones and of empty slots, tags, ticks and lengths are 0."""

    valid: NDArray[np.bool_]
    tags: NDArray[np.uint64]
    ticks: NDArray[np.int64]
    sealed_at: NDArray[np.uint32]
    lengths: NDArray[np.uint8]
    keys: NDArray[np.void]

    def key(self, place: int) -> bytes:
        """The key of a valid record; b"" if its slot is empty."""
        return bytes(self.keys[place].tobytes()[: int(self.lengths[place])])


def tag_of(key: bytes) -> int:
    """A hash of the key, 64 bits; 0 only for no key."""
    return max(1, xxh3_64_intdigest(key.ljust(MAX_KEY_BYTES, b"\0"), len(key))) if key else 0


def tags_of(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    """`tag_of` each key."""
    return np.fromiter(map(tag_of, keys), np.uint64, len(keys))


def encode(
    slots: NDArray[np.int64],
    keys: Sequence[bytes],
    tags: NDArray[np.uint64],
    ticks: NDArray[np.int64],
    sealed_at: NDArray[np.uint32],
    *,
    salt: int,
) -> NDArray[np.void]:
    """Records for these slots. A key b"": the slot is empty. `tags`: of the keys. Times in Unix seconds; ticks within
    MAX_TICK."""
    records = np.zeros(len(slots), RECORD)
    records["key"] = np.array(keys, f"S{MAX_KEY_BYTES}").view(RECORD["key"])
    records["key_bytes"] = list(map(len, keys))
    records["tick_low"] = ticks & 0xFFFFFFFF
    records["tick_high"] = ticks >> 32
    records["sealed_at"] = sealed_at
    check = _check(records, tags, slots, salt)
    records["check_low"] = check & np.uint64(0xFFFFFFFF)
    records["check_high"] = check >> _FOLD
    return records


def decode(records: NDArray[np.void], slots: NDArray[np.int64], salt: int) -> Records:
    """The records found at these slots' places. About 0.3 us each; several thousand at a time, as some of it holds the
    interpreter lock."""
    lengths = records["key_bytes"].copy()
    lengths[lengths > MAX_KEY_BYTES] = 0  # not valid then: the checksum covers the byte itself
    tags = np.zeros(len(records), np.uint64)
    keyed = np.flatnonzero(lengths)
    keys = np.ascontiguousarray(records["key"])
    raw = keys[keyed].tolist()
    hashes = np.fromiter(map(xxh3_64_intdigest, raw, lengths[keyed].tolist()), np.uint64, len(raw))
    tags[keyed] = np.maximum(hashes, 1)  # as `tag_of`
    found = records["check_low"] | records["check_high"].astype(np.uint64) << _FOLD
    valid = found == _check(records, tags, slots, salt)
    ticks = records["tick_low"] | records["tick_high"].astype(np.int64) << 32
    bad = ~valid
    for column in (tags, ticks, lengths):
        column[bad] = 0
    return Records(valid, tags, ticks, np.where(valid, records["sealed_at"], 0), lengths, keys)


def _check(
    records: NDArray[np.void], tags: NDArray[np.uint64], slots: NDArray[np.int64], salt: int
) -> NDArray[np.uint64]:
    """48 bits: the key's tag, which is XXH3, mixed with everything else. Never 0, which is a record of zeroes."""
    words = (
        slots.astype(np.uint64),
        records["tick_low"] | records["tick_high"].astype(np.uint64) << _FOLD,
        records["sealed_at"] | records["key_bytes"].astype(np.uint64) << _FOLD,
    )
    check = tags ^ np.uint64(salt)
    for word, multiplier in zip(words, _MULTIPLIERS, strict=True):
        check = (check ^ word) * multiplier
        check ^= check >> _FOLD
    return (check & _CHECK_BITS) | np.uint64(1)
