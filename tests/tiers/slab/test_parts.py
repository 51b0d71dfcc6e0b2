"""Parts of a path: each held by one engine, taken over warm by the next one, all of them within the capacity."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab import shards
from nixl_tiers.tiers.slab.parts import ShardDir, holder_now
from nixl_tiers.tiers.slab.shards import Shards
from tests.mover.harness import NAMESPACE
from tests.support.disks import disk_bytes

CAPACITY = 24 << 20
MIB = 1 << 20


class PartsOfAPath(RuleBasedStateMachine):
    """Engines, as quotas with locks of their own, with files in place of rows. Which part an engine takes depends on
    when each was used last: here by a clock that goes on with each write, as a file system has one time for several."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "kv"
        self.path.mkdir()
        self.engines: list[tuple[Shards, ShardDir]] = []
        self.rows: dict[Path, int] = {}  # bytes in shards that are served
        self.used: dict[Path, int] = {}
        self.writes = 0
        self.replicas, self.capacity = 1, 16 * MIB
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(shards, "used_ns", lambda shard: self.used.get(shard, 0))

    def teardown(self) -> None:
        while self.engines:
            self._end(0)
        self._patch.undo()
        self._folder.cleanup()

    @precondition(lambda self: not self.engines)
    @rule(replicas=st.integers(1, 3), mib=st.sampled_from([8, 16]))
    def configure(self, replicas: int, mib: int) -> None:
        """All engines of a path have the same settings."""
        self.replicas, self.capacity = replicas, mib * MIB

    @rule(namespace=st.integers(1, 3))
    def start(self, namespace: int) -> None:
        replicas = self.replicas
        held = {shard.path.parent.name for _, shard in self.engines}
        free = [f"part-{number}" for number in range(replicas) if f"part-{number}" not in held]
        own = {name: self._size(self.path / name / self._name(namespace)) for name in free}
        empty = [name for name in free if not list((self.path / name).glob("0*"))]
        quota = Shards(self.path, self.capacity, replicas)
        with quota.locked():
            if not free:
                with pytest.raises(TierDown, match=f"in use: .*process {os.getpid()} "):
                    quota.acquire_shard(namespace.to_bytes(16, "big"))
                return
            shard = quota.acquire_shard(namespace.to_bytes(16, "big"))
            part = shard.path.parent.name
            assert own[part] == max(own.values())
            assert own[part] or not empty or part in empty
        self._serve(quota, shard)
        self.engines.append((quota, shard))

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2), mib=st.integers(1, 8))
    def grow(self, which: int, mib: int) -> None:
        quota, shard = self.engines[which % len(self.engines)]
        if not quota.make_room(mib * MIB):
            self._resize(shard, self._size(shard.path) + mib * MIB)

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2), namespace=st.integers(1, 3))
    def reset(self, which: int, namespace: int) -> None:
        number = which % len(self.engines)
        quota, shard = self.engines[number]
        shard.release()
        del self.rows[shard.path]
        with quota.locked():
            again = quota.acquire_shard(namespace.to_bytes(16, "big"))
            assert again.path.parent == shard.path.parent
        self._serve(quota, again)
        self.engines[number] = quota, again

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2))
    def stop(self, which: int) -> None:
        self._end(which % len(self.engines))

    @invariant()
    def bounds_are_kept_and_live_rows_are_there(self) -> None:
        sizes = [file.stat().st_size for file in self.path.rglob("slab-*")]
        assert not self.engines or sum(sizes) + disk_bytes(self.path) <= self.capacity
        assert {path: self._size(path) for path in self.rows} == self.rows
        parts = [shard.path.parent for _, shard in self.engines]
        assert len(set(parts)) == len(parts)

    def _serve(self, quota: Shards, shard: ShardDir) -> None:
        """As a shard does that is opened: what its part has no room for is cut off."""
        shard.describe({})
        self._resize(shard, min(self._size(shard.path), quota.part_bytes - MIB))
        quota.make_room(0)

    def _end(self, number: int) -> None:
        quota, shard = self.engines.pop(number)
        shard.release()
        quota.release()
        del self.rows[shard.path]

    def _resize(self, shard: ShardDir, nbytes: int) -> None:
        slab = shard.path / "slab-00000.kv"
        slab.touch()
        os.truncate(slab, nbytes)
        self.rows[shard.path] = nbytes
        self.writes += 1
        self.used[shard.path] = self.writes

    @staticmethod
    def _size(shard: Path) -> int:
        return sum(file.stat().st_size for file in shard.glob("slab-*"))

    @staticmethod
    def _name(namespace: int) -> str:
        return namespace.to_bytes(16, "big").hex()


TestPartsOfAPath = PartsOfAPath.TestCase
TestPartsOfAPath.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_part_is_left_to_a_holder_on_a_machine_that_locks_do_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one has it; the earlier one does not take it back, until another holder is named, or none."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    one, other = Shards(tmp_path, 16 * MIB), Shards(tmp_path, 16 * MIB)
    lock = tmp_path / "part-0" / ".lock"
    with one.locked():
        shard = one.acquire_shard(NAMESPACE)
    assert shard.problem() == "" or "namespace.json" in shard.problem()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        with other.locked():
            taken = other.acquire_shard(NAMESPACE)
    assert "has been taken by process" in shard.problem()
    assert "elsewhere" in shard.problem()
    assert "taken" not in taken.problem()
    shard.release()
    one.release()
    for _ in range(2):
        with one.locked(), pytest.raises(TierDown, match=r"part-0 by process .* on elsewhere"):
            one.acquire_shard(NAMESPACE)
    assert "taken" not in taken.problem()
    about = lock.read_bytes()
    taken.release()
    other.release()
    for free in (lock.read_bytes(), b"{}"):
        lock.write_bytes(free)
        with one.locked():
            one.acquire_shard(NAMESPACE).release()
        one.release()
        lock.write_bytes(about)
        with one.locked(), pytest.raises(TierDown, match="on elsewhere"):
            one.acquire_shard(NAMESPACE)


@pytest.mark.parametrize("living", [True, False])
def test_without_locks_a_living_process_that_the_lock_file_names_holds_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, living: bool
) -> None:
    """So `purge` deletes nothing under an engine on a file system that has no locks."""
    pid = os.getppid() if living else 1 << 23  # no process of Linux has this pid
    (tmp_path / ".ledger").touch()
    (tmp_path / "part-0").mkdir()
    (tmp_path / "part-0" / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "engine": 1}))
    real = fcntl.flock

    def no_locks(file: int, how: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().name == ".lock":  # of a part
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with Folder.to_inspect(tmp_path) as base, base.folder("part-0") as part:
        holder = holder_now(base, part)
    assert holder.startswith(f"process {pid} ") if living else not holder
