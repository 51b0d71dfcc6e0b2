"""The compact index: what it finds, removes and evicts, against a dict; what it refuses; how small it is."""

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

import nixl_tiers
from nixl_tiers.chunk import MAX_KEY_BYTES
from nixl_tiers.memory import cold_index as module
from nixl_tiers.memory.cold_index import ColdIndexBuilder, ColdIndexError, SharedColdIndex, key_digest, key_digests
from nixl_tiers.memory.memfd import CHECK
from tests.memory.descriptors import descriptors, is_open


class Row(NamedTuple):
    key: bytes
    slot: int
    tick: int


def build(rows: Sequence[Row], slots_limit: int, batch: int = 1 << 20) -> tuple[int, list[int]]:
    """The table's descriptor and the rows that were left out."""
    builder = ColdIndexBuilder()
    for part in (rows[at : at + batch] for at in range(0, len(rows), batch)):
        builder.add_many(
            key_digests(row.key for row in part),
            np.array([row.slot for row in part], np.uint32),
            np.array([row.tick for row in part], np.uint32),
        )
    fd = builder.build(slots_limit)
    return fd, builder.left_out.tolist()


def attached(rows: Sequence[Row], slots_limit: int) -> SharedColdIndex:
    return SharedColdIndex.attach(build(rows, slots_limit)[0])


def slots_of(index: SharedColdIndex, limit: int) -> list[int]:
    taken = bytearray(limit)
    index.claim(taken, limit)
    return [slot for slot in range(limit) if taken[slot]]


def many(count: int) -> list[Row]:
    """Rows whose order of use is neither that of their slots nor that in which they are added."""
    return [Row(b"key %d" % n, n * 7 % count, n * 11 % count // 2) for n in range(count)]


def image(fd: int) -> bytearray:
    return bytearray(os.pread(fd, os.fstat(fd).st_size, 0))


def memfd(contents: bytes, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, contents)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


# Digests that share their first half, so that all rows share a bucket; and that can be found across two neighbours.
def one_bucket(key: bytes) -> bytes:
    return bytes(8) + key_digest(key)[:8]


def alike(key: bytes) -> bytes:
    return bytes([key_digest(key)[0] % 2] * 8) + bytes([key_digest(key)[1] % 2] * 8)


KEYS = [b"%d" % n for n in range(40)]
ROWS = st.lists(st.builds(Row, st.sampled_from(KEYS), st.integers(0, 50), st.integers(0, 5)), max_size=60)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("find"), st.sampled_from(KEYS)),
        st.tuples(st.just("remove"), st.sampled_from(KEYS)),
        st.tuples(st.just("coldest"), st.integers(0, 8)),
    ),
    max_size=40,
)


class Model:
    """The same in a dict, from digest to (slot, tick), the coldest first."""

    def __init__(self, rows: Sequence[Row], slots_limit: int, digest: Callable[[bytes], bytes]) -> None:
        newest_first = sorted(range(len(rows)), key=lambda n: (rows[n].tick, n), reverse=True)
        digests: set[bytes] = set()
        slots: set[int] = set()
        kept: list[int] = []
        for n in newest_first:
            if rows[n].slot < slots_limit and digest(rows[n].key) not in digests:
                digests.add(digest(rows[n].key))
                if rows[n].slot not in slots:
                    slots.add(rows[n].slot)
                    kept.append(n)
        self.rows = {digest(rows[n].key): (rows[n].slot, rows[n].tick) for n in reversed(kept)}
        self.left_out = sorted(set(range(len(rows))) - set(kept))
        self.digest = digest

    def find(self, key: bytes) -> tuple[int, int] | None:
        return self.rows.get(self.digest(key))

    def remove(self, key: bytes) -> tuple[int, int] | None:
        return self.rows.pop(self.digest(key), None)

    def coldest(self, count: int) -> list[tuple[bytes, int]]:
        return [(digest, self.rows.pop(digest)[0]) for digest in list(itertools.islice(self.rows, count))]

    def claim(self, taken: bytearray, slots_limit: int) -> None:
        for digest, (slot, _) in list(self.rows.items()):
            if slot >= slots_limit or taken[slot]:
                del self.rows[digest]
            else:
                taken[slot] = 1

    def release(self, taken: bytearray) -> None:
        for slot, _ in self.rows.values():
            taken[slot] = 0


@settings(max_examples=200, deadline=None)
@given(
    rows=ROWS,
    steps=STEPS,
    slots_limit=st.integers(0, 60),
    digest=st.sampled_from([key_digest, one_bucket, alike]),
    taken=st.tuples(st.lists(st.booleans(), max_size=70), st.integers(0, 2)),
)
def test_it_behaves_like_a_dict_in_order_of_use(
    rows: list[Row],
    steps: list[tuple[str, object]],
    slots_limit: int,
    digest: Callable[[bytes], bytes],
    taken: tuple[list[bool], int],
) -> None:
    """`taken`: what may be taken of the map that it comes into; whether that is, and whether some rows have gone."""
    slots_taken, others = taken
    model = Model(rows, slots_limit, digest)
    with mock.patch.object(module, "key_digest", digest), mock.patch.object(module, "_REFILL", 4):
        fd, left_out = build(rows, slots_limit, batch=25)
        assert left_out == model.left_out
        with SharedColdIndex.attach(fd) as index:
            before = bytearray(slot_taken and others > 0 for slot_taken in slots_taken)
            if others > 1:
                assert index.coldest(3) == model.coldest(3)
            slot_map, expected = bytearray(before), bytearray(before)
            index.claim(slot_map, len(slot_map))
            model.claim(expected, len(expected))
            assert slot_map == expected
            for name, argument in steps:
                assert getattr(index, name)(argument) == getattr(model, name)(argument), (name, argument)
                assert len(index) == len(model.rows)
            index.release(slot_map)
            model.release(expected)
            assert slot_map == expected
            assert [index.find(key) for key in KEYS] == [model.find(key) for key in KEYS]
            assert index.coldest(100) == model.coldest(100)
            assert len(index) == 0
            assert index.coldest(1) == []


def test_thousands_of_rows_are_found_and_evicted_in_order_of_use() -> None:
    rows = many(20_000)
    with attached(rows, len(rows)) as index:
        assert all(index.find(row.key) == (row.slot, row.tick) for row in rows)
        assert not any(index.find(b"no " + row.key) for row in rows)
        used = set(rows[1::3])
        assert all(index.remove(row.key) == (row.slot, row.tick) for row in used)
        assert not any(index.remove(row.key) for row in used)
        left = sorted((row for row in rows if row not in used), key=lambda row: row.tick)
        assert len(index) == len(left)
        victims = index.coldest(5_000)
        assert victims == [(key_digest(row.key), row.slot) for row in left[:5_000]]
        assert not any(index.find(row.key) for row in left[:5_000])
        assert all(index.find(row.key) for row in left[5_000:])


def test_a_row_is_not_evicted_when_it_was_removed_after_colder_ones_were_evicted() -> None:
    rows = [Row(b"%d" % n, n, n) for n in range(4)]
    with attached(rows, 4) as index:
        assert [slot for _, slot in index.coldest(1)] == [0]
        index.remove(b"1")
        index.claim(bytearray(4), 3)
        assert [slot for _, slot in index.coldest(4)] == [2]


def test_one_row_left_of_many_is_still_the_coldest() -> None:
    rows = many(20_000)
    with attached(rows, len(rows)) as index:
        last = max(rows, key=lambda row: row.tick)
        for row in rows:
            if row != last:
                index.remove(row.key)
        assert len(index) == 1
        assert index.coldest(2) == [(key_digest(last.key), last.slot)]


@pytest.mark.parametrize("slots_limit", [0, 1, 1000])
def test_an_empty_index(slots_limit: int) -> None:
    with attached([], slots_limit) as index:
        assert len(index) == 0
        assert index.find(b"key") is None
        assert index.remove(b"key") is None
        assert index.coldest(3) == []
        assert slots_of(index, slots_limit) == []


def test_an_index_of_one_row_in_the_last_slot() -> None:
    with attached([Row(b"key", 8, 3)], 9) as index:
        assert index.find(b"key") == (8, 3)
        assert slots_of(index, 9) == [8]
        assert index.coldest(1) == [(key_digest(b"key"), 8)]
        assert index.find(b"key") is None


def test_the_whole_key_is_compared() -> None:
    long = b"k" * (MAX_KEY_BYTES - 1)
    keys = [long + b"a", long + b"b", long, b"k", b"\0", b"\0\0"]
    with attached([Row(key, slot, 0) for slot, key in enumerate(keys)], len(keys)) as index:
        assert [index.find(key) for key in keys] == [(slot, 0) for slot in range(len(keys))]
        assert index.find(long + b"c") is None


@pytest.mark.parametrize("keys", [[b"a"], [b"", b"bc", bytes(MAX_KEY_BYTES), b"\0\0", b"\xff\0"]])
def test_an_index_may_hold_keys(keys: list[bytes]) -> None:
    rows = [Row(key, slot, slot) for slot, key in enumerate(keys)]
    width = 1 + max(map(len, keys))
    column = b"".join((bytes([len(key)]) + key).ljust(width, b"-") for key in keys)
    builder = ColdIndexBuilder()
    builder.add_many(key_digests(keys), *(np.arange(len(rows), dtype=np.uint32) for _ in range(2)))
    fd = builder.build(len(rows), np.frombuffer(column, np.uint8).reshape(-1, width))
    with SharedColdIndex.attach(fd) as index:
        assert index.named
        assert index.coldest(9) == [(row.key, row.slot) for row in rows]


def test_a_digest_gives_the_number_of_the_added_row() -> None:
    rows = many(1000)
    builder = ColdIndexBuilder()
    builder.add_many(
        key_digests(row.key for row in rows),
        np.array([row.slot for row in rows], np.uint32),
        np.array([row.tick for row in rows], np.uint32),
    )
    with SharedColdIndex.attach(builder.build(1000)) as index:
        index.coldest(500)
        assert not index.named
        assert [builder.order[index.built(key_digest(row.key))] for row in rows] == list(range(1000))
        assert index.built(key_digest(b"no such row")) == -1


def test_slots_and_ticks_use_all_of_their_range() -> None:
    rows = [Row(b"new", 0, 0xFFFFFFFF), Row(b"old", 1, 0)]
    with attached(rows, 2) as index:
        assert index.find(b"new") == (0, 0xFFFFFFFF)
        assert [slot for _, slot in index.coldest(2)] == [1, 0]


def test_digests_are_the_same_as_in_earlier_versions() -> None:
    assert key_digest(b"nixl_tiers").hex() == "e51585a5f9d7a8fc2aa13d6f35c4325d"


def test_buckets_cannot_be_chosen_through_keys() -> None:
    rows = many(1000)
    with attached(rows, 1000) as one, attached(rows, 1000) as other:
        assert [one._name(row) for row in range(1000)] != [other._name(row) for row in range(1000)]


@pytest.mark.parametrize("rows", [100_000, (1 << 17) + 1])
def test_a_row_takes_at_most_32_bytes_with_its_slot(rows: int) -> None:
    builder = ColdIndexBuilder()
    digests = np.random.default_rng(1).integers(0, 256, (rows, 16), np.uint8)
    builder.add_many(digests, np.arange(rows, dtype=np.uint32), np.arange(rows, dtype=np.uint32))
    fd = builder.build(rows)
    taken = os.fstat(fd).st_blocks * 512
    os.close(fd)
    assert taken + rows <= 32 * rows  # the engine's map of slots takes a byte a row


def test_an_index_built_by_another_process_and_sent_over_a_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = (
        "import socket, sys, numpy as np\n"
        "from nixl_tiers.memory.cold_index import ColdIndexBuilder, key_digests\n"
        "builder = ColdIndexBuilder()\n"
        "builder.add_many(key_digests([b'a', b'b']), np.array([4, 2], np.uint32), np.array([9, 8], np.uint32))\n"
        "socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b'index'], [builder.build(5)])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(nixl_tiers.__file__).parents[1])}
    with ours, theirs:
        arguments = [sys.executable, "-c", script, str(theirs.fileno())]
        subprocess.run(arguments, pass_fds=[theirs.fileno()], env=environment, check=True, timeout=300)
        _, (fd,), _, _ = socket.recv_fds(ours, 16, 1)
    with SharedColdIndex.attach(fd) as index:
        assert (index.find(b"a"), index.find(b"b")) == ((4, 9), (2, 8))
        assert slots_of(index, 5) == [2, 4]
        assert index.coldest(5) == [(key_digest(b"b"), 2), (key_digest(b"a"), 4)]


def test_close_releases_everything() -> None:
    before = descriptors()
    index = attached(many(100), 100)
    index.coldest(1)
    slots_of(index, 100)
    index.close()
    index.close()
    assert descriptors() == before
    assert "nixl_tiers_index" not in Path("/proc/self/maps").read_text()
    assert len(index) == 0
    assert index.find(b"key 1") is None
    assert index.coldest(1) == []


IMPOSSIBLE = [
    (1, 2, "version 2"),
    (2, 1 << 40, "header"),
    (3, 0, "header"),
    (3, 60, "header"),
    (4, 1 << 60, "header"),
    (6, 1 << 40, "header"),
]


class TestRefusals:
    @staticmethod
    def refused(fd: int) -> str:
        with pytest.raises(ColdIndexError) as refusal:
            SharedColdIndex.attach(fd)
        assert not is_open(fd)
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    @pytest.fixture
    def good(self) -> bytearray:
        fd, _ = build(many(50), 50)
        raw = image(fd)
        os.close(fd)
        return raw

    def test_the_copy_of_a_good_one_is_not_refused(self, good: bytearray) -> None:
        with SharedColdIndex.attach(memfd(good)) as index:
            assert len(index) == 50

    def test_what_is_no_memfd(self) -> None:
        with tempfile.TemporaryFile() as file:
            assert "not a memfd" in self.refused(os.dup(file.fileno()))

    def test_a_size_that_may_change(self, good: bytearray) -> None:
        for seals in (0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK):
            assert "not sealed" in self.refused(memfd(good, seals))

    def test_something_else(self) -> None:
        for contents in (b"", b"nixlindx", b"nixlregn" + bytes(8192), bytes(4096)):
            assert "is not a cold index" in self.refused(memfd(contents))

    def test_a_header_with_any_bit_flipped(self, good: bytearray) -> None:
        for bit in range((module._HEADER.size + CHECK.size) * 8):
            good[bit // 8] ^= 1 << bit % 8
            self.refused(memfd(good))
            good[bit // 8] ^= 1 << bit % 8

    def test_another_size_than_the_header_says(self, good: bytearray) -> None:
        for wrong in (good[:-4096], good + bytes(4096)):
            assert f"has {len(wrong)} bytes" in self.refused(memfd(wrong))

    @pytest.mark.parametrize(("field", "value", "message"), IMPOSSIBLE)
    def test_a_header_of_impossible_values(self, good: bytearray, field: int, value: int, message: str) -> None:
        values = list(module._HEADER.unpack_from(good))
        values[field] = value
        header = module._HEADER.pack(*values)
        good[: len(header) + 8] = header + CHECK.pack(module.xxh3_64_intdigest(header))
        assert message in self.refused(memfd(good))

    def test_rows_of_other_shapes_or_types(self) -> None:
        builder = ColdIndexBuilder()
        words, digests = np.zeros(2, np.uint32), np.zeros((2, 16), np.uint8)
        for wrong in (
            (digests[:1], words, words),
            (digests[:, :8], words, words),
            (digests.astype(np.uint16), words, words),
            (digests, words, words[:1]),
            (digests, words.astype(np.int64), words),
        ):
            with pytest.raises(ValueError, match=r"must be uint(8|32)"):
                builder.add_many(*wrong)

    def test_no_memory_for_it(self) -> None:
        with mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")):
            before = descriptors()
            with pytest.raises(ColdIndexError, match="No space left"):
                ColdIndexBuilder().build(5)
            assert descriptors() == before
