"""Row tables: what they find, remove and evict, against a dict; what they refuse; how small they are."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

import nixl_tiers
from nixl_tiers.base.chunk import MAX_KEY_BYTES, PAGE
from nixl_tiers.memory import key_hash, row_table, row_table_build, row_table_format
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.memfd import CHECK
from nixl_tiers.memory.row_table import Rows, RowTable, RowTableError
from tests.memory.descriptors import descriptors, image, is_open, memfd

HASH = KeyHash(0x9E3779B97F4A7C15)


class Row(NamedTuple):
    key: bytes
    slot: int
    tick: int


def rows_of(rows: Sequence[Row], batch: int = 1 << 20) -> Rows:
    result = Rows()
    for part in (rows[at : at + batch] for at in range(0, len(rows), batch)):
        result.add([row.key for row in part], [row.slot for row in part], [row.tick for row in part])
    return result


def built(rows: Sequence[Row], tables: Sequence[RowTable] = (), slots_limit: int | None = None) -> RowTable:
    return RowTable.build(rows_of(rows), tables, key_hash=HASH, slots_limit=slots_limit)


def attached(rows: Sequence[Row], slots_limit: int | None = None) -> RowTable:
    return RowTable.attach(RowTable.build_shared(rows_of(rows), key_hash=HASH, slots_limit=slots_limit)[0])


def claimed(table: RowTable, taken: bytearray, step: int = 1 << 20) -> int:
    table.prepare_slots()
    count = sum(table.claim(taken, start, start + step) for start in range(0, max(1, table.slots_end), step))
    table.drop_unclaimed(len(taken))
    return count


def many(count: int) -> list[Row]:
    """Rows whose order of use is neither that of their slots nor that in which they are added."""
    return [Row(b"key %d" % n, n * 7 % count, n * 11 % count // 2) for n in range(count)]


# Keys of several lengths, of which some can be found across two neighbours of one bucket.
KEYS = [*(b"%d" % n for n in range(30)), b"\1" * 3, b"\1" * 2, b"\1", b"\0", b"\0\0", b"\2\1\1", b"k" * MAX_KEY_BYTES]
ROWS = st.lists(st.builds(Row, st.sampled_from(KEYS), st.integers(0, 50), st.integers(0, 5)), max_size=60)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("find"), st.tuples(st.sampled_from(KEYS))),
        st.tuples(st.just("remove"), st.tuples(st.sampled_from(KEYS))),
        st.tuples(st.just("coldest"), st.tuples(st.integers(0, 8), st.none() | st.integers(0, 5))),
        st.tuples(st.just("coldest_tick"), st.just(())),
    ),
    max_size=40,
)


class Model:
    """The same in a dict, from key to (slot, tick), the coldest first."""

    def __init__(self, rows: Sequence[Row], slots_limit: int | None = None) -> None:
        keys: set[bytes] = set()
        slots: set[int] = set()
        kept: list[Row] = []
        for number in sorted(range(len(rows)), key=lambda number: (rows[number].tick, number), reverse=True):
            row = rows[number]
            if (slots_limit is None or row.slot < slots_limit) and row.key not in keys:
                keys.add(row.key)
                if slots_limit is None or row.slot not in slots:
                    slots.add(row.slot)
                    kept.append(row)
        self.rows = {row.key: (row.slot, row.tick) for row in reversed(kept)}

    def find(self, key: bytes) -> tuple[int, int] | None:
        return self.rows.get(key)

    def remove(self, key: bytes) -> tuple[int, int] | None:
        return self.rows.pop(key, None)

    def coldest_tick(self) -> int | None:
        return next((tick for _, tick in self.rows.values()), None)

    def coldest(self, count: int, before: int | None = None) -> list[tuple[bytes, int]]:
        cold = (key for key, (_, tick) in self.rows.items() if before is None or tick <= before)
        return [(key, self.rows.pop(key)[0]) for key in list(itertools.islice(cold, count))]

    def claim(self, taken: bytearray) -> None:
        for key, (slot, _) in list(self.rows.items()):
            if slot >= len(taken) or taken[slot]:
                del self.rows[key]
            else:
                taken[slot] = 1


def only(hashes: int) -> list[mock._patch[object]]:
    """Patches with which there are only so many hashes: their keys share buckets, filters, and both."""

    def few(key: bytes, seed: int) -> int:
        return int(xxh3_64_intdigest(key, seed) % hashes)

    return [mock.patch.object(module, "xxh3_64_intdigest", few) for module in (row_table, key_hash)]


@settings(max_examples=100, deadline=None)
@given(
    rows=ROWS,
    more=ROWS,
    steps=STEPS,
    slots_limit=st.none() | st.integers(0, 60),
    claim=st.tuples(st.sampled_from([1, 2, 9, 1 << 64]), st.lists(st.booleans(), max_size=70), st.integers(1, 80)),
)
def test_it_behaves_like_a_dict_in_order_of_use(
    rows: list[Row],
    more: list[Row],
    steps: list[tuple[str, tuple[int, ...]]],
    slots_limit: int | None,
    claim: tuple[int, list[bool], int],
) -> None:
    """`more`: rows that another table is built of, with what is left of the first one. `claim`: how many hashes there
    are; the map of slots into which the other table comes, and how many of them at a time."""

    def apply(table: RowTable, model: Model) -> None:
        for name, arguments in steps:
            assert getattr(table, name)(*arguments) == getattr(model, name)(*arguments), (name, arguments)
            assert len(table) == len(model.rows)
        assert [table.find(key) for key in KEYS] == [model.find(key) for key in KEYS]
        assert sorted(table.keys()) == sorted(model.rows)

    hashes, taken, step = claim
    patches: list[mock._patch[object]] = [
        mock.patch.multiple(row_table, _REFILL=4, _REFILLS=100, _PIECE=7),
        mock.patch.object(row_table_build, "_PIECE", 5),
        *only(hashes),
    ]
    for patch in patches:
        patch.start()
    try:
        model = Model(rows, slots_limit)
        fd, left_out = RowTable.build_shared(rows_of(rows, 25), key_hash=HASH, slots_limit=slots_limit)
        kept = {(key, slot) for key, (slot, _) in model.rows.items()}
        assert {(key, slot) for slot, key in left_out} >= {(row.key, row.slot) for row in rows} - kept
        assert len(left_out) == len(rows) - len(kept)
        with RowTable.attach(fd) as first:
            apply(first, model)
            left = [Row(key, *entry) for key, entry in model.rows.items()]
            merged_model = Model(left + more)
            with built(more, [first]) as merged:
                apply(merged, merged_model)
                assert [first.find(key) for key in KEYS] == [model.find(key) for key in KEYS]
            model = Model(left + more, slots_limit=60)
            with built(more, [first], slots_limit=60) as merged:
                slot_map, expected = bytearray(taken), bytearray(taken)
                before = sum(expected)
                model.claim(expected)
                assert claimed(merged, slot_map, step) == len(merged) == sum(expected) - before
                assert slot_map == expected
                assert [merged.find(key) for key in KEYS] == [model.find(key) for key in KEYS]
                merged.prepare_slots()
                released = sum(merged.release(slot_map, start, start + step) for start in range(0, 80, step))
                assert released == len(merged)
                assert slot_map == bytearray(taken)
                assert merged.coldest(100) == model.coldest(100)
                assert len(merged) == 0
                assert merged.coldest(1) == []
    finally:
        for patch in patches:
            patch.stop()


def test_thousands_of_rows_are_found_and_evicted_in_order_of_use() -> None:
    rows = many(20_000)
    with attached(rows, len(rows)) as table:
        assert all(table.find(row.key) == (row.slot, row.tick) for row in rows)
        assert not any(table.find(b"no " + row.key) for row in rows)
        used = set(rows[1::3])
        assert all(table.remove(row.key) == (row.slot, row.tick) for row in used)
        assert not any(table.remove(row.key) for row in used)
        left = sorted((row for row in rows if row not in used), key=lambda row: row.tick)
        assert len(table) == len(left)
        victims = table.coldest(5_000)
        assert victims == [(row.key, row.slot) for row in left[:5_000]]
        assert not any(table.find(row.key) for row in left[:5_000])
        assert all(table.find(row.key) for row in left[5_000:])


def hashed(count: int) -> list[Row]:
    """Rows whose keys are as long as vLLM's, and share the last bytes; each third one shares more with another."""
    keys = [xxh3_64_intdigest(b"%d" % (n - n % 3)).to_bytes(8, "big") * 4 + b"%04d" % (n % 3) for n in range(count)]
    return [Row(key, slot, slot) for slot, key in enumerate(keys)]


@pytest.mark.parametrize("make", [built, attached])
def test_many_keys_are_found_at_once(make: Callable[[Sequence[Row]], RowTable]) -> None:
    rows = hashed(3_000)
    with make(rows[::2]) as table:
        for row in rows[::8]:
            table.remove(row.key)
        keys = [row.key for row in rows]
        assert table.has_many(keys) == [table.find(key) is not None for key in keys]
        assert sum(table.has_many(keys)) == 1_125
        assert table.has_many(keys[:5]) == [False, False, True, False, True]
        assert table.has_many([*keys, b"short"])[2:] == [*table.has_many(keys)[2:], False]
        assert table.has_many([key + key for key in keys[:40]]) == [False] * 40
        assert table.has_many([]) == []
    assert table.has_many(keys) == [False] * len(keys)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8)), min_size=1, max_size=20))
def test_damaged_bytes_raise_nothing_when_many_keys_are_looked_up(damage: list[tuple[int, bytes]]) -> None:
    rows = hashed(200)
    fd, _ = RowTable.build_shared(rows_of(rows), key_hash=HASH)
    raw = image(fd)
    os.close(fd)
    for place, contents in damage:
        at = PAGE + place % (len(raw) - PAGE - len(contents))
        raw[at : at + len(contents)] = contents
    with RowTable.attach(memfd(raw)) as table:
        assert len(table.has_many([row.key for row in rows])) == 200


def test_three_tables_and_new_rows_become_one() -> None:
    rows = many(9_000)
    tables = [built(rows[start::4]) for start in range(3)]
    for table in tables:
        table.coldest(100)
    gone = {row.key for start in range(3) for row in sorted(rows[start::4], key=lambda row: row.tick)[:100]}
    with built(rows[3::4], tables) as merged:
        assert len(merged) == 9_000 - 300
        for row in rows:
            assert merged.find(row.key) == (None if row.key in gone else (row.slot, row.tick))
    assert sum(map(len, tables)) == 6_750 - 300


def test_a_call_passes_over_a_bounded_number_of_removed_rows() -> None:
    rows = sorted(many(20_000), key=lambda row: row.tick)
    with attached(rows, len(rows)) as table:
        for row in rows[:-1]:
            table.remove(row.key)
        ticks, victims = [], []
        while not victims:
            ticks.append(table.coldest_tick())
            with mock.patch.object(RowTable, "_refill", autospec=True, side_effect=RowTable._refill) as refill:
                victims = table.coldest(2)
            assert refill.call_count <= row_table._REFILLS + 1
        assert victims == [(rows[-1].key, rows[-1].slot)]
        assert 1 < len(ticks) < 20
        assert all(tick is not None and tick <= rows[-1].tick for tick in ticks)
        assert table.coldest_tick() is None


@pytest.mark.parametrize("slots_limit", [None, 0, 1, 1000])
def test_an_empty_table(slots_limit: int | None) -> None:
    with attached([], slots_limit) as table, built([], slots_limit=slots_limit) as other:
        for each in (table, other):
            assert len(each) == 0
            assert each.find(b"key") is None
            assert each.remove(b"key") is None
            assert each.coldest(3) == []
            assert claimed(each, bytearray(10)) == 0


def test_the_whole_key_is_compared() -> None:
    long = b"k" * (MAX_KEY_BYTES - 1)
    keys = [long + b"a", long + b"b", long, b"k", b"\0", b"\0\0"]
    with attached([Row(key, slot, 0) for slot, key in enumerate(keys)], len(keys)) as table:
        assert [table.find(key) for key in keys] == [(slot, 0) for slot in range(len(keys))]
        assert table.find(long + b"c") is None
        assert table.coldest(9) == [(key, slot) for slot, key in enumerate(keys)]


def test_most_missing_keys_end_at_the_filter() -> None:
    searched: list[bytes] = []

    def search(_table: RowTable, key: bytes, _bucket: int, _word: int) -> None:
        searched.append(key)

    with built(many(5_000)) as table, mock.patch.object(RowTable, "_search_bucket", search):
        for number in range(5_000):
            table.find(b"no key %d" % number)
        assert len(searched) < 750  # 8 %
        searched.clear()
        assert table.remove(b"key 7") is None
        assert searched == [b"key 7"]


def test_a_row_that_is_removed_while_it_is_copied_is_left_out() -> None:
    rows = many(100)
    with built(rows) as table:
        sources = [table.left()]
        table.remove(rows[7].key)
        with mock.patch.object(RowTable, "left", side_effect=sources.pop), built([], [table]) as merged:
            assert len(merged) == 99
            assert merged.remove(rows[7].key) is None
            assert [key for key, _ in merged.coldest(100)] == [key for key, _ in table.coldest(100)]


def test_slots_and_ticks_use_all_of_their_range() -> None:
    rows = [Row(b"new", 0, 1 << 40), Row(b"old", 0xFFFFFFFE, -1), Row(b"no place", 0xFFFFFFFF, 5)]
    with attached(rows) as table:
        assert table.find(b"new") == (0, 0xFFFFFFFF)
        assert [slot for _, slot in table.coldest(2)] == [0xFFFFFFFE, 0]
        assert len(table) == 0


class TestKeyHash:
    def test_many_hashes_are_those_of_each_key(self) -> None:
        keys = [os.urandom(1 + n % MAX_KEY_BYTES) for n in range(500)]
        keys += [b"\0", b"\0\0", b"a", b"a\0"]
        for each in (HASH, KeyHash(0), KeyHash.random()):
            records = np.zeros((len(keys), 1 + MAX_KEY_BYTES), np.uint8)
            for record, key in zip(records, keys, strict=True):
                record[: 1 + len(key)] = np.frombuffer(bytes([len(key)]) + key, np.uint8)
            assert each.of_records(records).tolist() == [each.of_key(key) for key in keys]

    def test_buckets_cannot_be_chosen_through_keys(self) -> None:
        keys = [b"key %d" % n for n in range(1000)]
        orders = [sorted(keys, key=each.of_key) for each in (KeyHash.random(), KeyHash.random())]
        assert orders[0] != orders[1]

    @pytest.mark.parametrize("structure", [b"%d", b"\0\0\0\0%d", b"%024d" + bytes(12), b"%d" + b"\xff" * 60])
    def test_keys_of_any_structure_spread_over_the_buckets(self, structure: bytes) -> None:
        key_hash = KeyHash.random()
        hashes = [key_hash.of_key(structure % n) for n in range(4096)]
        for buckets in (1024, 1025):  # as for filters, and as in a table of 4096 rows
            assert np.bincount([each % buckets for each in hashes]).max() <= 40  # four on average


@pytest.mark.parametrize("rows", [100_000, (1 << 17) + 1])
def test_a_row_takes_at_most_53_bytes_with_its_slot(rows: int) -> None:
    keys = np.random.default_rng(1).integers(0, 256, (rows, 36), np.uint8)
    fd, _ = RowTable.build_shared(
        rows_of([Row(key.tobytes(), n, n) for n, key in enumerate(keys)]), key_hash=HASH, slots_limit=rows
    )
    taken = os.fstat(fd).st_blocks * 512
    os.close(fd)
    assert taken + rows <= 53 * rows  # the engine's map of slots takes a byte a row


def test_a_table_built_by_another_process_and_sent_over_a_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = (
        "import socket, sys\n"
        "from nixl_tiers.memory.key_hash import KeyHash\n"
        "from nixl_tiers.memory.row_table import Rows, RowTable\n"
        "rows = Rows()\n"
        "rows.add([b'a', b'b'], [4, 2], [9, 8])\n"
        "fd, _ = RowTable.build_shared(rows, key_hash=KeyHash.random())\n"
        "socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b'index'], [fd])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(nixl_tiers.__file__).parents[1])}
    with ours, theirs:
        arguments = [sys.executable, "-c", script, str(theirs.fileno())]
        subprocess.run(arguments, pass_fds=[theirs.fileno()], env=environment, check=True, timeout=300)
        _, (fd,), _, _ = socket.recv_fds(ours, 16, 1)
    with RowTable.attach(fd) as table:
        assert (table.find(b"a"), table.find(b"b")) == ((4, 9), (2, 8))
        slots = bytearray(5)
        assert claimed(table, slots) == 2
        assert slots == b"\0\0\1\0\1"
        assert table.coldest(5) == [(b"b", 2), (b"a", 4)]


@pytest.mark.parametrize("make", [built, attached])
def test_close_releases_everything(make: Callable[[Sequence[Row]], RowTable]) -> None:
    before = descriptors()
    table = make(many(100))
    table.coldest(1)
    claimed(table, bytearray(100))
    table.close()
    table.close()
    assert descriptors() == before
    assert "nixl_tiers_rows" not in Path("/proc/self/maps").read_text()
    assert len(table) == 0
    assert table.find(b"key 1") is None
    assert table.coldest(1) == []
    assert table.coldest_tick() is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8)), min_size=1, max_size=20))
def test_damaged_bytes_raise_nothing(damage: list[tuple[int, bytes]]) -> None:
    """Behind the header, which is checked. What a damaged table says is wrong, so the loads that rely on it fail."""
    rows = many(200)
    fd, _ = RowTable.build_shared(rows_of(rows), key_hash=HASH, slots_limit=200)
    raw = image(fd)
    os.close(fd)
    for place, contents in damage:
        at = PAGE + place % (len(raw) - PAGE - len(contents))
        raw[at : at + len(contents)] = contents
    with RowTable.attach(memfd(raw)) as table:
        with built(rows[:3], [table]) as merged:
            assert len(merged) <= 203
        for row in rows[::2]:
            table.find(row.key)
            table.remove(row.key)
        keys = list(table.keys())
        victims = table.coldest(300)
        assert max(len(keys), len(victims)) <= 200
        assert all(len(key) <= len(b"key 199") for key in (*keys, *(key for key, _ in victims)))


IMPOSSIBLE = [
    (1, 1, "version 1"),
    (2, 1 << 40, "header"),
    (2, 600, "header"),
    (3, 51, "header"),
    (4, 0, "header"),
    (4, 200, "header"),
    (4, 1 << 60, "header"),
]


class TestRefusals:
    @staticmethod
    def refused(fd: int) -> str:
        with pytest.raises(RowTableError) as refusal:
            RowTable.attach(fd)
        assert not is_open(fd)
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    @pytest.fixture
    def good(self) -> bytearray:
        fd, _ = RowTable.build_shared(rows_of(many(50)), key_hash=HASH, slots_limit=50)
        raw = image(fd)
        os.close(fd)
        return raw

    def test_the_copy_of_a_good_one_is_not_refused(self, good: bytearray) -> None:
        with RowTable.attach(memfd(good)) as table:
            assert len(table) == 50

    def test_what_is_no_memfd(self) -> None:
        with tempfile.TemporaryFile() as file:
            assert "not a memfd" in self.refused(os.dup(file.fileno()))

    def test_a_size_that_may_change(self, good: bytearray) -> None:
        for seals in (0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK):
            assert "not sealed" in self.refused(memfd(good, seals))

    def test_something_else(self) -> None:
        for contents in (b"", b"nixlrows", b"nixlregn" + bytes(8192), bytes(4096)):
            assert "is not a row table" in self.refused(memfd(contents))

    def test_a_header_with_any_bit_flipped(self, good: bytearray) -> None:
        for bit in range((row_table_format._HEADER.size + CHECK.size) * 8):
            good[bit // 8] ^= 1 << bit % 8
            self.refused(memfd(good))
            good[bit // 8] ^= 1 << bit % 8

    def test_another_size_than_the_header_says(self, good: bytearray) -> None:
        for wrong in (good[:-4096], good + bytes(4096)):
            assert f"has {len(wrong)} bytes" in self.refused(memfd(wrong))

    @pytest.mark.parametrize(("field", "value", "message"), IMPOSSIBLE)
    def test_a_header_of_impossible_values(self, good: bytearray, field: int, value: int, message: str) -> None:
        values = list(row_table_format._HEADER.unpack_from(good))
        values[field] = value
        header = row_table_format._HEADER.pack(*values)
        good[: len(header) + 8] = header + CHECK.pack(xxh3_64_intdigest(header))
        assert message in self.refused(memfd(good))

    def test_no_memory_for_it(self) -> None:
        with mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")):
            before = descriptors()
            with pytest.raises(RowTableError, match="No space left"):
                RowTable.build_shared(Rows(), key_hash=HASH)
            assert descriptors() == before
