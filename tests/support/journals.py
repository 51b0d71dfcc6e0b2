"""The journal of a shard as its file has it, read and written past the tier, as 3229999f did it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import PAGE
from nixl_tiers.tiers.slab.journal import NAME, RECORD_BYTES, Header

_RECORD: Final = struct.Struct("<IHBBII112s")


class Record(NamedTuple):
    """A valid record; key b"": the slot is empty."""

    key: bytes
    tick: int
    sealed_at: int


def encode(slot: int, record: Record, salt: int) -> bytes:
    """By docs/reference/formats.md."""
    key = record.key.ljust(112, b"\0")
    check = (max(1, xxh3_64_intdigest(key, len(record.key))) if record.key else 0) ^ salt
    words = (slot, record.tick, record.sealed_at | len(record.key) << 32)
    for word, multiplier in zip(words, (0x9FB21C651E98DF25, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB), strict=True):
        check = (check ^ word) * multiplier % 2**64
        check ^= check >> 32
    check |= 1
    low, high = check & 0xFFFFFFFF, check >> 32 & 0xFFFF
    tick_low, tick_high = record.tick & 0xFFFFFFFF, record.tick >> 32
    return _RECORD.pack(low, high, len(record.key), tick_high, tick_low, record.sealed_at, key)


def records(journal: Path) -> dict[int, Record]:
    """The valid records by slot."""
    return records_of(journal.read_bytes())


def records_of(raw: bytes) -> dict[int, Record]:
    """The valid records in the contents of a journal."""
    header = Header.read(raw)
    found = {}
    for slot in range((len(raw) - PAGE) // RECORD_BYTES if header else 0):
        one = raw[PAGE + slot * RECORD_BYTES : PAGE + (slot + 1) * RECORD_BYTES]
        if any(one[:6]):
            _, _, length, tick_high, tick_low, sealed_at, key = _RECORD.unpack(one)
            record = Record(key[:length], tick_low | tick_high << 32, sealed_at)
            if length <= len(key) and header is not None and encode(slot, record, header.salt) == one:
                found[slot] = record
    return found


def rows(journal: Path) -> dict[int, bytes]:
    """The keys by slot."""
    return {slot: record.key for slot, record in records(journal).items() if record.key}


def journal_in(shard: Path) -> Path:
    return shard / NAME


def overwrite_record(journal: Path, slot: int, raw: bytes = bytes(RECORD_BYTES)) -> None:
    """Zeroes: the slot is unknown."""
    with journal.open("r+b") as file:
        file.seek(PAGE + slot * RECORD_BYTES)
        file.write(raw)
