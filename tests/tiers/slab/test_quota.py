"""The account of one path: what counts, who has to go, and who may stay."""

from __future__ import annotations

import os
from pathlib import Path

from nixl_tiers.tiers.slab.quota import ShardDir, SlabQuota
from nixl_tiers.tiers.slab.slabs import SlabLayout

MIB = 1 << 20


def namespace(number: int) -> bytes:
    return number.to_bytes(16, "big")


def settle(quota: SlabQuota, number: int, nbytes: int, age_s: int = 0) -> ShardDir:
    """A namespace with a slab of `nbytes`, last used `age_s` ago; held."""
    with quota.locked():
        shard = quota.acquire_shard(namespace(number))
    shard.describe({"journal_bytes": MIB})
    with (shard.path / "slab-00000.kv").open("wb") as file:
        file.write(b"x" * nbytes)
    stamp = (shard.path / "namespace.json").stat().st_mtime - age_s
    os.utime(shard.path / "namespace.json", (stamp, stamp))
    return shard


def abandon(shard: ShardDir) -> None:
    """What the kernel does when a mover is killed: the lock goes, nothing else happens."""
    assert shard._lock is not None
    os.close(shard._lock)
    shard._lock = None


def room(quota: SlabQuota, nbytes: int) -> bool:
    with quota.locked():
        return quota.make_room(nbytes)


def test_the_longest_unused_goes_first_and_only_as_far_as_it_takes(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    for number, age_s in ((1, 100), (2, 300), (3, 200)):
        abandon(settle(quota, number, 2 * MIB, age_s))
    assert room(quota, 6 * MIB)
    assert len(list(tmp_path.glob("0*"))) == 3
    assert room(quota, 8 * MIB)
    assert not (tmp_path / namespace(2).hex()).exists()
    assert len(list(tmp_path.glob("0*"))) == 2


def test_what_somebody_holds_stays(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    held = settle(quota, 1, 6 * MIB, age_s=500)
    abandon(settle(quota, 2, 2 * MIB))
    assert not room(quota, 12 * MIB)
    assert held.path.exists()
    assert not (tmp_path / namespace(2).hex()).exists()
    held.release()
    assert room(quota, 12 * MIB)
    assert not held.path.parent.exists()


def test_the_lowest_free_replica_is_taken(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 64 * MIB)
    shards = [settle(quota, 1, MIB) for _ in range(3)]
    assert [shard.path.name for shard in shards] == ["0", "1", "2"]
    shards[1].release()
    with quota.locked():
        again = quota.acquire_shard(namespace(1))
    assert again.path == shards[1].path
    assert again.description == {"journal_bytes": MIB}


def test_replicas_go_one_by_one_and_never_one_that_is_held(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    shards = [settle(quota, 1, 3 * MIB, age_s) for age_s in (100, 300, 200)]
    for shard in shards[1:]:
        abandon(shard)
    assert room(quota, 5 * MIB)
    assert sorted(shard.name for shard in shards[0].path.parent.iterdir()) == ["0", "2"]
    assert not room(quota, 13 * MIB)
    assert sorted(shard.name for shard in shards[0].path.parent.iterdir()) == ["0"]


def test_a_claim_that_comes_to_nothing_leaves_nothing(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    with quota.locked():
        quota.discard(quota.acquire_shard(namespace(1)))
    assert [entry.name for entry in tmp_path.iterdir()] == [".ledger"]


def test_journals_count_with_what_they_may_grow_to(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    shard = settle(quota, 1, 2 * MIB)
    assert room(quota, 0)
    assert 3 * MIB <= quota.used_bytes < 3 * MIB + 100_000
    (shard.path / "manifest.sqlite").write_bytes(b"x" * (3 * MIB))
    assert room(quota, 0)
    assert 5 * MIB <= quota.used_bytes < 5 * MIB + 100_000


def test_strangers_count_and_are_never_touched(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 4 * MIB)
    stranger = tmp_path / "photos"
    stranger.mkdir()
    (stranger / "cat").write_bytes(b"x" * (3 * MIB))
    (tmp_path / ("a" * 31)).mkdir()  # nearly a namespace
    assert not room(quota, 2 * MIB)
    assert (stranger / "cat").exists()
    assert (tmp_path / ("a" * 31)).exists()


def test_rubbish_of_a_crashed_deletion_is_swept(tmp_path: Path) -> None:
    gone = tmp_path / f".gone-{namespace(5).hex()}"
    gone.mkdir()
    (gone / "slab-00000.kv").write_bytes(b"x")
    quota = SlabQuota(tmp_path, 4 * MIB)
    with quota.locked():
        quota.acquire_shard(namespace(1)).release()
    assert not gone.exists()


def test_a_plan_spreads_slots_over_files() -> None:
    small = SlabLayout.of(4096, 1000)
    assert (small.slabs, small.extent_slots, small.slots_in(0), small.slots_in(1)) == (1, 31, 1000, 0)
    large = SlabLayout.of(2 << 20, 2000)
    assert (large.slabs, large.slots_per_slab, large.slots_in(3)) == (4, 512, 2000 - 3 * 512)
    assert SlabLayout.of(5 << 30, 3).slots_per_slab == 1
    huge = SlabLayout.of(1 << 20, 100 << 20)  # 100 TiB
    assert huge.slabs <= 1024
