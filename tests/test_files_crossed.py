"""How much of the package a reader has to follow: the files that a put and a get cross in the engine's process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry, Key
from tests.support.file_tier import file_tier
from tests.support.waiting import until_up

SIZE: Final = 60_000
ROW_BYTES: Final = Geometry(1, SIZE).row_bytes
ROWS: Final = 8  # of host memory
TIER_ROWS: Final = 5 * ROWS  # some of them have no room beside the journal
# Measured, and one more. 45 and 43 once, 34 and 35 before eight files of more than 400 lines were divided, and streams
# came.
MOST_OF_A_PUT: Final = 42
MOST_OF_A_GET: Final = 44
PACKAGE: Final = str(Path(nixl_tiers.__file__).parent)


@pytest.fixture
def crossed() -> Iterator[set[str]]:
    """The package's files of which any function was called, in all threads of this process that begin from now on."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename[len(PACKAGE) + 1 :])

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def rows_of(keys: list[Key]) -> np.ndarray:
    return np.frombuffer(b"".join(key.ljust(SIZE, b".") for key in keys), np.uint8).reshape(len(keys), SIZE)


def test_a_put_with_eviction_and_a_get_cross_few_files(tmp_path: Path, crossed: set[str]) -> None:
    """The put evicts from host memory and from the file tier, and the get brings rows up from there."""
    keys = [b"key-%05d" % number for number in range(TIER_ROWS + ROWS)]
    cpu = {"type": "cpu", "capacity": ROWS * ROW_BYTES}
    tier = file_tier(tmp_path, TIER_ROWS * ROW_BYTES)
    with nixl_tiers.open({"tiers": [cpu, tier]}, SIZE, "n") as store:
        until_up(store)
        for start in range(0, TIER_ROWS, ROWS):
            assert store.put(keys[start : start + ROWS], rows_of(keys[start : start + ROWS])) == ROWS
            assert store.flush(60.0)
        crossed.clear()
        last = keys[TIER_ROWS:]
        assert store.put(last, rows_of(last)) == ROWS
        assert store.flush(60.0)
        put = sorted(crossed)
        assert store.stats()["file"]["evictions"] > 0
        wanted = keys[TIER_ROWS - ROWS : TIER_ROWS]
        out = np.zeros((ROWS, SIZE), np.uint8)
        crossed.clear()
        found = store.get(wanted, out)
        got = sorted(crossed)
        assert any(found)
    assert len(put) <= MOST_OF_A_PUT, " ".join(put)
    assert len(got) <= MOST_OF_A_GET, " ".join(got)
