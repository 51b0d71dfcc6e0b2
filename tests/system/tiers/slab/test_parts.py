"""Parts of a path: each held by one engine, taken over warm by the next one, all of them within the capacity."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, Open, Opened
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab import tier as slab_tier
from nixl_tiers.tiers.slab.parts import holder_now
from nixl_tiers.tiers.slab.shards import Shards
from tests.mover.harness import NAMESPACE, MoverProcess
from tests.support.file_tier import file_config, file_tier
from tests.support.leaks import ResourceCount
from tests.support.times import changed
from tests.tiers.slab.test_parts import CAPACITY

GEOMETRY = Geometry(1, 120_000)
BATCH = 32


def mover_on(path: Path, replicas: int = 1, capacity: int = CAPACITY) -> MoverProcess:
    return MoverProcess(file_tier(path, capacity), GEOMETRY, BATCH, replicas=replicas)


def listed(mover: MoverProcess) -> set[int]:
    return {int(entry.key[4:]) for entry in mover.listed_rows()}


def down_reason(mover: MoverProcess, namespace: bytes = NAMESPACE) -> str:
    mover.send(Open(namespace, 0))
    down = mover.expect(lambda m: isinstance(m, Down))
    assert isinstance(down, Down)
    return down.reason


@pytest.mark.parametrize("living", [True, False])
def test_without_locks_a_living_process_that_the_lock_file_names_holds_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, living: bool
) -> None:
    """So `purge` deletes nothing under an engine on a file system that has no locks."""
    (tmp_path / ".ledger").touch()
    (tmp_path / "part-0").mkdir()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        if not living:
            other.kill()
            other.wait()
        about = {"host": socket.gethostname(), "pid": other.pid, "engine": 1}
        (tmp_path / "part-0" / ".lock").write_text(json.dumps(about))
        real = fcntl.flock

        def no_locks(file: Any, how: int) -> None:
            if Path(f"/proc/self/fd/{file}").readlink().name == ".lock":  # of a part
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            real(file, how)

        monkeypatch.setattr(fcntl, "flock", no_locks)
        with Folder.to_inspect(tmp_path) as base, base.folder("part-0") as part:
            holder = holder_now(base, part)
        assert holder.startswith(f"process {other.pid} ") if living else not holder
    finally:
        other.kill()
        other.wait()


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_second_engine_is_down_with_the_holders_name_and_adopts_its_rows_warm(tmp_path: Path, end: str) -> None:
    """A rolling update on one host path: the new pod starts while the old one still runs."""
    with mover_on(tmp_path) as old, mover_on(tmp_path) as new:
        old.open()
        assert set(old.store(range(BATCH))) == {Outcome.OK}
        reason = down_reason(new)
        assert reason.startswith(f"{tmp_path} is in use: part-0 by process {old.process.pid} (engine {os.getpid()}) on")
        assert "replicas (1 here) is how many engines may use it at once" in reason
        assert set(old.load(range(BATCH))) == {Outcome.OK}
        old.kill() if end == "kill" else old.stop()
        new.expect(lambda m: isinstance(m, Opened))
        assert listed(new) == set(range(BATCH))
        assert set(new.load(range(BATCH))) == {Outcome.OK}


def test_open_that_fails_at_its_end_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened again and again: each time that would leave threads and open files of a part it no longer holds."""
    make_room, error = Shards.make_room, RuntimeError("a defect")

    def failing(quota: Shards, need_bytes: int) -> str:
        if not need_bytes:
            raise error
        return make_room(quota, need_bytes)

    with HostRegion.create(GEOMETRY, 4) as region:
        tier = slab_tier.SlabTier(file_config(tmp_path, CAPACITY), GEOMETRY, region)
        before = ResourceCount.take()  # threads of earlier tests may end meanwhile
        with monkeypatch.context() as patch:
            patch.setattr(Shards, "make_room", failing)
            with pytest.raises(RuntimeError, match="a defect"):
                tier.open(NAMESPACE, 0)
            assert before.covers(ResourceCount.take())
            error = OSError(5, "Input/output error")  # of what else is in the part: nothing grows until it is gone
            assert tier.open(NAMESPACE, 0) > 0
        tier.close()


# --- the lock of the path ---------------------------------------------------------------------------------------------


def test_opening_says_that_it_waits_for_a_stopped_holder_of_the_lock(tmp_path: Path) -> None:
    times = changed(lock_wait_s=0.1)
    with HostRegion.create(GEOMETRY, 1) as region:
        tier = slab_tier.SlabTier(file_config(tmp_path, CAPACITY), GEOMETRY, region)
        tier.open(NAMESPACE, 0)
        tier.close()
        with (tmp_path / ".ledger").open() as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            tier = slab_tier.SlabTier(file_config(tmp_path, CAPACITY), GEOMETRY, region, times=times)
            with pytest.raises(TierDown, match=rf"it waits for {tmp_path}/\.ledger") as down:
                tier.open(NAMESPACE, 0)
            assert down.value.retry_s < 10
        tier.open(NAMESPACE, 0)
        tier.close()
