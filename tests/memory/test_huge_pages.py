"""What memory is left for a region, of small and of huge pages, and that too few huge ones never break it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory.cgroup import Room, rooms, shortage
from nixl_tiers.memory.pages import HUGE_PAGE_BYTES, hugetlb_rooms
from nixl_tiers.memory.region import HostRegion
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


def test_cgroup_v2_counts_every_parent_and_reclaimable_memory(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/pods/engine",
        f"{base}/memory.stat": "inactive_file 5",
        f"{base}/pods/memory.max": 40 * GiB,
        f"{base}/pods/memory.current": 30 * GiB,
        f"{base}/pods/memory.stat": f"anon {20 * GiB}\nshmem {GiB}\nactive_file {2 * GiB}\ninactive_file {3 * GiB}\n"
                                    f"slab_reclaimable {GiB}",
        f"{base}/pods/engine/memory.max": "max",
        f"{base}/pods/engine/memory.current": 10 * GiB,
        "proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0",
    })  # fmt: skip
    assert rooms(root) == [
        Room("the memory cgroup /pods", 16 * GiB, 40 * GiB),
        Room("the machine", 1 << 20),
    ]


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../other", "/"])
def test_a_container_sees_its_own_cgroup_as_the_root(path: str, tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/self/cgroup": f"0::{path}",
        "sys/fs/cgroup/memory.max": 2 * GiB,
        "sys/fs/cgroup/memory.current": GiB,
    })  # fmt: skip
    assert rooms(root) == [Room("the memory cgroup /", GiB, 2 * GiB)]


def test_unreadable_files_are_no_bound(tmp_path: Path) -> None:
    assert rooms(tmp_path) == []
    assert shortage(1 << 60, []) is None
