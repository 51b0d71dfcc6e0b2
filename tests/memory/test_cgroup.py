"""What memory is left, read from made-up proc and sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.memory.cgroup import Room, rooms, shortage
from tests.support.machine import tree

GiB = 1 << 30
NO_LIMIT = 9223372036854771712


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


def test_cgroup_v1_is_a_bound_only_with_a_limit(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    root = tree(tmp_path, {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a/b\n3:cpuset:/\n0::/",
        f"{base}/memory.limit_in_bytes": NO_LIMIT,
        f"{base}/memory.usage_in_bytes": 7,
        f"{base}/a/memory.limit_in_bytes": 3 * GiB,
        f"{base}/a/memory.usage_in_bytes": 2 * GiB,
        f"{base}/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {GiB // 2}\ntotal_active_file {GiB // 4}",
        f"{base}/a/b/memory.limit_in_bytes": GiB,
        f"{base}/a/b/memory.usage_in_bytes": 2 * GiB,
    })  # fmt: skip
    assert rooms(root) == [
        Room("the memory cgroup /a/b", 0, GiB),
        Room("the memory cgroup /a", GiB + GiB // 2 + GiB // 4, 3 * GiB),
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
