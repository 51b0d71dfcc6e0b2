"""Prefaulting by the ranks of one engine: each allocates its own share of the region's pages, at the same time."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory import pages
from nixl_tiers.memory.region import HostRegion
from tests.support.pages import mapped
from tests.support.waiting import until

MiB = 1 << 20
RANKS = 2
ROWS = 8
GEOMETRY = Geometry(RANKS, MiB - PAGE // 2)  # a row, with its seal, has 2 MiB
PROCESS = Path(__file__).with_name("prefault_process.py")


def resident(of: HostRegion) -> list[bool]:
    """Of each page of the rows, whether any process has allocated it."""
    pages = of.nbytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(of.address), ctypes.c_size_t(of.nbytes), found) == 0
    return [bool(byte & 1) for byte in found]


def start(region: HostRegion, rank: int, stack: ExitStack) -> subprocess.Popen[str]:
    """A process that has allocated its own share."""
    command = [sys.executable, str(PROCESS), str(region.fd), str(rank)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, pass_fds=[region.fd])
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert answer(process) == "share"
    return process


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


def test_each_rank_allocates_its_own_share_first_and_waits_for_no_other() -> None:
    with ExitStack() as stack, HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.OFF) as region:
        half = region.nbytes // mmap.PAGESIZE // RANKS
        assert not any(resident(region))
        second = start(region, 1, stack)
        assert resident(region) == [False] * half + [True] * half
        first = start(region, 0, stack)
        assert all(resident(region))
        assert go_on(second) == "done"
        first.kill()
        assert not region.rows_view.any()


def test_rank_allocates_the_share_of_one_that_died() -> None:
    with ExitStack() as stack, HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.OFF) as region:
        second = start(region, 1, stack)
        assert go_on(second) == "done"
        assert all(resident(region))


def test_other_process_maps_pages_once_they_are_allocated_and_allocates_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_ALLOCATED_POLL_S", 0.001)
    looked = 0

    def is_prefaulted(self: HostRegion) -> bool | None:
        nonlocal looked
        looked += self is other
        return original(self)

    original = HostRegion._is_prefaulted
    with (
        HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.OFF) as region,
        HostRegion.attach(os.dup(region.fd)) as other,
    ):
        monkeypatch.setattr(HostRegion, "_is_prefaulted", is_prefaulted)
        mapping = other.map_pages()
        until(lambda: looked > 2, "it has looked whether pages are allocated")
        assert not any(resident(region))
        assert region.prefault(1).wait(120)
        assert mapping.wait(120)
        assert all(mapped(other.address, other.nbytes))
        assert not region.rows_view.any()


def test_other_process_stops_to_wait_for_pages_whose_allocation_has_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It looked five times a second for as long as the engine lived."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(pages, "_ALLOCATED_POLL_S", 0.001)
    with (
        HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.OFF) as region,
        HostRegion.attach(os.dup(region.fd)) as other,
        HostRegion.attach(os.dup(region.fd)) as later,
    ):
        waiting = other.map_pages()
        with monkeypatch.context() as patch:
            patch.setattr(pages.Prefault, "_populate_part", lambda *_: errno.ENOMEM)
            region.prefault(2).wait(120)
        for mapping in (waiting, later.map_pages()):
            assert mapping.wait(120)
            assert mapping.populated_bytes == 0
        assert region.huge_bytes is None
        assert not any(resident(region))
    sentences = [record.getMessage() for record in caplog.records]
    assert sum("mapped at their first use" in sentence for sentence in sentences) == 2, "one a process"


def test_region_closes_while_its_pages_are_not_allocated() -> None:
    with HostRegion.create(GEOMETRY, ROWS) as region:
        other = HostRegion.attach(os.dup(region.fd))
        mapping = other.map_pages()
        other.close()
        assert mapping.wait(0)


@pytest.mark.parametrize("rank", range(6))
def test_every_part_is_populated_once_whatever_the_sizes(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[int, int]] = []
    monkeypatch.setattr(pages, "_CHUNK_BYTES", MiB)
    monkeypatch.setattr(pages.Prefault, "_populate_part", lambda _, address, size: parts.append((address, size)) or 0)
    with HostRegion.create(Geometry(3, 700_000), 5, copies=2) as region:
        assert region.prefault(1, rank=rank).wait(120)
        begin = region.address + region.nbytes * rank // 6
        assert parts[0][0] <= begin < parts[0][0] + parts[0][1]
        end = region.address
        for address, size in sorted(parts):
            assert address == end
            end += size
        assert end == region.address + region.nbytes
