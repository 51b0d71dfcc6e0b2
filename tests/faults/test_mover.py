"""Movers that die, stop, or hang in NIXL."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_tiers.cascade.tier_index import Direction
from nixl_tiers.coordinator import Coordinator
from nixl_tiers.mover import child
from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule, Way
from tests.faults.arena import KILLS, PATIENCE_S, Arena
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

TIERS = ("slabs", "files", "s3")
ORDINARY = {
    ("SIGKILL", "load", "slabs"),
    ("SIGKILL", "store", "s3"),
    ("SIGSTOP", "load", "files"),
    ("SIGSEGV", "store", "files"),
}


def matrix(*axes: tuple[str, ...], ordinary: set[tuple[str, ...]]) -> list[object]:
    """Every combination; those that are not ordinary are for `make faults` only."""
    return [
        pytest.param(*each, marks=[] if each in ordinary else pytest.mark.faults) for each in itertools.product(*axes)
    ]


@pytest.mark.parametrize(
    ("deadly", "when", "tier"), matrix(tuple(KILLS), ("idle", "store", "load"), TIERS, ordinary=ORDINARY)
)
def test_a_mover_that_dies_or_stops(on_tier: Callable[..., Arena], deadly: str, when: str, tier: str) -> None:
    arena = on_tier(f"{deadly}, {'in the middle of a ' if when != 'idle' else ''}{when}", tier)
    with arena.under_load():
        arena.go_on()
        old = arena.signal(KILLS[deadly], when)
        arena.replaced(old)
        arena.go_on()
        arena.over()
        arena.heals()


@pytest.mark.parametrize(("deadly", "tier"), matrix(tuple(KILLS), TIERS, ordinary={("SIGKILL", "slabs")}))
def test_a_mover_that_dies_or_stops_as_it_starts(on_tier: Callable[..., Arena], deadly: str, tier: str) -> None:
    arena = on_tier(f"{deadly}, at the start", tier)
    struck: list[int] = []

    def strike(coordinator: Coordinator) -> None:
        def watch() -> None:
            until(lambda: coordinator.mover_pids[0] is not None, "a mover", PATIENCE_S)
            pid = coordinator.mover_pids[0]
            assert pid is not None
            os.kill(pid, KILLS[deadly])
            struck.append(pid)

        threading.Thread(target=watch).start()

    with arena.under_load(strike, warm=False):
        until(lambda: struck, "the signal")
        arena.over()
        arena.go_on()
        arena.replaced(struck[0])
        arena.saw(struck[0])
        arena.heals()


@pytest.mark.parametrize(
    ("fault", "way", "tier"),
    matrix(
        ("stall", "freeze"),
        ("store", "load"),
        TIERS,
        ordinary={("stall", "load", "slabs"), ("freeze", "store", "files")},
    ),
)
def test_a_mover_that_hangs_in_nixl(
    on_tier: Callable[..., Arena], tmp_path: Path, fault: str, way: str, tier: str
) -> None:
    """A transfer that never completes (the mover lives on), or a call that never returns (it does not)."""
    switch = tmp_path / "switch"
    plan = FaultPlan((Rule(Fault(fault), Way(way)),), switch=str(switch))
    arena = on_tier(f"{'transfer never ends' if fault == 'stall' else 'call never returns'}, {way}", tier, plan=plan)
    with arena.under_load():
        arena.go_on()
        old = arena.a_mover()
        switch.touch()
        arena.go_on()
        arena.replaced(old)
        switch.unlink()
        arena.over()
        arena.heals()


@pytest.mark.faults
@pytest.mark.parametrize("tier", TIERS)
def test_movers_killed_again_and_again(on_tier: Callable[..., Arena], tier: str) -> None:
    arena = on_tier("SIGKILL, six times", tier)
    with arena.under_load():
        for _ in range(6):
            arena.replaced(arena.signal(signal.SIGKILL))
            arena.go_on(2)
        arena.over()
        arena.heals()


@pytest.mark.faults
@pytest.mark.parametrize("tier", TIERS)
def test_a_mover_that_stops_while_nobody_asks(on_tier: Callable[..., Arena], tier: str) -> None:
    """It is killed, another comes, and loads are found to work, all without one request."""
    arena = on_tier("SIGSTOP, no requests", tier)
    with arena.under_load() as load:
        arena.go_on()
        load.pause_s = 3600.0
        assert arena.store.flush(PATIENCE_S)
        loads = arena.store.coordinator._core.tiers[0].breakers[Direction.LOAD]
        answered = load.turns + 2  # those that are under way
        old = arena.a_mover()
        os.kill(old, signal.SIGSTOP)
        arena.over()
        arena.replaced(old)
        until(lambda: arena.is_up() and loads.episode and loads.closed, "the circuit to close", PATIENCE_S)
        assert load.turns <= answered
        arena.heals()


@pytest.mark.parametrize(
    ("frozen", "tier"), matrix(("engine", "node"), TIERS, ordinary={("engine", "s3"), ("node", "slabs")})
)
def test_a_pause_costs_no_mover(on_tier: Callable[..., Arena], frozen: str, tier: str) -> None:
    """Nothing of the engine runs for longer than a mover may be silent, and a job may take; then all goes on. As after
    a SIGSTOP of the engine, or of everything: a frozen container, a suspended machine."""
    arena = on_tier(f"pause of the {frozen}", tier)
    pause_s = int(max(child.HEARTBEAT_TIMEOUT_S, arena.limits.hard_deadline_max_s)) + 1
    with arena.under_load() as load:
        arena.go_on()
        pid = arena.signal(signal.SIGSTOP, "load") if frozen == "node" else arena.a_mover()
        ctypes.PyDLL(None).sleep(pause_s)  # with the interpreter's lock: no thread of this process runs
        if frozen == "node":
            os.kill(pid, signal.SIGCONT)
        arena.over()
        arena.go_on(40)
        seen = load.seen  # the pause is not the store's
        seen.longest_get_s, seen.longest_put_s = (
            max(0.0, s - pause_s) for s in (seen.longest_get_s, seen.longest_put_s)
        )
        assert arena.mover() == pid
        assert arena.stats()["kills"] == arena.stats()["deaths"] == 0
        arena.heals()
