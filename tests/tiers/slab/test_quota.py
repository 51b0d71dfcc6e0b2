"""The account of one path: what counts, who has to go, and who may stay."""

from __future__ import annotations

import os
from pathlib import Path

from nixl_tiers.tiers.slab.quota import Claim, SlabQuota
from nixl_tiers.tiers.slab.slabs import Plan

MIB = 1 << 20


def namespace(number: int) -> bytes:
    return number.to_bytes(16, "big")


def settle(ledger: SlabQuota, number: int, nbytes: int, age_s: int = 0) -> Claim:
    """A namespace with a slab of `nbytes`, last used `age_s` ago; held."""
    with ledger.locked():
        claim = ledger.claim(namespace(number))
    claim.describe({"journal_bytes": MIB})
    with (claim.directory / "slab-00000.kv").open("wb") as file:
        file.write(b"x" * nbytes)
    stamp = (claim.directory / "namespace.json").stat().st_mtime - age_s
    os.utime(claim.directory / "namespace.json", (stamp, stamp))
    return claim


def abandon(claim: Claim) -> None:
    """What the kernel does when a mover is killed: the lock goes, nothing else happens."""
    assert claim._descriptor is not None
    os.close(claim._descriptor)
    claim._descriptor = None


def room(ledger: SlabQuota, nbytes: int) -> bool:
    with ledger.locked():
        return ledger.make_room(nbytes)


def test_the_longest_unused_goes_first_and_only_as_far_as_it_takes(tmp_path: Path) -> None:
    ledger = SlabQuota(tmp_path, 16 * MIB)
    for number, age_s in ((1, 100), (2, 300), (3, 200)):
        abandon(settle(ledger, number, 2 * MIB, age_s))
    assert room(ledger, 6 * MIB)
    assert len(list(tmp_path.glob("0*"))) == 3
    assert room(ledger, 8 * MIB)
    assert not (tmp_path / namespace(2).hex()).exists()
    assert len(list(tmp_path.glob("0*"))) == 2


def test_what_somebody_holds_stays(tmp_path: Path) -> None:
    ledger = SlabQuota(tmp_path, 16 * MIB)
    held = settle(ledger, 1, 6 * MIB, age_s=500)
    abandon(settle(ledger, 2, 2 * MIB))
    assert not room(ledger, 12 * MIB)
    assert held.directory.exists()
    assert not (tmp_path / namespace(2).hex()).exists()
    held.release()
    assert room(ledger, 12 * MIB)
    assert not held.directory.parent.exists()


def test_the_lowest_free_replica_is_taken(tmp_path: Path) -> None:
    ledger = SlabQuota(tmp_path, 64 * MIB)
    claims = [settle(ledger, 1, MIB) for _ in range(3)]
    assert [claim.directory.name for claim in claims] == ["0", "1", "2"]
    claims[1].release()
    with ledger.locked():
        again = ledger.claim(namespace(1))
    assert again.directory == claims[1].directory
    assert again.about == {"journal_bytes": MIB}


def test_replicas_go_one_by_one_and_never_one_that_is_held(tmp_path: Path) -> None:
    ledger = SlabQuota(tmp_path, 16 * MIB)
    claims = [settle(ledger, 1, 3 * MIB, age_s) for age_s in (100, 300, 200)]
    for claim in claims[1:]:
        abandon(claim)
    assert room(ledger, 5 * MIB)
    assert sorted(replica.name for replica in claims[0].directory.parent.iterdir()) == ["0", "2"]
    assert not room(ledger, 13 * MIB)
    assert sorted(replica.name for replica in claims[0].directory.parent.iterdir()) == ["0"]


def test_a_claim_that_comes_to_nothing_leaves_nothing(tmp_path: Path) -> None:
    ledger = SlabQuota(tmp_path, 16 * MIB)
    with ledger.locked():
        ledger.abandon(ledger.claim(namespace(1)))
    assert [entry.name for entry in tmp_path.iterdir()] == [".ledger"]


def test_journals_count_with_what_they_may_grow_to(tmp_path: Path) -> None:
    ledger = SlabQuota(tmp_path, 16 * MIB)
    claim = settle(ledger, 1, 2 * MIB)
    assert room(ledger, 0)
    assert 3 * MIB <= ledger.used_bytes < 3 * MIB + 100_000
    (claim.directory / "manifest.sqlite").write_bytes(b"x" * (3 * MIB))
    assert room(ledger, 0)
    assert 5 * MIB <= ledger.used_bytes < 5 * MIB + 100_000


def test_strangers_count_and_are_never_touched(tmp_path: Path) -> None:
    ledger = SlabQuota(tmp_path, 4 * MIB)
    stranger = tmp_path / "photos"
    stranger.mkdir()
    (stranger / "cat").write_bytes(b"x" * (3 * MIB))
    (tmp_path / ("a" * 31)).mkdir()  # nearly a namespace
    assert not room(ledger, 2 * MIB)
    assert (stranger / "cat").exists()
    assert (tmp_path / ("a" * 31)).exists()


def test_rubbish_of_a_crashed_deletion_is_swept(tmp_path: Path) -> None:
    gone = tmp_path / f".gone-{namespace(5).hex()}"
    gone.mkdir()
    (gone / "slab-00000.kv").write_bytes(b"x")
    ledger = SlabQuota(tmp_path, 4 * MIB)
    with ledger.locked():
        ledger.claim(namespace(1)).release()
    assert not gone.exists()


def test_a_plan_spreads_slots_over_files() -> None:
    small = Plan.of(4096, 1000)
    assert (small.slabs, small.step_slots, small.slots_of(0), small.slots_of(1)) == (1, 31, 1000, 0)
    large = Plan.of(2 << 20, 2000)
    assert (large.slabs, large.slots_per_slab, large.slots_of(3)) == (4, 512, 2000 - 3 * 512)
    assert Plan.of(5 << 30, 3).slots_per_slab == 1
    huge = Plan.of(1 << 20, 100 << 20)  # 100 TiB
    assert huge.slabs <= 1024
