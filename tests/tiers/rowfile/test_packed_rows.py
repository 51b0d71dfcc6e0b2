"""Packed rows are a dict of rows in less memory: compared with one after any sequence of changes."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nixl_tiers.tiers.rowfile.packed_rows import (
    BLOCK_BYTES,
    COLUMNS,
    INDEXED,
    PRESENT,
    SERVABLE,
    KnownRow,
    PackedRows,
    decoded,
    encoded,
    key_array,
)

# Keys that differ only in trailing zeroes, begin with one another, and have all lengths.
KEYS = st.builds(
    lambda head, zeroes: head + bytes(zeroes), st.sampled_from([b"", b"\0", b"a", b"ab", b"b" * 36]), st.integers(1, 8)
)
ROWS = st.builds(KnownRow, st.integers(-5, 10**18), st.integers(0, 9).map(lambda n: n * BLOCK_BYTES), st.integers(0, 3))


class Books(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rows = PackedRows()
        self.files: dict[bytes, KnownRow] = {}
        self.indexed: set[bytes] = set()

    @rule(key=KEYS, row=ROWS)
    def put(self, key: bytes, row: KnownRow) -> None:
        known = self.files.get(key)
        self.rows.put(key, row, SERVABLE)
        if known is not None and not row.age_from:
            row = row._replace(age_from=known.age_from)
        self.files[key] = row

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        self.rows.remove(key)
        self.files.pop(key, None)

    @rule(key=KEYS, indexed=st.booleans())
    def set_indexed(self, key: bytes, indexed: bool) -> None:
        assert self.rows.set_indexed(key, indexed) == (key in self.indexed)
        (self.indexed.add if indexed else self.indexed.discard)(key)

    @rule(key=KEYS, age_from=st.integers(1, 5))
    def set_age(self, key: bytes, age_from: int) -> None:
        self.rows.set_age(key, age_from)
        if key in self.files:
            self.files[key] = self.files[key]._replace(age_from=age_from)

    @rule(rows=st.dictionaries(KEYS, ROWS, max_size=40))
    def add_many(self, rows: dict[bytes, KnownRow]) -> None:
        rows = {key: row for key, row in rows.items() if key not in self.files}
        keys = key_array(map(encoded, rows))
        ordered = [rows[decoded(raw)] for raw in keys.tolist()]
        columns = np.array([(row.mtime_ns, row.disk_bytes // BLOCK_BYTES, row.age_from) for row in ordered], COLUMNS)
        self.rows.add_many(keys, columns, np.full(len(keys), SERVABLE, np.uint8))
        self.files |= rows

    @rule(keys=st.sets(KEYS))
    def remove_many(self, keys: set[bytes]) -> None:
        self.rows.remove_many(key_array(map(encoded, keys)))
        for key in keys:
            self.files.pop(key, None)

    @invariant()
    def equals_the_model(self) -> None:
        rows, files = self.rows, self.files
        assert {key: rows.get(key) for key in files} == files
        flags = dict(zip(map(decoded, rows.keys.tolist()), rows.flags.tolist(), strict=True))
        assert {key for key, flag in flags.items() if flag & PRESENT} == set(files)
        assert {key for key, flag in flags.items() if flag & SERVABLE} == set(files)
        assert {key for key, flag in flags.items() if flag & INDEXED} == self.indexed
        assert (rows.present, rows.indexed) == (len(files), len(self.indexed))
        assert rows.disk_bytes == sum(row.disk_bytes for row in files.values())
        assert rows.empty == (not files and not self.indexed)

    @rule()
    def present_keys_are_sorted(self) -> None:
        found = self.rows.present_keys().tolist()
        assert found == sorted(raw.rstrip(b"\0") for raw in map(encoded, self.files))


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_age_of_a_file_that_is_gone_is_not_that_of_the_next_one() -> None:
    rows, key = PackedRows(), b"key"
    rows.set_indexed(key, True)
    rows.set_age(key, 7)
    rows.put(key, KnownRow(1, BLOCK_BYTES, 0))
    assert rows.get(key) == KnownRow(1, BLOCK_BYTES, 0)


def test_a_row_takes_less_than_64_bytes() -> None:
    rows, random = PackedRows(), np.random.default_rng(0)
    for _ in range(2000):
        rows.put(random.bytes(36), KnownRow(10**18, 1 << 21, 10**9), SERVABLE)
    held = sum(array.nbytes for array in (rows._keys, rows._columns, rows._flags))
    assert held < 64 * 2000
    assert len(rows._tail) <= 2000 // 32
