"""The mover of one of a file tier's four directories dies or stops, or the directory fails: the others go on. And any
of them, again and again: `KILL_ROUNDS=n` sets the rounds of the long ones, `SEED=n` repeats a run whose seed was
printed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from tests.support.disks import assert_never_exceeds
from tests.support.engines import sleep_a_moment
from tests.support.leaks import reclaim_all_host_rows
from tests.support.load import get, put
from tests.support.waiting import until
from tests.system.faults.interposer import Interposer
from tests.system.faults.rig import MIB, TIMEOUT_S, FaultRig
from tests.system.faults.test_disk import FAULTS, inject
from tests.system.faults.test_mover import matrix

pytestmark = pytest.mark.timeout(900)

DIRECTORIES = "slabs in directories"
SHORT, LONG = 2, int(os.environ.get("KILL_ROUNDS", "30"))
FULL = 10 * MIB  # of which most is for the prompts that are asked again: so it evicts all the time


def wait_until_whole(rig: FaultRig) -> None:
    """Return when all prompts, once computed again, are hits of the tier."""
    rig.wait_until_healed()
    keys = rig.load.keys

    def whole() -> bool:
        put(rig.store, keys)
        assert rig.store.flush(TIMEOUT_S)
        reclaim_all_host_rows(rig.store)
        quarter = len(keys) // 4  # as many as the host has room for
        found = [get(rig.store, keys[first : first + quarter]) for first in range(0, len(keys), quarter)]
        assert not any(wrong for _, wrong in found)
        return all(all(hits) for hits, _ in found)

    until(whole, "prompts to be whole again", TIMEOUT_S)


@pytest.mark.parametrize(("fault", "tier"), matrix(tuple(FAULTS), (DIRECTORIES,), unmarked=set()))
def test_one_disk_fails(make_rig: Callable[..., FaultRig], disk: Interposer, fault: str, tier: str) -> None:
    """Of four."""
    inject(make_rig(f"{fault}, of one disk", tier), disk, fault)


def test_one_directory_is_deleted(make_rig: Callable[..., FaultRig], tmp_path: Path) -> None:
    rig = make_rig("one directory deleted", DIRECTORIES)
    with rig.under_load():
        rig.wait_for_answers()
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
        rig.fault_ended()
        rig.wait_for_answers(20)
        wait_until_whole(rig)


@pytest.mark.parametrize("rounds", [SHORT, pytest.param(LONG, marks=pytest.mark.faults)])
def test_kill_rounds(make_rig: Callable[..., FaultRig], rounds: int) -> None:
    """Whether it stores, loads or opens, and with others: no directory ever holds more than its part."""
    seed = int(os.environ.get("SEED", "7" if rounds == SHORT else str(time.time_ns() % 10_000)))
    print(f"SEED={seed}")
    draw = Random(seed)
    rig = make_rig(f"SIGKILL of any mover, {rounds} rounds", DIRECTORIES, capacity=FULL)
    with ExitStack() as watched:
        for member in rig.tier.members:
            path = Path(member.path)  # type: ignore[attr-defined]
            watched.enter_context(assert_never_exceeds(path, member.capacity, pause_s=0.005))
        with rig.under_load() as load:
            until(lambda: rig.stats()["evictions"], "the tier to be full", TIMEOUT_S)
            movers = rig.store.coordinator._core.movers
            for _ in range(rounds):
                load.pause_s = 0.0
                killed = draw.choices(range(len(movers)), k=draw.randint(1, 4))
                for rig.mover in killed:
                    rig.wait_for_answers(draw.randint(0, 20))
                    sleep_a_moment(draw)
                    rig.signal_mover(signal.SIGKILL)
                rig.fault_ended()
                wait_until_whole(rig)
                until(lambda: all(mover.readable for mover in movers), "all movers", TIMEOUT_S)
