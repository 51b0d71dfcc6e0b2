"""The journal of a shard as its file has it, read past the tier."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from nixl_tiers.base.chunk import PAGE
from nixl_tiers.tiers.slab.journal_file import NAME, RECORD, RECORD_BYTES, Header, decode


class Record(NamedTuple):
    """A valid record; key b"": the slot is empty."""

    key: bytes
    tick: int
    sealed_at: int


def records(journal: Path) -> dict[int, Record]:
    """The valid records by slot."""
    return records_of(journal.read_bytes())


def records_of(raw: bytes) -> dict[int, Record]:
    """The valid records in the contents of a journal."""
    header = Header.read(raw)
    if header is None:
        return {}
    body = raw[PAGE:]
    slots = np.arange(len(body) // RECORD_BYTES)
    found = decode(np.frombuffer(body[: len(slots) * RECORD_BYTES], RECORD), slots, header.salt)
    return {
        slot: Record(found.key(slot), int(found.ticks[slot]), int(found.sealed_at[slot]))
        for slot in np.flatnonzero(found.valid).tolist()
    }


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
