"""The host region: what it refuses to map or to make, its control words and fingerprints, and that it goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory import backing, pages
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import RegionError
from tests.memory.test_region import MiB, made

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
