"""The host region: what it refuses to map or to make, its control words and fingerprints, and that it goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory import backing, pages
from nixl_tiers.memory.address_space import AddressSpace
from nixl_tiers.memory.pages import HUGE_PAGE_BYTES
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import RegionError
from tests.memory.test_huge_pages import GEOMETRY, PAGES, ROWS, free_pages
from tests.memory.test_region import MiB, made
from tests.support.machine import NR_HUGEPAGES, setting
from tests.support.waiting import until

__all__ = ["made"]  # fixtures


RANK = """
import os, sys, time
from nixl_tiers.memory.region import HostRegion

def find():
    print("reading", flush=True)
    if sys.argv[2] == "hangs":
        time.sleep(600)
    return b"c" * 16, "of the child"

with HostRegion.attach(int(sys.argv[1])) as region:
    print(region.ranks.shared_by_ranks(find, 600)[1], flush=True)
"""


@contextmanager
def other_rank(made: HostRegion, how: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RANK, str(made.fd), how]
    process = subprocess.Popen(command, pass_fds=[made.fd], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_one_rank_computes_the_shared_value_for_all(made: HostRegion) -> None:
    with other_rank(made, "reads") as child:
        assert child.communicate(timeout=120)[0].split("\n")[:2] == ["reading", "of the child"]
    assert made.ranks.shared_by_ranks(lambda: pytest.fail("read twice"), 60) == (b"c" * 16, "of the child")
    assert made.ranks.published() == [None] * 3


def test_another_rank_takes_over_from_a_dead_one(made: HostRegion) -> None:
    with other_rank(made, "hangs") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reading\n"
        with pytest.raises(RegionError, match=r"another rank did not publish it within 0.1 s"):
            made.ranks.shared_by_ranks(lambda: pytest.fail("read twice"), 0.1)
    with pytest.raises(ZeroDivisionError):
        made.ranks.shared_by_ranks(lambda: (bytes(1 // 0), ""), 60)
    assert made.ranks.shared_by_ranks(lambda: (b"p" * 16, "ours"), 60) == (b"p" * 16, "ours")


def resident_bytes(of: HostRegion) -> int:
    return os.fstat(of.fd).st_blocks * 512


@pytest.mark.parametrize("old_kernel", [False, True])
def test_prefaulting_allocates_all_pages_and_changes_no_byte(old_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if old_kernel:
        monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 0xFFFF)
    monkeypatch.setattr(backing, "PART_BYTES", MiB)
    # In small pages: tests beside this one change for a moment what the machine gives to all shared memory.
    with HostRegion.create(Geometry(1, MiB), 33, huge_pages=HugePages.OFF) as made:
        made.rows_view[7, 5] = 123
        assert resident_bytes(made) < MiB
        running = made.prefault(3)
        assert running.wait(120)
        assert running.ready == made.rows
        assert resident_bytes(made) >= made.nbytes
        assert made.rows_view[7, 5] == 123
        made.rows_view[7, 5] = 0
        assert not made.rows_view.any()


def test_closing_ends_prefaulting_first(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []

    def slow(address: int, _: int) -> int:
        parts.append(address)
        assert running._stopping.wait(120)
        return 0

    monkeypatch.setattr(backing, "PART_BYTES", MiB)
    monkeypatch.setattr(backing, "populate_part", slow)
    made = HostRegion.create(Geometry(1, MiB), 64)
    running = backing.Backing(made, threads=2)
    running.go_on()
    made.close()
    assert running.wait(0)
    assert len(parts) <= 2


# --- in a pool of huge pages


def test_a_region_in_a_pool_is_all_taken_shared_and_given_back() -> None:
    with setting(NR_HUGEPAGES, str(PAGES)):
        with HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.HUGETLB) as made:
            assert free_pages() == 0
            assert os.fstat(made.fd).st_size == PAGES * HUGE_PAGE_BYTES
            assert made.huge_bytes is None
            made.prefault().wait()
            assert made.huge_bytes == PAGES * HUGE_PAGE_BYTES
            with HostRegion.attach(os.dup(made.fd)) as other:
                assert other.huge_bytes == PAGES * HUGE_PAGE_BYTES
                other.rows_view[ROWS - 1, -1] = 77
                assert made.rows_view[ROWS - 1, -1] == 77
                other.mark([3], 0, 1, True)
            assert made.written([3], 1).all()
        assert made.huge_bytes is None
        assert free_pages() == PAGES


def test_a_fork_keeps_no_page_of_the_pool() -> None:
    with setting(NR_HUGEPAGES, str(PAGES)):
        made = HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.HUGETLB)
        ready, wake = os.pipe()
        gone, go = os.pipe()
        child = os.fork()
        if not child:
            os.close(go)  # or a test that fails would leave this process behind
            os.write(wake, b"1")
            os.read(gone, 1)
            os._exit(0)
        os.read(ready, 1)
        made.close()
        assert free_pages() == PAGES
        os.write(go, b"1")
        assert os.waitpid(child, 0)[1] == 0
        for end in (ready, wake, gone, go):
            os.close(end)


# --- transparent ------------------------------------------------------------------------------------------------------


# --- the memory of a process may outlive it, and that is seen

MARKED = """
import ctypes, os, signal, sys
from nixl_tiers.memory.address_space import marked

mark = marked(int(sys.argv[1]))
other = 0
if sys.argv[2] == "shares":  # a process that shares its memory, as one that reads its page tables does for a moment
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.c_void_p((ctypes.addressof(stack) + len(stack)) & ~15)
    other = libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, 0x100 | signal.SIGCHLD, None)  # CLONE_VM
print(other, flush=True)
signal.pause()
"""


@contextmanager
def marked_process(way: str) -> Iterator[tuple[AddressSpace, subprocess.Popen[bytes], int]]:
    """A marked process, and another that it has started."""
    memory = AddressSpace()
    command = [sys.executable, "-c", MARKED, str(memory.fd), way]
    with subprocess.Popen(command, pass_fds=(memory.fd,), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        try:
            yield memory, process, other
        finally:
            process.kill()
            if other:
                os.kill(other, signal.SIGKILL)
    memory.close()


def test_memory_is_gone_with_its_process() -> None:
    with marked_process("alone") as (memory, process, _):
        assert not memory.is_gone()
        process.kill()
        process.wait(60)
        until(memory.is_gone, "its memory to be gone")
        assert memory.is_gone()


def test_memory_that_another_process_uses_is_not_gone_when_its_own_is_reaped() -> None:
    with marked_process("shares") as (memory, process, other):
        process.kill()
        process.wait(60)
        assert not memory.is_gone()
        os.kill(other, signal.SIGKILL)
        until(memory.is_gone, "its memory to be gone")
