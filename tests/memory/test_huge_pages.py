"""Huge pages under the region: what is asked for, what the kernel gave, and that too few of them never break it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory.cgroup import Room
from nixl_tiers.memory.pages import HUGE_PAGE_BYTES, advice, hugetlb_rooms, transparent_bytes
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import Layout
from tests.support.machine import NR_HUGEPAGES, setting, tree

GEOMETRY = Geometry(cells=1, cell_payload=1 << 20)
ROWS = 9
PAGES = 6  # of 2 MiB: one for the header, five for nine rows of 1 MiB and their seals
GiB = 1 << 30


def pool(**counts: int) -> dict[str, object]:
    return {f"sys/kernel/mm/hugepages/hugepages-2048kB/{name}": count for name, count in counts.items()}


def free_pages() -> int:
    return int((NR_HUGEPAGES.parent / "free_hugepages").read_text())


@pytest.mark.parametrize("free", [0, 1, PAGES - 1])
def test_an_exhausted_pool_falls_back_with_a_sentence(free: int, caplog: pytest.LogCaptureFixture) -> None:
    with (
        setting(NR_HUGEPAGES, str(free)),
        HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.HUGETLB) as made,
    ):
        made.rows_view[:] = 1
        assert free_pages() == free
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(
        "huge_pages: hugetlb is not possible, other pages are used: the region needs 0.01 GiB, but the pool of 2 MiB "
        "pages has 0.0"
    )


# --- what there is for this process, from made-up trees ---------------------------------------------------------------


def test_a_pool_has_what_is_free_and_not_reserved_and_what_it_may_grow_by(tmp_path: Path) -> None:
    root = tree(tmp_path, pool(free_hugepages=9, resv_hugepages=4, nr_overcommit_hugepages=3, surplus_hugepages=1))
    assert hugetlb_rooms(root) == [Room("the pool of 2 MiB pages", 7 * HUGE_PAGE_BYTES)]
    assert hugetlb_rooms(tmp_path / "none") == [Room("the pool of 2 MiB pages", 0)]


def test_hugetlb_limits_of_every_cgroup_count(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/pods"
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/pods/engine",
        f"{base}/hugetlb.2MB.max": 4 * GiB,
        f"{base}/hugetlb.2MB.current": GiB,
        f"{base}/engine/hugetlb.2MB.max": "max",
        f"{base}/engine/hugetlb.2MB.current": 0,
        f"{base}/engine/hugetlb.2MB.rsvd.max": 0,
        f"{base}/engine/hugetlb.2MB.rsvd.current": 0,
        f"{base}/engine/memory.max": 5,
        f"{base}/engine/memory.current": 5,
    })  # fmt: skip
    assert hugetlb_rooms(root)[1:] == [
        Room("hugetlb.2MB.rsvd of the cgroup /pods/engine", 0, 0),
        Room("hugetlb.2MB of the cgroup /pods", 3 * GiB, 4 * GiB),
    ]


def test_hugetlb_limits_of_cgroups_v1_count(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/hugetlb/a"
    root = tree(tmp_path, {
        "proc/self/cgroup": "5:memory:/b\n4:hugetlb:/a\n0::/",
        f"{base}/hugetlb.2MB.limit_in_bytes": GiB,
        f"{base}/hugetlb.2MB.usage_in_bytes": GiB // 4,
        f"{base}/hugetlb.2MB.rsvd.limit_in_bytes": 9223372036854771712,
        f"{base}/hugetlb.2MB.rsvd.usage_in_bytes": 0,
    })  # fmt: skip
    assert hugetlb_rooms(root)[1:] == [Room("hugetlb.2MB of the cgroup /a", 3 * GiB // 4, GiB)]


def test_memfd_is_not_in_a_pool_because_its_block_size_is_2_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel reports it with `shmem_enabled` = `always`: for those who may not set it."""
    fstat = os.fstat

    def as_with_always(fd: int) -> os.stat_result:
        status = fstat(fd)
        return os.stat_result(tuple(status), {"st_blksize": HUGE_PAGE_BYTES})

    monkeypatch.setattr(os, "fstat", as_with_always)
    with HostRegion.create(GEOMETRY, ROWS) as made, HostRegion.attach(os.dup(made.fd)) as other:
        assert other.nbytes == made.nbytes


def test_smaps_count_for_all_parts_of_the_mapping_at_the_address_and_for_no_other(tmp_path: Path) -> None:
    """Parts: as after `mbind` of the rows, which are not the whole mapping."""
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-2000 rw-s 00000000 00:01 1 /memfd:a (deleted)\nSize: 4 kB\nShmemPmdMapped:  2048 kB\n"
        "2000-4000 rw-s 00001000 00:01 1 /memfd:a (deleted)\nShmemPmdMapped:  8192 kB\nVmFlags: rd wr\n"
        "4000-5000 rw-s 00000000 00:01 1 /memfd:b (deleted)\nShmemPmdMapped:  4096 kB\n"
    )
    mappings = [(0x1000, 0x3000), (0x2000, 0x2000), (0x3000, 0x1000), (0x4000, 0x1000)]
    assert [transparent_bytes(*mapping, smaps) for mapping in mappings] == [10 << 20, 8 << 20, 0, 4 << 20]
    assert transparent_bytes(0x1000, 0x1000, tmp_path / "none") == 0


def test_advice_names_the_setting_and_what_it_brings(tmp_path: Path) -> None:
    file = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    root = tree(tmp_path, {file: "always within_size advise [never] deny force"})
    assert "(it is `never`)" in advice(root)
    tree(root, {file: "always within_size [advise] never deny force"})
    assert not advice(root)
    assert "hugetlb" in advice(tmp_path / "none")
    assert "no staging buffer" in advice(tmp_path / "none")


def test_rows_are_at_the_same_place_with_and_without() -> None:
    small, huge = (Layout(GEOMETRY, ROWS, GEOMETRY.cells, hugetlb=hugetlb) for hugetlb in (False, True))
    assert (small.rows, huge.total % HUGE_PAGE_BYTES) == (huge.rows, 0)
    assert 0 <= huge.total - small.total < HUGE_PAGE_BYTES
    assert small.total % PAGE == 0
