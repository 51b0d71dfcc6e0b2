"""Memory behind the rows: each rank allocates its own cells, and no row is handed out before all have."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory import backing
from nixl_tiers.memory.backing import Backing
from nixl_tiers.memory.region import HostRegion
from tests.support.pages import mapped
from tests.support.waiting import until

MiB = 1 << 20
RANKS = 2
ROWS = 8
GEOMETRY = Geometry(RANKS, MiB - PAGE // 2)  # a row, with its seal, has 2 MiB
CELL = GEOMETRY.cell_bytes


@pytest.fixture(autouse=True)
def two_rows_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "PIECE_BYTES", 2 * GEOMETRY.row_bytes)
    monkeypatch.setattr(backing, "POLL_S", 0.001)
    monkeypatch.setattr(backing, "LOOK_S", 0.001)
    monkeypatch.setattr(backing, "PAUSE_S", 0.0)


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.OFF) as made:
        yield made


def resident(of: HostRegion) -> list[bool]:
    """Of each page of the rows, whether any process has allocated it."""
    pages = of.nbytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(of.address), ctypes.c_size_t(of.nbytes), found) == 0
    return [bool(byte & 1) for byte in found]


def cells_resident(of: HostRegion) -> list[list[bool]]:
    """Of each row, which cells lie in pages that are allocated, but for the one that two cells share."""
    pages, row, cell = resident(of), GEOMETRY.row_bytes // PAGE, CELL // PAGE
    return [
        [all(pages[at * row + n * cell + 1 : at * row + (n + 1) * cell]) for n in range(RANKS)] for at in range(ROWS)
    ]


class Locks:
    """What a rank page-locks, in order."""

    def __init__(self, region: HostRegion, fails_at: int = ROWS, *, raises: bool = False) -> None:
        self.region, self.fails_at, self.raises = region, fails_at, raises
        self.pieces: list[tuple[int, int]] = []

    def __call__(self, begin: int, end: int) -> bool:
        assert self.region.ranks.fewest_touched * 2 >= end, "others' cells would be placed by this lock"
        assert all(all(row) for row in cells_resident(self.region)[begin:end])
        self.pieces.append((begin, end))
        if self.raises and begin >= self.fails_at:
            raise RuntimeError("can't start new thread")
        return begin < self.fails_at


def of_one_rank() -> HostRegion:
    return HostRegion.create(Geometry(1, 2 * MiB - PAGE // 2), ROWS, huge_pages=HugePages.OFF)


def test_pieces_are_locked_from_the_first_step_on_and_touched_before() -> None:
    with of_one_rank() as region:
        ranks, locked = region.ranks, list[tuple[int, int]]()
        mine = Backing(region)
        assert mine.back_first(0.0) == 2
        mine.go_on(lambda *piece: locked.append(piece) is None, at_first_step=True)
        until(lambda: ranks.fewest_touched == 4, "all pieces to be touched")
        assert (ranks.ready_rows, locked) == (2, [])
        mine.allow_locking()
        assert mine.wait(120)
        assert (ranks.ready_rows, locked) == (ROWS, [(2, 4), (4, 6), (6, 8)])


def test_drain_waits_for_the_piece_under_way() -> None:
    """vLLM's worker goes to sleep while the driver locks pages."""
    with of_one_rank() as region:
        locking, go_on, seen = threading.Event(), threading.Event(), list[str]()

        def lock(*_: int) -> bool:
            locking.set()
            assert go_on.wait(120)
            seen.append("locked")
            return False

        mine = Backing(region)
        mine.go_on(lock)
        assert locking.wait(120)
        sleeps = threading.Thread(target=lambda: (mine.drain(), seen.append("asleep")))
        sleeps.start()
        sleeps.join(0.05)
        go_on.set()
        sleeps.join(120)
        assert seen == ["locked", "asleep"]


@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_that_cannot_go_on_ends_the_rows_for_all(region: HostRegion, raises: bool) -> None:
    """Behind a lock that fails, nobody locks, allocates or waits for what no rank may use."""
    locks = [Locks(region, fails_at=2, raises=raises), Locks(region)]
    ranks = [Backing(region, rank) for rank in range(RANKS)]
    for rank, lock in zip(ranks, locks, strict=True):
        rank.go_on(lock)
    assert all(rank.wait(120) for rank in ranks)
    assert region.ranks.ready_rows == 2
    assert locks[0].pieces == [(0, 2), (2, 4)]


def test_rows_that_are_not_locked_are_given_out_by_nobody_once_others_are(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is late, and finds no memory; another has locked its first piece, and copies in batches by now."""
    other = Backing(region, 1)
    assert other.back_first(0.0) == 2
    with monkeypatch.context() as patch:
        patch.setattr(backing, "populate_part", lambda *_: errno.ENOMEM)
        late = Backing(region, 0)
        assert late.back_first(0.0) == 0
        late.go_on()
        assert late.wait(120)
    other.go_on(Locks(region))
    assert other.wait(120)
    assert region.ranks.ready_rows == 2


def test_without_memory_for_a_page_all_rows_are_used_as_they_come(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with HostRegion.attach(os.dup(region.fd)) as other:
        waiting = other.map_pages()
        with monkeypatch.context() as patch:
            patch.setattr(backing, "populate_part", lambda *_: errno.ENOMEM)
            assert region.prefault(2).wait(120)
            assert region.prefault(2, rank=1).wait(120), "a rank that cannot holds up no other"
        for mapping in (waiting, other.map_pages()):
            assert mapping.wait(120)
            assert mapping.mapped_bytes == 0
    assert region.ranks.ready_rows == ROWS
    assert region.huge_bytes is None
    assert not any(resident(region))
    assert "prefaulting ends at 0 of 8 rows: Cannot allocate memory" in caplog.text
    sentences = [record.getMessage() for record in caplog.records]
    assert sum("mapped at first use" in sentence for sentence in sentences) == 2, "one a process"


def test_other_process_maps_pages_once_they_are_ready_and_allocates_none(region: HostRegion) -> None:
    with HostRegion.attach(os.dup(region.fd)) as other:
        mapping = other.map_pages()
        first = Backing(region, 0)
        first.go_on()
        until(lambda: cells_resident(region)[1][0], "one rank to touch a piece")
        assert not any(cell[1] for cell in cells_resident(region))
        assert mapping.mapped_bytes == 0
        assert region.prefault(1, rank=1).wait(120)
        assert mapping.wait(120)
        assert all(mapped(other.address, other.nbytes))
        assert not region.rows_view.any()


def test_region_closes_while_its_pages_are_not_allocated(region: HostRegion) -> None:
    other = HostRegion.attach(os.dup(region.fd))
    mapping = other.map_pages()
    waiting = Backing(region, 0)
    waiting.go_on()
    other.close()
    assert mapping.wait(0)
    region.close()
    assert waiting.wait(0)
