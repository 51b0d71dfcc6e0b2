"""Movers that die, stop, or hang in NIXL."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule, Way
from tests.support.waiting import until
from tests.system.faults.rig import KILLS, PATIENCE_S, TIMEOUT_S, FaultRig

pytestmark = pytest.mark.timeout(900)

TIERS = ("slabs", "slabs by NIXL", "files", "s3")
UNMARKED = {
    ("SIGKILL", "load", "slabs"),
    ("SIGKILL", "store", "s3"),
    ("SIGSTOP", "load", "files"),
    ("SIGSEGV", "store", "files"),
}


def matrix(*axes: tuple[str, ...], unmarked: set[tuple[str, ...]]) -> list[object]:
    """Every combination, marked `faults` (run by `make faults` only) unless in `unmarked`."""
    return [
        pytest.param(*each, marks=[] if each in unmarked else pytest.mark.faults) for each in itertools.product(*axes)
    ]


@pytest.mark.parametrize(
    ("signal_name", "when", "tier"), matrix(tuple(KILLS), ("idle", "store", "load"), TIERS, unmarked=UNMARKED)
)
def test_mover_dies_or_stops(make_rig: Callable[..., FaultRig], signal_name: str, when: str, tier: str) -> None:
    rig = make_rig(f"{signal_name}, {'during a ' if when != 'idle' else ''}{when}", tier)
    rig.ride_out(lambda: rig.kill(KILLS[signal_name], when), answers=8)


@pytest.mark.parametrize(
    ("signal_name", "tier"), matrix(("SIGKILL", "SIGSTOP"), TIERS, unmarked={("SIGKILL", "slabs")})
)
def test_mover_dies_or_stops_at_start(make_rig: Callable[..., FaultRig], signal_name: str, tier: str) -> None:
    rig = make_rig(f"{signal_name}, at the start", tier)
    signalled: list[int] = []

    def send_signal(coordinator: Coordinator) -> None:
        def send() -> None:
            until(lambda: coordinator.mover_pids[0] is not None, "a mover", TIMEOUT_S)
            pid = coordinator.mover_pids[0]
            assert pid is not None
            os.kill(pid, KILLS[signal_name])
            signalled.append(pid)

        threading.Thread(target=send).start()

    with rig.under_load(send_signal, warm=False):
        until(lambda: signalled, "the signal")
        rig.fault_ended()
        rig.wait_for_answers()
        rig.wait_for_restart(signalled[0])
        rig.movers.add(signalled[0])
        rig.wait_until_healed()


@pytest.mark.parametrize(
    ("fault", "way", "tier"),
    matrix(
        ("stall", "freeze"),
        ("store", "load"),
        TIERS,
        unmarked={("stall", "load", "slabs"), ("freeze", "store", "files")},
    ),
)
def test_mover_hangs_in_nixl(
    make_rig: Callable[..., FaultRig], tmp_path: Path, fault: str, way: str, tier: str
) -> None:
    """A transfer that never completes while the mover keeps running, or a NIXL call that never returns."""
    switch = tmp_path / "switch"
    plan = FaultPlan((Rule(Fault(fault), Way(way)),), switch=str(switch))
    rig = make_rig(f"{'NIXL transfer hangs' if fault == 'stall' else 'NIXL call hangs'}, {way}", tier, plan=plan)
    with rig.under_load():
        rig.wait_for_answers()
        old = rig.wait_for_mover()
        switch.touch()
        rig.wait_for_answers()
        rig.wait_for_restart(old)
        switch.unlink()
        rig.fault_ended()
        rig.wait_until_healed()


@pytest.mark.parametrize(
    ("frozen", "tier"), matrix(("engine", "node"), TIERS, unmarked={("engine", "s3"), ("node", "slabs")})
)
def test_pause_kills_no_mover(
    make_rig: Callable[..., FaultRig], patient: dict[str, Any], frozen: str, tier: str
) -> None:
    """The engine stands still for longer than the heartbeat timeout and the deadlines, then goes on: as after a SIGSTOP
    of the engine, or of everything (a frozen container, a suspended machine)."""
    rig = make_rig(f"{frozen} paused", tier, **patient)
    pause_s = int(PATIENCE_S) + 1
    with rig.under_load() as load:
        rig.wait_for_answers()
        pid = rig.signal_mover(signal.SIGSTOP, "load") if frozen == "node" else rig.wait_for_mover()
        ctypes.PyDLL(None).sleep(pause_s)  # holds the GIL: no thread of this process runs
        if frozen == "node":
            os.kill(pid, signal.SIGCONT)
        rig.fault_ended()
        rig.wait_for_answers(40)
        stats = load.stats  # do not count the pause as a stall
        stats.longest_get_s, stats.longest_put_s = (
            max(0.0, s - pause_s) for s in (stats.longest_get_s, stats.longest_put_s)
        )
        assert rig.mover_pid() == pid
        assert rig.stats()["kills"] == rig.stats()["deaths"] == 0
        rig.wait_until_healed()


@pytest.mark.faults
@pytest.mark.parametrize("tier", TIERS)
def test_reset_while_the_mover_is_stopped(make_rig: Callable[..., FaultRig], tier: str) -> None:
    rig = make_rig("reset while the mover is stopped", tier)

    def stop_and_reset() -> None:
        pid = rig.signal_mover(signal.SIGSTOP)
        rig.store.reset()
        rig.wait_for_restart(pid)

    rig.ride_out(stop_and_reset, answers=8)
