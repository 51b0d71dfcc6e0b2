"""Hash and copy in one pass: xxhash's digests, the same bytes, and nothing beyond them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_digest

from nixl_tiers.base import native
from nixl_tiers.memory import seal as module
from nixl_tiers.memory.seal import hash_copy
from tests.support.compiled import shared_library

PAST_END = 256  # bytes behind the target that must stay as they are


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = shared_library("hash_copy", tmp_path_factory.mktemp("hash_copy"), "-O3")
    return module._open(native.HASH_COPY._replace(path=str(path)))


class NoAvx2:
    """The library on a processor where it leaves all to its caller."""

    def nixl_tiers_hash_copy(self, *arguments: int) -> int:
        return 0


@pytest.fixture(params=["c", "no avx2"])
def way(request: pytest.FixtureRequest, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "_library", lambda: library if request.param == "c" else NoAvx2())
    return str(request.param)


def aligned(nbytes: int, skew: int = 0) -> np.ndarray:
    """Zeros that begin `skew` bytes behind a page."""
    raw = np.zeros(nbytes + 4096 + skew, np.uint8)
    first = -raw.ctypes.data % 4096 + skew
    return raw[first : first + nbytes]


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def check(nbytes: int, piece_bytes: int, to_skew: int = 0, from_skew: int = 0) -> None:
    source, target = noise(nbytes + from_skew)[from_skew:], aligned(nbytes + PAST_END, to_skew)
    digests = hash_copy(target[:nbytes], source, piece_bytes)
    pieces = [source[at : at + piece_bytes] for at in range(0, nbytes, piece_bytes)]
    assert digests == b"".join(xxh3_64_digest(piece.tobytes()) for piece in pieces)
    assert np.array_equal(target[:nbytes], source)
    assert not target[nbytes:].any()


def test_compiled_function_does_all_where_the_processor_can(library: ctypes.CDLL) -> None:
    source, target = noise(1 << 20), aligned(1 << 20)
    digests = np.empty(16, np.uint64)
    arguments = target.ctypes.data, source.ctypes.data, 1 << 20, 1 << 16, digests.ctypes.data
    done = library.nixl_tiers_hash_copy(*arguments)
    assert done == (1 << 20 if "avx2" in Path("/proc/cpuinfo").read_text() else 0)


LENGTHS = (
    0,
    1,
    240,
    241,
    255,
    256,
    257,
    1023,
    1024,
    1025,
    1088,
    65535,
    65536,
    65537,
    65536 + 240,
    65536 + 241,
    600_000,
)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_digests_and_bytes_at_every_kind_of_length(way: str, nbytes: int) -> None:
    check(nbytes, 65536)


@pytest.mark.parametrize("skew", [1, 8, 32])
def test_unaligned_memory(way: str, skew: int) -> None:
    check(300_000, 65536, to_skew=skew)
    check(300_000, 65536, from_skew=skew)


def test_digests_are_those_of_the_copy_though_the_source_changes_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that writes to a row that is being stored must not give its new bytes the old ones' digest."""
    source, target = noise(3 * 1024 + 200), aligned(3 * 1024 + 200)

    def scribble_and_digest(piece: memoryview) -> bytes:
        source[:] += 1
        return xxh3_64_digest(piece)

    monkeypatch.setattr(module, "_library", NoAvx2)
    monkeypatch.setattr(module, "xxh3_64_digest", scribble_and_digest)
    digests = hash_copy(target, source, 1024)
    assert digests == b"".join(xxh3_64_digest(target[at : at + 1024].tobytes()) for at in range(0, len(target), 1024))
