"""The journal's bytes are those of docs/reference/formats.md: to change them takes another version number there."""

from __future__ import annotations

import struct

import numpy as np
from xxhash import xxh3_64_intdigest

from nixl_tiers.tiers.slab.journal_file import Header, encode, tag_of

SALT = 0x0123456789ABCDEF
BOOT = bytes(range(16))


def test_header_is_as_documented() -> None:
    head = b"nixljrnl" + struct.pack("<IIQ", 1, 128, SALT) + BOOT + struct.pack("<Q", 1)
    page = (head + struct.pack("<Q", xxh3_64_intdigest(head))).ljust(4096, b"\0")
    assert Header(SALT, BOOT, flushed=True).pack() == page
    assert Header.read(page) == Header(SALT, BOOT, flushed=True)
    later = head.replace(struct.pack("<I", 1), struct.pack("<I", 2), 1)
    assert Header.read(later + struct.pack("<Q", xxh3_64_intdigest(later))) is None


def test_record_is_as_documented() -> None:
    key, tick, sealed_at = b"key of this chunk", 0x12_3456_789A, 1_790_000_000
    slots, ticks, times = np.array([5]), np.array([tick]), np.array([sealed_at], np.uint32)
    (record,) = encode(slots, [key], np.array([tag_of(key)], np.uint64), ticks, times, salt=SALT)
    checksum = bytes.fromhex("819ad66b86a4")  # of version 1
    rest = bytes([len(key), 0x12]) + struct.pack("<II", 0x3456789A, sealed_at) + key.ljust(112, b"\0")
    assert record.tobytes() == checksum + rest
