"""The quota of one path: what counts, and which shards are deleted."""

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
from nixl_tiers.tiers.slab.quota import SlabQuota
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


def serve(quota: SlabQuota, number: int) -> Path:
    with quota.locked():
        return quota.acquire_shard(namespace(number)).path


def room(quota: SlabQuota, nbytes: int) -> bool:
    with quota.locked():
        return not quota.make_room(nbytes)


def test_least_recently_used_shards_are_deleted_and_no_more_than_needed(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    shards = [leave_shard(tmp_path, number, 2 * MIB, age_s) for number, age_s in ((1, 100), (2, 300), (3, 200))]
    assert room(quota, 6 * MIB)
    assert [shard.exists() for shard in shards] == [True, True, True]
    assert room(quota, 8 * MIB)
    assert [shard.exists() for shard in shards] == [True, False, True]


def test_shard_that_is_served_is_not_deleted(tmp_path: Path) -> None:
    """Neither by its own mover, nor by another one; others in its part are, by its own."""
    shards = [leave_shard(tmp_path, number, 4 * MIB, 500 - number) for number in (1, 2)]
    quota, other = (SlabQuota(tmp_path, 32 * MIB, 2) for _ in range(2))
    assert serve(quota, 1) == shards[0]
    assert serve(other, 3).parent.name == "part-1"
    with other.locked():
        assert not other.delete_oldest()
    assert room(quota, 8 * MIB)
    assert [shard.exists() for shard in shards] == [True, False]
    with quota.locked():
        assert not quota.delete_oldest()
    quota.release()
    with other.locked():
        assert other.delete_oldest()
    assert not shards[0].parent.exists()
    other.release()


def test_part_is_bounded_though_the_path_has_room(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 32 * MIB, 2)
    old = leave_shard(tmp_path, 1, 8 * MIB, age_s=10)
    other_part = leave_shard(tmp_path, 2, MIB, age_s=1000, part=1)
    leave_shard(tmp_path, 3, 4 * MIB)
    assert serve(quota, 3).parent.name == "part-0"
    assert not room(quota, 12 * MIB)
    assert not old.exists()
    assert other_part.exists()  # it would not help
    assert room(quota, 10 * MIB)
    quota.release()


def test_shards_of_parts_beyond_the_replicas_are_deleted_first_and_those_that_a_replica_may_adopt_last(
    tmp_path: Path,
) -> None:
    leave_shard(tmp_path, 1, MIB)
    ages = {"own": (1, 400, 1), "other": (2, 300, 1), "beyond": (1, 10, 5), "beyond, old": (2, 20, 5)}
    shards = {name: leave_shard(tmp_path, n, MIB, age_s, part) for name, (n, age_s, part) in ages.items()}
    quota = SlabQuota(tmp_path, 64 * MIB, 2)
    leave_shard(tmp_path, 1, 2 * MIB)
    assert serve(quota, 1).parent.name == "part-0"
    gone = []
    with quota.locked():
        while quota.delete_oldest():
            gone += [name for name, shard in shards.items() if not shard.exists() and name not in gone]
    assert gone == ["beyond, old", "beyond", "other", "own"]
    quota.release()


def test_process_that_holds_more_than_its_part_by_other_settings_is_counted(tmp_path: Path) -> None:
    """One without replicas fills the path; with two replicas there is no room for the second one beside it."""
    old = SlabQuota(tmp_path, 16 * MIB)
    leave_shard(tmp_path, 1, 12 * MIB)
    serve(old, 1)
    new = SlabQuota(tmp_path, 16 * MIB, 2)
    assert serve(new, 1).parent.name == "part-1"
    assert not room(new, 4 * MIB)
    assert room(new, 2 * MIB)
    old.release()
    assert room(new, 6 * MIB)
    new.release()


def test_discarded_new_shard_leaves_nothing_behind(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    with quota.locked():
        quota.discard(quota.acquire_shard(namespace(1)))
    assert [entry.name for entry in tmp_path.iterdir()] == [".ledger"]
    kept = leave_shard(tmp_path, 2, MIB)
    with quota.locked():
        quota.discard(quota.acquire_shard(namespace(1)))
    assert kept.exists()


def test_journals_count_with_their_maximum_size(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    shard = leave_shard(tmp_path, 1, 2 * MIB)
    assert room(quota, 0)
    assert 3 * MIB <= quota.used_bytes < 3 * MIB + 100_000
    (shard / "manifest.journal").write_bytes(b"x" * (3 * MIB))
    assert room(quota, 0)
    assert 5 * MIB <= quota.used_bytes < 5 * MIB + 100_000


def test_foreign_files_count_and_are_never_touched(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 4 * MIB)
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "cat").write_bytes(b"x" * (3 * MIB))
    (tmp_path / "part-01").mkdir()  # nearly a part
    (tmp_path / "part-0" / ("a" * 31)).mkdir(parents=True)  # nearly a namespace
    assert not room(quota, 2 * MIB)
    assert (foreign / "cat").exists()
    assert (tmp_path / "part-01").exists()
    assert (tmp_path / "part-0" / ("a" * 31)).exists()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["scandir", "read_bytes"])
def test_what_cannot_be_measured_does_not_count_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, call: str
) -> None:
    served = leave_shard(tmp_path, 1, 6 * MIB)
    other, quota = SlabQuota(tmp_path, 16 * MIB, 2), SlabQuota(tmp_path, 16 * MIB, 2)
    assert serve(other, 1) == served
    assert serve(quota, 2).parent.name == "part-1"
    assert room(quota, MIB)
    used_bytes = quota.used_bytes
    with monkeypatch.context() as patch:
        refuse(patch, call, served, error)
        with quota.locked():
            problem = quota.make_room(MIB)
    assert str(served) in problem
    assert os.strerror(error) in problem
    assert quota.used_bytes == used_bytes
    assert room(quota, MIB)
    other.release()
    quota.release()


def refuse(patch: pytest.MonkeyPatch, call: str, directory: Path, error: int) -> None:
    """The call fails in that directory."""
    owner: Any = os if call == "scandir" else Path
    real = getattr(owner, call)

    def call_or_fail(path: Any) -> Any:
        where = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(path)
        if directory in (where, where.parent):
            raise OSError(error, os.strerror(error), str(path))
        return real(path)

    patch.setattr(owner, call, call_or_fail)


@pytest.mark.parametrize(("error", "fits"), [(errno.EACCES, True), (errno.EPERM, True), (errno.EIO, False)])
def test_foreign_directory_that_is_closed_to_this_process_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, fits: bool
) -> None:
    """As lost+found is; one whose disk fails may hold anything."""
    (tmp_path / "lost+found").mkdir()
    refuse(monkeypatch, "scandir", tmp_path / "lost+found", error)
    assert room(SlabQuota(tmp_path, 16 * MIB), MIB) is fits


def test_orphan_of_a_crashed_deletion_is_deleted(tmp_path: Path) -> None:
    gone = tmp_path / f".gone-part-3-{namespace(5).hex()}"
    gone.mkdir(mode=0o700)
    (gone / "slab-00000.kv").write_bytes(b"x")
    foreign = [tmp_path / name for name in (".gone-backup", f".gone-{namespace(5).hex()}", f"{gone.name}0")]
    for each in foreign:
        each.mkdir(mode=0o700)
        (each / "slab-00000.kv").write_bytes(b"x")
    quota = SlabQuota(tmp_path, 4 * MIB)
    serve(quota, 1)
    quota.release()
    assert not gone.exists()
    assert all((each / "slab-00000.kv").exists() for each in foreign)


@pytest.mark.parametrize("name", ["namespace.json", "manifest.journal", "about.json", "slab-00000.kv"])
def test_shard_is_as_young_as_what_its_engine_wrote_last(name: str, tmp_path: Path) -> None:
    """It was killed, so it has marked no end of its use."""
    quota = SlabQuota(tmp_path, 8 * MIB)
    shards = [leave_shard(tmp_path, number, 3 * MIB, age_s=100 * number) for number in (1, 2)]
    (shards[1] / name).touch()
    assert room(quota, 3 * MIB)
    assert [shard.exists() for shard in shards] == [False, True]


def test_foreign_things_in_a_shard_stay_when_it_is_deleted(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 16 * MIB)
    shards = [leave_shard(tmp_path, number, 4 * MIB, age_s=number) for number in (1, 2)]
    (shards[1] / "notes").mkdir()
    names = ["notes/thesis.txt", "slab-00000.kv.bak", "my-slabs.txt", "manifest.txt"]
    for name in names:
        (shards[1] / name).write_bytes(bytes(MIB))
    assert room(quota, 6 * MIB)
    assert sorted(str(file.relative_to(shards[1])) for file in shards[1].rglob("*") if file.is_file()) == sorted(names)
    assert shards[0].exists()
    assert room(quota, 11 * MIB)
    assert not shards[0].exists()
    assert not room(quota, 13 * MIB)  # what is left of it is no shard any more
    assert sorted(each.name for each in tmp_path.iterdir()) == [".ledger", "part-0"]
    with quota.locked():
        assert not quota.delete_oldest()


def test_foreign_things_of_a_crashed_deletion_go_back_to_where_they_were(tmp_path: Path) -> None:
    gone = tmp_path / f".gone-part-0-{namespace(5).hex()}"
    gone.mkdir(mode=0o700)
    (gone / "slab-00000.kv").write_bytes(b"x")
    (gone / "thesis.txt").write_text("precious")
    quota = SlabQuota(tmp_path, 4 * MIB)
    serve(quota, 1)
    quota.release()
    assert not gone.exists()
    assert [each.name for each in shard_dir(tmp_path, namespace(5), 0).iterdir()] == ["thesis.txt"]


def test_shards_that_no_process_serves_are_deleted_before_min_free_is_touched(tmp_path: Path) -> None:
    spare = [3 * MIB]
    least = FreeSpace(tmp_path, 0)
    least._measure = lambda: setattr(least, "spare_bytes", spare[0])  # type: ignore[method-assign]
    quota = SlabQuota(tmp_path, 64 * MIB, 1, least)
    old = leave_shard(tmp_path, 1, MIB)
    serve(quota, 2)
    assert room(quota, 3 * MIB)
    assert old.exists()
    assert not room(quota, 4 * MIB)
    assert not old.exists()
    assert "min_free keeps" in least.problem
    assert room(quota, 0)  # what is there goes on being served
    quota.release()


def test_min_free_stays_when_the_journal_is_written_at_last(tmp_path: Path) -> None:
    """A slab grows at once, its records are written a moment later."""
    free = FreeSpace(tmp_path, 0)
    free._measure = lambda: setattr(free, "spare_bytes", 4 * MIB)  # type: ignore[method-assign]
    quota = SlabQuota(tmp_path, 64 * MIB, 1, free)
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
    one, other = (SlabQuota(tmp_path, 64 * MIB, 2, space) for space in spaces)
    assert room(one, 0)
    assert room(other, 0)
    assert room(one, 6 * MIB)
    free[0] -= 6 * MIB
    assert not room(other, 6 * MIB)
    assert "min_free keeps" in spaces[1].problem


def test_foreign_directory_with_the_name_of_a_slab_ends_the_search_for_room(tmp_path: Path) -> None:
    shard = leave_shard(tmp_path, 1, 0)
    (shard / "slab-00000.kv").unlink()
    (shard / "slab-00000.kv").mkdir()
    (tmp_path / "foreign").write_bytes(bytes(4 * MIB))
    assert not room(SlabQuota(tmp_path, 4 * MIB), MIB)
    assert [each.name for each in shard.iterdir()] == ["slab-00000.kv"]
