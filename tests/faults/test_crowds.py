"""More at once than anybody asks for, and workers that fail."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from nixl_tiers.cascade.manager import Lookup
from nixl_tiers.mover import child
from nixl_tiers.mover.protocol import Delete, encode
from tests.faults.arena import LIMITS, PATIENCE_S, Arena
from tests.support.leaks import ResourceCount
from tests.support.load import content, get, put
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

TIERS = ("slabs", "files", "s3")
MANY = 10_000


@pytest.mark.parametrize("tier", ["slabs", pytest.param("files", marks=pytest.mark.faults)])
def test_ten_thousand_pending_keys_and_a_mover_that_does_not_read(
    on_tier: Callable[..., Arena], monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """A hundred requests wait for a hundred rows each. All are answered in time."""
    monkeypatch.setattr(child, "HEARTBEAT_TIMEOUT_S", 60.0)  # they wait for their deadline, not for the mover's end
    number = MANY if tier == "slabs" else MANY // 2  # several times the rows of the host
    arena = on_tier(
        f"{number} pending keys, mover stopped",
        tier,
        chunk=1024,
        limits=replace(LIMITS, hard_deadline_min_s=30.0, hard_deadline_max_s=30.0),
    )
    with arena.under_load():
        store, coordinator = arena.store, arena.store.coordinator
        keys = [b"crowd-%06d" % n for n in range(number)]
        for start in range(0, number, 500):
            put(store, keys[start : start + 500])
        assert store.flush(PATIENCE_S)
        until(arena.is_up, "the tier", PATIENCE_S)
        pid = arena.a_mover()
        os.kill(pid, signal.SIGSTOP)
        names = {f"crowd-{n}": keys[n::100] for n in range(100)}
        waiting = dict(names)
        most = 0
        while waiting:
            pending = 0
            for name in [*waiting]:
                answers = [coordinator.lookup(key, name) for key in waiting[name]]
                pending += answers.count(Lookup.PENDING)
                if Lookup.PENDING not in answers:
                    del waiting[name]
            most = max(most, pending)
            coordinator.end_step()
            with coordinator.changed:
                coordinator.changed.wait(0.05)
        assert most > number // 2
        for name in names:
            coordinator.finish_request(name)
        arena.go_on()
        with contextlib.suppress(ProcessLookupError):  # on a slow machine it has been killed for its silence by now
            os.kill(pid, signal.SIGCONT)
        arena.over()
        arena.heals()


@pytest.mark.parametrize(
    "tier", [pytest.param("slabs"), *(pytest.param(t, marks=pytest.mark.faults) for t in TIERS[1:])]
)
def test_a_socket_that_is_full(on_tier: Callable[..., Arena], monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    """Not one packet more fits, and the engine has something to say: it waits with that, and with nothing else."""
    monkeypatch.setattr(child, "HEARTBEAT_TIMEOUT_S", 60.0)
    arena = on_tier("socket full", tier, limits=replace(LIMITS, hard_deadline_min_s=60.0, hard_deadline_max_s=60.0))
    with arena.under_load():
        arena.go_on()
        pid = arena.a_mover()
        mover = arena.store.coordinator._link.supervisor._movers[0]
        assert mover is not None
        os.kill(pid, signal.SIGSTOP)
        with contextlib.suppress(BlockingIOError):
            while True:
                mover.socket.send(encode(Delete([])))
        arena.store.reset()  # the mover must be told of it before anything else
        until(lambda: mover._unsent, "the engine to have something to say", PATIENCE_S)
        arena.go_on(20)
        with contextlib.suppress(ProcessLookupError):  # on a slow machine it has been killed for its silence by now
            os.kill(pid, signal.SIGCONT)
        arena.over()
        arena.heals()


@pytest.mark.parametrize(
    "tier", [pytest.param("slabs"), *(pytest.param(t, marks=pytest.mark.faults) for t in TIERS[1:])]
)
def test_workers_that_fail_copies(on_tier: Callable[..., Arena], tier: str) -> None:
    """Half of what two workers store never came: it is no hit anywhere, and what did come is."""
    arena = on_tier("workers fail half of their copies", tier)
    failed: list[bytes] = []
    written: list[bytes] = []
    with arena.under_load() as load:
        coordinator, region = arena.store.coordinator, arena.store._region
        for turn in range(40):
            keys = [b"worker-%d-%d" % (turn, n) for n in range(4)]
            plan = coordinator.prepare_store(keys, f"worker-{turn}")
            good = np.arange(len(plan.rows)) % 2 == turn % 2
            for key, row, it_is in zip(plan.keys, plan.rows, good, strict=True):
                region.rows_view[row, : arena.chunk] = content(key, arena.chunk) if it_is else 0xBB
            rows = np.array(plan.rows)
            if good.any():
                region.mark(rows[good], 0, plan.store_seq, True)
            if not good.all():
                region.mark(rows[~good], 0, plan.store_seq, False)
            coordinator.complete_store(plan.keys)
            coordinator.finish_request(f"worker-{turn}")
            written += [key for key, it_is in zip(plan.keys, good, strict=True) if it_is]
            failed += [key for key, it_is in zip(plan.keys, good, strict=True) if not it_is]
            arena.go_on(1)
        assert not load.seen.wrong
        assert arena.store.flush(PATIENCE_S)
        assert arena.store.locate(failed) == [None] * len(failed)
        hits, wrong = get(arena.store, failed)
        assert not any(hits)
        hits, wrong = get(arena.store, written)
        assert not wrong
        assert sum(hits) > len(written) // 2
        for number in range(4):  # and loads: what was not copied is a miss for its request, and for no other
            keys = [key for key in load.keys if arena.store.locate([key]) == ["cpu"]][:4]
            found = [key for key in keys if coordinator.lookup(key, f"load-{number}") is Lookup.HIT]
            coordinator.prepare_load(found, f"load-{number}")
            coordinator.fail_load(found, f"load-{number}")
            assert Lookup.HIT not in [coordinator.lookup(key, f"load-{number}") for key in keys]
            coordinator.end_step()
            coordinator.finish_request(f"load-{number}")
        hits, wrong = get(arena.store, load.keys)
        assert not wrong
        assert any(hits)
        arena.heals()


@pytest.mark.faults
@pytest.mark.parametrize("tier", TIERS)
def test_a_reset_while_the_mover_is_stopped(on_tier: Callable[..., Arena], tier: str) -> None:
    arena = on_tier("reset while the mover is stopped", tier)
    with arena.under_load():
        arena.go_on()
        pid = arena.signal(signal.SIGSTOP)
        arena.store.reset()
        arena.replaced(pid)
        arena.over()
        arena.heals()


@pytest.mark.faults
@pytest.mark.parametrize("tier", TIERS)
def test_a_close_while_the_mover_is_stopped(on_tier: Callable[..., Arena], tier: str) -> None:
    arena = on_tier("close while the mover is stopped", tier)
    before = ResourceCount.take()
    store = arena.open()
    until(lambda: store.stats()[arena.name]["up"], "the tier", PATIENCE_S)
    put(store, [b"key-%d" % n for n in range(40)])
    pid = store.coordinator.mover_pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    store.close(0.5)
    until(lambda: before.covers(ResourceCount.take()), "everything to go", PATIENCE_S)
