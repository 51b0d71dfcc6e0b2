"""The shards of one path: each part is bounded by itself; which shards are deleted for that."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.tiers.disk import FreeSpace
from nixl_tiers.tiers.slab.shards import Shards
from tests.mover.harness import shard_dir

MIB = 1 << 20


def namespace(number: int) -> bytes:
    return number.to_bytes(16, "big")


def leave_shard(path: Path, number: int, nbytes: int, age_s: float = 0, part: int = 0) -> Path:
    """A shard with a slab of `nbytes`, last used `age_s` ago, in a part that no process holds."""
    shard = shard_dir(path, namespace(number), part)
    shard.parent.mkdir(mode=0o700, exist_ok=True)
    (shard.parent / ".lock").touch(mode=0o600)
    shard.mkdir(mode=0o700, exist_ok=True)
    (shard / "namespace.json").write_text(json.dumps({"journal_bytes": MIB}))
    (shard / "slab-00000.kv").write_bytes(b"x" * nbytes)
    stamp = time.time() - age_s
    for file in shard.iterdir():
        os.utime(file, (stamp, stamp))
    return shard


def serve(quota: Shards, number: int) -> Path:
    with quota.locked():
        return quota.acquire_shard(namespace(number)).path


def room(quota: Shards, nbytes: int) -> bool:
    return not quota.make_room(nbytes)


def slab_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("slab-*"))


def test_least_recently_used_shards_are_deleted_and_no_more_than_needed(tmp_path: Path) -> None:
    quota = Shards(tmp_path, 16 * MIB)
    shards = [leave_shard(tmp_path, number, 2 * MIB, age_s) for number, age_s in ((1, 100), (2, 300), (3, 200))]
    serve(quota, 4)
    assert room(quota, 6 * MIB)
    assert [shard.exists() for shard in shards] == [True, True, True]
    assert room(quota, 8 * MIB)
    assert [shard.exists() for shard in shards] == [True, False, True]


def test_shard_that_is_served_is_not_deleted(tmp_path: Path) -> None:
    """Neither by its own mover, nor by another one; others in its part are, by its own."""
    shards = [leave_shard(tmp_path, number, 4 * MIB, 500 - number) for number in (1, 2)]
    quota, other = (Shards(tmp_path, 32 * MIB, 2) for _ in range(2))
    assert serve(quota, 1) == shards[0]
    assert serve(other, 3).parent.name == "part-1"
    assert not other.delete_oldest()
    assert room(quota, 8 * MIB)
    assert [shard.exists() for shard in shards] == [True, False]
    assert not quota.delete_oldest()
    quota.release()
    assert other.delete_oldest()
    assert not shards[0].parent.exists()
    other.release()


def test_part_is_bounded_though_the_path_has_room(tmp_path: Path) -> None:
    quota = Shards(tmp_path, 32 * MIB, 2)
    old = leave_shard(tmp_path, 1, 8 * MIB, age_s=10)
    other_part = leave_shard(tmp_path, 2, MIB, age_s=1000, part=1)
    leave_shard(tmp_path, 3, 4 * MIB)
    assert serve(quota, 3).parent.name == "part-0"
    assert not room(quota, 12 * MIB)
    assert not old.exists()
    assert other_part.exists()  # it would not help
    assert room(quota, 10 * MIB)
    quota.release()


def test_for_room_on_the_disk_what_a_replica_may_adopt_is_deleted_last(tmp_path: Path) -> None:
    leave_shard(tmp_path, 1, 2 * MIB)
    ages = {"another": (2, 300, 1), "the same": (1, 400, 1)}
    shards = {name: leave_shard(tmp_path, n, MIB, age_s, part) for name, (n, age_s, part) in ages.items()}
    quota = Shards(tmp_path, 64 * MIB, 2)
    assert serve(quota, 1).parent.name == "part-0"
    gone = []
    while quota.delete_oldest():
        gone += [name for name, shard in shards.items() if not shard.exists() and name not in gone]
    assert gone == ["another", "the same"]
    quota.release()


class TestTheBudgetOfAll:
    """Parts of engines with the same settings never take more than the capacity, whatever the settings were before."""

    def test_a_lower_capacity_holds_from_the_first_open(self, tmp_path: Path) -> None:
        old = [leave_shard(tmp_path, number, 3 * MIB, 100 * number, part) for number, part in ((1, 0), (2, 0), (3, 1))]
        young = leave_shard(tmp_path, 4, 3 * MIB, part=1)
        quota = Shards(tmp_path, 12 * MIB, 2)
        served = serve(quota, 4)
        assert served == young, "whose rows are there"
        assert [shard.exists() for shard in old] == [True, False, True]
        assert room(quota, 0)
        assert [shard.exists() for shard in old] == [True, False, False]
        assert slab_bytes(tmp_path) + 2 * MIB <= 12 * MIB
        quota.release()

    def test_fewer_replicas_leave_no_parts_beyond_them(self, tmp_path: Path) -> None:
        for part in range(4):
            leave_shard(tmp_path, part % 2, MIB, part=part)
        quota = Shards(tmp_path, 16 * MIB, 2)
        serve(quota, 0)
        assert sorted(each.name for each in tmp_path.iterdir()) == [".ledger", "part-0", "part-1"]
        assert not quota.surplus
        quota.release()

    def test_a_part_beyond_them_that_is_held_goes_once_it_is_not(self, tmp_path: Path) -> None:
        """As while replicas are restarted one by one with fewer of them."""
        before = [Shards(tmp_path, 16 * MIB, 2) for _ in range(2)]
        for number, each in enumerate(before):
            assert (serve(each, number) / "namespace.json").write_text("{}")
        before[0].release()
        quota = Shards(tmp_path, 16 * MIB)
        assert serve(quota, 0).parent.name == "part-0"
        assert quota.surplus
        quota.trim_again()
        assert (tmp_path / "part-1").exists()
        before[1].release()
        quota.trim_again()
        assert not (tmp_path / "part-1").exists()
        assert not quota.surplus
        quota.release()

    def test_what_a_failed_deletion_left_goes_before_anything_grows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It counts nowhere else: else each failure would take as much again."""
        leave_shard(tmp_path, 1, 8 * MIB, 100)
        quota = Shards(tmp_path, 16 * MIB)
        serve(quota, 2)

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", fail)
            for _ in range(2):
                with pytest.raises(OSError, match="Input/output error"):
                    quota.make_room(12 * MIB)
        assert slab_bytes(tmp_path) == 8 * MIB
        assert room(quota, 12 * MIB)
        assert slab_bytes(tmp_path) == 0
        quota.release()


def test_journals_count_with_their_maximum_size(tmp_path: Path) -> None:
    quota = Shards(tmp_path, 16 * MIB)
    shard = leave_shard(tmp_path, 1, 2 * MIB)
    serve(quota, 1)
    assert room(quota, 0)
    assert 3 * MIB <= quota.used_bytes < 3 * MIB + 100_000
    (shard / "manifest.journal").write_bytes(b"x" * (3 * MIB))
    assert room(quota, 0)
    assert 5 * MIB <= quota.used_bytes < 5 * MIB + 100_000


@pytest.mark.parametrize(("owner", "call"), [(os, "scandir"), (Path, "read_bytes")])
def test_what_cannot_be_measured_is_an_error_and_no_lack_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str
) -> None:
    shards = [leave_shard(tmp_path, 1, 6 * MIB), leave_shard(tmp_path, 2, MIB)]
    quota = Shards(tmp_path, 16 * MIB)
    assert serve(quota, 1) == shards[0]

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, fail)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            quota.make_room(MIB)
    assert [shard.exists() for shard in shards] == [True, True]
    assert room(quota, MIB)
    quota.release()


def test_orphan_of_a_crashed_deletion_is_deleted(tmp_path: Path) -> None:
    gone = tmp_path / f".gone-part-3-{namespace(5).hex()}"
    gone.mkdir(mode=0o700)
    (gone / "slab-00000.kv").write_bytes(b"x")
    foreign = [tmp_path / name for name in (".gone-backup", f".gone-{namespace(5).hex()}", f"{gone.name}0")]
    for each in foreign:
        each.mkdir(mode=0o700)
        (each / "slab-00000.kv").write_bytes(b"x")
    quota = Shards(tmp_path, 4 * MIB)
    serve(quota, 1)
    quota.release()
    assert not gone.exists()
    assert all((each / "slab-00000.kv").exists() for each in foreign)


def test_shards_that_no_process_serves_expire(tmp_path: Path) -> None:
    """One with times ahead of the clock ages from when it was first seen."""
    age_s, now = 3600.0, time.time()
    ages = {"served": (1, 9e6), "old": (2, age_s + 60), "young": (3, age_s - 60), "ahead": (4, -9e6)}
    shards = {name: leave_shard(tmp_path, number, MIB, before_s) for name, (number, before_s) in ages.items()}
    quota = Shards(tmp_path, 64 * MIB)
    serve(quota, 1)

    def left(after_s: float) -> list[str]:
        quota.delete_expired(age_s, now + after_s)
        return [name for name, shard in shards.items() if shard.exists()]

    assert left(0) == ["served", "young", "ahead"]
    assert left(61) == ["served", "ahead"]
    assert left(age_s - 1) == ["served", "ahead"]
    assert left(age_s + 1) == ["served"]
    quota.release()


def test_foreign_things_in_a_shard_stay_when_it_is_deleted(tmp_path: Path) -> None:
    quota = Shards(tmp_path, 16 * MIB)
    shards = [leave_shard(tmp_path, number, 4 * MIB, age_s=number) for number in (1, 2)]
    (shards[1] / "notes").mkdir()
    names = ["notes/thesis.txt", "slab-00000.kv.bak", "my-slabs.txt", "manifest.txt"]
    for name in names:
        (shards[1] / name).write_bytes(bytes(MIB))
    serve(quota, 3)
    assert room(quota, 6 * MIB)
    assert sorted(str(file.relative_to(shards[1])) for file in shards[1].rglob("*") if file.is_file()) == sorted(names)
    assert shards[0].exists()
    assert room(quota, 11 * MIB)
    assert not shards[0].exists()
    assert room(quota, 15 * MIB)  # what is left of it is no shard any more
    assert sorted(each.name for each in tmp_path.iterdir()) == [".ledger", "part-0"]
    assert not quota.delete_oldest()


def test_min_free_stays_when_the_journal_is_written_at_last(tmp_path: Path) -> None:
    """A slab grows at once, its records are written a moment later."""
    free = FreeSpace(tmp_path, 0)
    free._measure = lambda: setattr(free, "spare_bytes", 4 * MIB)  # type: ignore[method-assign]
    quota = Shards(tmp_path, 64 * MIB, 1, free)
    shard = serve(quota, 1)
    assert room(quota, 4 * MIB)
    (shard / "namespace.json").write_text(json.dumps({"journal_bytes": MIB}))
    assert room(quota, 3 * MIB)
    assert not room(quota, 3 * MIB + 1)
    (shard / "manifest.journal").write_bytes(b"x" * MIB)
    assert room(quota, 4 * MIB)
    quota.release()


def test_replicas_together_leave_min_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has allocated, the next one sees, however short before that it has measured what is free."""
    free = [10 * MIB]
    size = SimpleNamespace(f_blocks=100 * MIB, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**vars(size), f_bavail=free[0]))
    spaces = [FreeSpace(tmp_path, 4 * MIB, lambda: 0.0) for _ in range(2)]  # no time passes
    one, other = (Shards(tmp_path, 64 * MIB, 2, space) for space in spaces)
    serve(one, 1)
    serve(other, 1)
    assert room(one, 0)
    assert room(other, 0)
    assert not room(one, 6 * MIB + 1)
    assert room(one, 6 * MIB)
    free[0] -= 6 * MIB
    assert not room(other, 6 * MIB)
    assert "min_free keeps" in spaces[1].problem
