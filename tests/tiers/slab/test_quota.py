"""The quota of one path: what counts, and which shards are deleted."""

from __future__ import annotations

import os
from pathlib import Path

from nixl_tiers.tiers.slab.quota import ShardDir, SlabQuota
from nixl_tiers.tiers.slab.slabs import SlabLayout

MIB = 1 << 20


def namespace(number: int) -> bytes:
    return number.to_bytes(16, "big")


def make_shard(quota: SlabQuota, number: int, nbytes: int, age_s: int = 0) -> ShardDir:
    """A locked shard with a slab of `nbytes`, last used `age_s` ago."""
    with quota.locked():
        shard = quota.acquire_shard(namespace(number))
    shard.describe({"journal_bytes": MIB})
    with (shard.path / "slab-00000.kv").open("wb") as file:
        file.write(b"x" * nbytes)
    stamp = (shard.path / "namespace.json").stat().st_mtime - age_s
    os.utime(shard.path / "namespace.json", (stamp, stamp))
    return shard


def kill_owner(shard: ShardDir) -> None:
    """As after SIGKILL of its mover: the kernel releases the lock, and nothing else happens."""
    assert shard._lock is not None
    os.close(shard._lock)
    shard._lock = None


def room(quota: SlabQuota, nbytes: int) -> bool:
    with quota.locked():
        return quota.make_room(nbytes)


def test_least_recently_used_shards_are_deleted_and_no_more_than_needed(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    for number, age_s in ((1, 100), (2, 300), (3, 200)):
        kill_owner(make_shard(quota, number, 2 * MIB, age_s))
    assert room(quota, 6 * MIB)
    assert len(list(tmp_path.glob("0*"))) == 3
    assert room(quota, 8 * MIB)
    assert not (tmp_path / namespace(2).hex()).exists()
    assert len(list(tmp_path.glob("0*"))) == 2


def test_locked_shard_is_not_deleted(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    held = make_shard(quota, 1, 6 * MIB, age_s=500)
    kill_owner(make_shard(quota, 2, 2 * MIB))
    assert not room(quota, 12 * MIB)
    assert held.path.exists()
    assert not (tmp_path / namespace(2).hex()).exists()
    held.release()
    assert room(quota, 12 * MIB)
    assert not held.path.parent.exists()


def test_lowest_free_shard_is_acquired(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 64 * MIB)
    shards = [make_shard(quota, 1, MIB) for _ in range(3)]
    assert [shard.path.name for shard in shards] == ["0", "1", "2"]
    shards[1].release()
    with quota.locked():
        again = quota.acquire_shard(namespace(1))
    assert again.path == shards[1].path
    assert again.description == {"journal_bytes": MIB}


def test_shards_are_deleted_one_by_one_but_for_locked_ones(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    shards = [make_shard(quota, 1, 3 * MIB, age_s) for age_s in (100, 300, 200)]
    for shard in shards[1:]:
        kill_owner(shard)
    assert room(quota, 5 * MIB)
    assert sorted(shard.name for shard in shards[0].path.parent.iterdir()) == ["0", "2"]
    assert not room(quota, 13 * MIB)
    assert sorted(shard.name for shard in shards[0].path.parent.iterdir()) == ["0"]


def test_discarded_new_shard_leaves_nothing_behind(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    with quota.locked():
        quota.discard(quota.acquire_shard(namespace(1)))
    assert [entry.name for entry in tmp_path.iterdir()] == [".ledger"]


def test_journals_count_with_their_maximum_size(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    shard = make_shard(quota, 1, 2 * MIB)
    assert room(quota, 0)
    assert 3 * MIB <= quota.used_bytes < 3 * MIB + 100_000
    (shard.path / "manifest.sqlite").write_bytes(b"x" * (3 * MIB))
    assert room(quota, 0)
    assert 5 * MIB <= quota.used_bytes < 5 * MIB + 100_000


def test_foreign_files_count_and_are_never_touched(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 4 * MIB)
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "cat").write_bytes(b"x" * (3 * MIB))
    (tmp_path / ("a" * 31)).mkdir()  # nearly a namespace
    assert not room(quota, 2 * MIB)
    assert (foreign / "cat").exists()
    assert (tmp_path / ("a" * 31)).exists()


def test_orphan_of_a_crashed_deletion_is_deleted(tmp_path: Path) -> None:
    gone = tmp_path / f".gone-{namespace(5).hex()}"
    gone.mkdir()
    (gone / "slab-00000.kv").write_bytes(b"x")
    quota = SlabQuota(tmp_path, 4 * MIB)
    with quota.locked():
        quota.acquire_shard(namespace(1)).release()
    assert not gone.exists()


def test_layout_spreads_slots_over_files() -> None:
    small = SlabLayout.of(4096, 1000)
    assert (small.slabs, small.extent_slots, small.slots_in(0), small.slots_in(1)) == (1, 31, 1000, 0)
    large = SlabLayout.of(2 << 20, 2000)
    assert (large.slabs, large.slots_per_slab, large.slots_in(3)) == (4, 512, 2000 - 3 * 512)
    assert SlabLayout.of(5 << 30, 3).slots_per_slab == 1
    huge = SlabLayout.of(1 << 20, 100 << 20)  # 100 TiB
    assert huge.slabs <= 1024
