"""Columns of listed rows, between processes: all that is refused is refused with a sentence, and leaks nothing."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from nixl_tiers.memory.columns import MOST_ROWS, MOST_WIDTH, ColumnsError, ListedColumns, _places, write
from nixl_tiers.memory.memfd import memfd

WIDTH = 9
ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def columns(count: int) -> int:
    numbers = np.arange(count, dtype=np.uint64)
    records = np.zeros((count, WIDTH), np.uint8)
    records[:, 0] = 8
    records[:, 1:] = numbers.view(np.uint8).reshape(count, 8)
    return write(numbers.astype(np.uint32), 10 * numbers, records)


def content(fd: int) -> bytearray:
    return bytearray(os.pread(fd, 1 << 20, 0))


def sealed(raw: bytes, seals: int = ALL_SEALS) -> int:
    fd = memfd("test")
    os.write(fd, raw)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = {each.name for each in Path("/proc/self/fd").iterdir()}
    yield
    assert {each.name for each in Path("/proc/self/fd").iterdir()} <= before
    assert "nixl_tiers_listing" not in Path("/proc/self/maps").read_text()


def test_what_is_no_memfd_is_refused() -> None:
    with pytest.raises(ColumnsError, match="is not a memfd"):
        ListedColumns.attach(os.open("/dev/null", os.O_RDONLY))


@pytest.mark.parametrize(
    ("seals", "sentence"),
    [
        (0, "the size of the memfd"),
        (fcntl.F_SEAL_GROW, "the size of the memfd"),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "the bytes of the listing"),
    ],
)
def test_what_may_change_is_refused(seals: int, sentence: str) -> None:
    good = columns(3)
    raw = content(good)
    os.close(good)
    with pytest.raises(ColumnsError, match=f"{sentence} behind descriptor .* not sealed"):
        ListedColumns.attach(sealed(bytes(raw), seals))


def test_a_header_with_any_bit_flipped_is_refused() -> None:
    good = columns(3)
    raw = content(good)
    os.close(good)
    for bit in range(8 * 40):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ColumnsError):
            ListedColumns.attach(sealed(bytes(damaged)))


@pytest.mark.parametrize(
    ("count", "width"), [(4, WIDTH), (2, WIDTH), (3, WIDTH + 1), (MOST_ROWS + 1, WIDTH), (0, 1), (0, MOST_WIDTH + 1)]
)
def test_another_size_than_the_header_says_is_refused(count: int, width: int) -> None:
    good = columns(3)
    raw = content(good)
    os.close(good)
    header = struct.pack("<8sQQQ", b"nixlcols", 1, count, width)
    raw[:40] = header + struct.pack("<Q", xxh3_64_intdigest(header))
    with pytest.raises(ColumnsError, match="which is not what its header says"):
        ListedColumns.attach(sealed(bytes(raw)))


def test_more_rows_than_are_handed_over_at_once_are_refused() -> None:
    header = struct.pack("<8sQQQ", b"nixlcols", 1, MOST_ROWS + 1, WIDTH)
    fd = memfd("test")
    os.write(fd, header + struct.pack("<Q", xxh3_64_intdigest(header)))
    os.ftruncate(fd, _places(MOST_ROWS + 1, WIDTH)[2])
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL_SEALS)
    with pytest.raises(ColumnsError, match="which is not what its header says"):
        ListedColumns.attach(fd)
