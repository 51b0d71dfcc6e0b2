"""The journal's bytes are those of docs/reference/formats.md: to change them takes another version number there."""

from __future__ import annotations

import os
import struct

from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import MAX_KEY_BYTES
from nixl_tiers.tiers.slab.journal import ROW, UNKNOWN, Header, decode, tag_of
from tests.support.journals import Record, encode

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
    checksum = bytes.fromhex("819ad66b86a4")  # of version 1
    rest = bytes([len(key), 0x12]) + struct.pack("<II", 0x3456789A, sealed_at) + key.ljust(112, b"\0")
    assert encode(5, Record(key, tick, sealed_at), SALT) == checksum + rest
    (found,) = decode(checksum + rest, 5, SALT)
    assert found.tolist()[:7] == (tag_of(key), tick, 5, sealed_at, ROW, len(key), key.ljust(112, b"\0"))


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    raw = encode(7, Record(b"k" * 36, 5, 1_795_000_000), 99)
    assert decode(raw, 7, 99)["what"] == ROW
    for bit in range(1, 1024):  # the lowest one of a checksum is always 1
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        assert decode(bytes(changed), 7, 99)["what"] == UNKNOWN


def test_key_of_any_length_has_the_tag_of_xxhash() -> None:
    for key in (os.urandom(length) for length in range(1, MAX_KEY_BYTES + 1)):
        for each in (key, key[:-1] + b"\0"):
            (found,) = decode(encode(3, Record(each, 3, 4), 3), 3, 3)
            assert found["key"].tobytes()[: found["key_bytes"]] == each
            assert found["tag"] == tag_of(each)
    assert len({tag_of(bytes(length)) for length in range(1, 113)}) == 112
