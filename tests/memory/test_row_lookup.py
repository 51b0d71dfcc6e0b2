"""Many keys looked up at once: what the C function finds is what is found one by one."""

from __future__ import annotations

import ctypes
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_tiers.base.chunk import MAX_KEY_BYTES, PAGE
from nixl_tiers.memory import row_lookup as module
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.row_table import Rows, RowTable
from tests.memory.descriptors import image, memfd
from tests.support.compiled import shared_library

HASH = KeyHash(0x9E3779B97F4A7C15)
KNOWN = range(17, MAX_KEY_BYTES + 1)  # lengths whose hash it knows


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    opened = module._open(shared_library("row_lookup", tmp_path_factory.mktemp("row_lookup"), "-O2"))
    assert opened is not None
    return opened


@pytest.fixture
def compiled(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_library", lambda: library)


def keys_of(length: int, count: int) -> list[bytes]:
    """Keys that differ in one byte only, early or late."""
    ends = [number.to_bytes(2, "big").rjust(length, b"k")[-length:] for number in range(count // 2)]
    return ends + [end[::-1] for end in ends]


def table_of(keys: list[bytes]) -> RowTable:
    rows = Rows()
    rows.add(keys, range(len(keys)), range(len(keys)))
    return RowTable.build(rows, key_hash=HASH)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("length", [3, 8, 16, *KNOWN])
def test_keys_of_any_length_are_found(length: int) -> None:
    keys = list(dict.fromkeys(keys_of(length, module.PIECE + 400)))  # more than one call looks up
    with table_of(keys[::2]) as table:
        for key in keys[::6]:
            table.remove(key)
        one_by_one = [table.find(key) is not None for key in keys]
        assert sum(one_by_one) >= len(keys) // 4
        assert table.has_many(keys) == one_by_one
        assert (module.has_many(table._table, keys) is not None) == (length in KNOWN)


@pytest.mark.usefixtures("compiled")
def test_keys_longer_than_any_of_the_table_are_not_there() -> None:
    keys = keys_of(20, 100)
    with table_of(keys) as table:
        assert table.has_many([key + b"\0" for key in keys]) == [False] * len(keys)
        assert table.has_many(keys) == [True] * len(keys)


@pytest.mark.usefixtures("compiled")
def test_keys_of_several_lengths_are_looked_up_one_by_one() -> None:
    short, long = keys_of(20, 100), keys_of(40, 100)
    with table_of(short + long) as table:
        assert table.has_many(short + long) == [True] * 200
        assert module.has_many(table._table, short + long) is None


@pytest.mark.usefixtures("compiled")
def test_a_closed_table_is_not_read() -> None:
    keys = keys_of(20, 100)
    table, unmapped = table_of(keys), table_of(keys)
    table.close()
    unmapped.unmap()
    assert table.has_many(keys) == [False] * len(keys)
    with pytest.raises(ValueError, match="released"):
        unmapped.has_many(keys)


def test_without_the_library_they_are_found_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_library", lambda: None)
    keys = keys_of(20, 100)
    with table_of(keys[::2]) as table:
        assert table.has_many(keys) == [True, False] * 50


def test_a_library_of_another_version_is_not_used(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABI", module.ABI + 1)
    assert module._open(library._name) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8)), min_size=1, max_size=20))
def test_nothing_beyond_a_damaged_table_is_read(library: ctypes.CDLL, damage: list[tuple[int, bytes]]) -> None:
    keys = keys_of(36, 200)
    rows = Rows()
    rows.add(keys, range(len(keys)), range(len(keys)))
    fd, _ = RowTable.build_shared(rows, key_hash=HASH)
    raw = image(fd)
    os.close(fd)
    for place, contents in damage:
        at = PAGE + place % (len(raw) - PAGE - len(contents))
        raw[at : at + len(contents)] = contents
    with pytest.MonkeyPatch.context() as patch, RowTable.attach(memfd(raw)) as table:
        patch.setattr(module, "_library", lambda: library)
        assert len(table.has_many(keys)) == len(keys)
