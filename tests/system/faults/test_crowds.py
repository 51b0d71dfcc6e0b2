"""Overload: more pending keys than host rows, a full socket; and workers whose copies fail."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.types import BreakerLimits
from nixl_tiers.mover.protocol import Delete, encode
from tests.support.core import end_step, finish, look_up
from tests.support.load import content, get, put
from tests.support.waiting import until
from tests.system.faults.rig import LIMITS, TIMEOUT_S, TIMES, FaultRig

pytestmark = pytest.mark.timeout(900)

TIERS = ("slabs", *(pytest.param(tier, marks=pytest.mark.faults) for tier in ("files", "s3")))
MANY = 10_000
LONG = msgspec.structs.replace(TIMES, heartbeat_timeout_s=60.0)


@pytest.mark.parametrize("tier", TIERS[:2])
def test_thousands_of_pending_keys_while_the_mover_is_stopped(make_rig: Callable[..., FaultRig], tier: str) -> None:
    """100 requests wait for 100 rows each, or 50. All are answered within their deadline."""
    # The requests end by their deadline, and neither by the end of the mover nor by its circuit: a slow machine asks
    # for the last of them when jobs are late already.
    patient = replace(LIMITS, hard_deadline_min_s=30.0, hard_deadline_max_s=30.0, quarantine_share=1.0)
    number = MANY if tier == "slabs" else MANY // 2  # several times the rows of the host
    rig = make_rig(
        f"{number} pending keys, mover stopped",
        tier,
        chunk=1024,
        limits=replace(patient, breaker=BreakerLimits(failures_to_open=BreakerLimits.results + 1)),
        times=LONG,
    )
    with rig.under_load():
        store, coordinator = rig.store, rig.store.coordinator
        keys = [b"pending-%06d" % n for n in range(number)]
        for start in range(0, number, 500):
            put(store, keys[start : start + 500])
        assert store.flush(TIMEOUT_S)
        until(rig.is_up, "the tier", TIMEOUT_S)
        pid = rig.wait_for_mover()
        os.kill(pid, signal.SIGSTOP)
        names = {f"pending-{n}": keys[n::100] for n in range(100)}
        waiting = dict(names)
        most = 0
        while waiting:
            pending = 0
            for name in [*waiting]:
                answers = [look_up(coordinator, key, name) for key in waiting[name]]
                pending += answers.count(Lookup.PENDING)
                if Lookup.PENDING not in answers:
                    del waiting[name]
            most = max(most, pending)
            end_step(coordinator)
            with coordinator.changed:
                coordinator.changed.wait(0.05)
        assert most > number // 2
        for name in names:
            finish(coordinator, name)
        rig.wait_for_answers()
        with contextlib.suppress(ProcessLookupError):  # a slow machine: the watchdog has killed it by now
            os.kill(pid, signal.SIGCONT)
        rig.fault_ended()
        rig.wait_until_healed()


@pytest.mark.parametrize("tier", TIERS)
def test_full_socket(make_rig: Callable[..., FaultRig], tier: str) -> None:
    """No packet fits into the socket to the mover: messages queue up, and nothing else waits."""
    limits = replace(LIMITS, hard_deadline_min_s=60.0, hard_deadline_max_s=60.0)
    rig = make_rig("socket full", tier, limits=limits, times=LONG)
    with rig.under_load():
        rig.wait_for_answers()
        pid = rig.wait_for_mover()
        mover = rig.store.coordinator._link.supervisor._movers[0]
        assert mover is not None
        os.kill(pid, signal.SIGSTOP)
        with contextlib.suppress(BlockingIOError):
            while True:
                mover.socket.send(encode(Delete([])))
        rig.store.reset()  # sends the mover a message
        until(lambda: mover._unsent, "a message to be queued", TIMEOUT_S)
        rig.wait_for_answers(20)
        with contextlib.suppress(ProcessLookupError):  # a slow machine: the watchdog has killed it by now
            os.kill(pid, signal.SIGCONT)
        rig.fault_ended()
        rig.wait_until_healed()


@pytest.mark.parametrize("tier", TIERS)
def test_failed_worker_copies_are_no_hits(make_rig: Callable[..., FaultRig], tier: str) -> None:
    """Half of the copies of two workers fail: those chunks are misses in every tier, the others are hits."""
    rig = make_rig("workers fail half of their copies", tier)
    failed: list[bytes] = []
    written: list[bytes] = []
    with rig.under_load() as load:
        coordinator, region = rig.store.coordinator, rig.store.coordinator.region
        for turn in range(40):
            keys = [b"worker-%d-%d" % (turn, n) for n in range(4)]
            plan = coordinator.prepare_store(f"worker-{turn}", keys)
            succeeds = np.arange(len(plan.rows)) % 2 == turn % 2
            for key, row, copied in zip(plan.keys, plan.rows, succeeds, strict=True):
                region.rows_view[row, : rig.chunk] = content(key, rig.chunk) if copied else 0xBB
            rows = np.array(plan.rows)
            if succeeds.any():
                region.mark(rows[succeeds], 0, plan.store_seq, True)
            if not succeeds.all():
                region.mark(rows[~succeeds], 0, plan.store_seq, False)
            coordinator.complete_store(plan.keys)
            finish(coordinator, f"worker-{turn}")
            written += [key for key, copied in zip(plan.keys, succeeds, strict=True) if copied]
            failed += [key for key, copied in zip(plan.keys, succeeds, strict=True) if not copied]
            rig.wait_for_answers(1)
        assert not load.stats.wrong
        assert rig.store.flush(TIMEOUT_S)
        assert rig.store.locate(failed) == [None] * len(failed)
        hits, wrong = get(rig.store, failed)
        assert not any(hits)

        def others_are_hits() -> bool:
            """All that are still there: a slow tier has not written each of them before the host needed its row."""
            there = [key for key, place in zip(written, rig.store.locate(written), strict=True) if place]
            hits, wrong = get(rig.store, there)
            assert not wrong
            return bool(there) and all(hits)

        until(others_are_hits, "what was copied to be hits", TIMEOUT_S)
        for number in range(4):  # failed loads are misses for their own request, and for no other
            keys = [key for key in load.keys if rig.store.locate([key]) == ["cpu"]][:4]
            with coordinator.core():  # in one step: others end theirs, after which hits may be evicted
                found = [key for key in keys if look_up(coordinator, key, f"load-{number}") is Lookup.HIT]
                coordinator.prepare_load(f"load-{number}", found)
            coordinator.complete_load(f"load-{number}", failed=True)
            assert Lookup.HIT not in [look_up(coordinator, key, f"load-{number}") for key in keys]
            end_step(coordinator)
            finish(coordinator, f"load-{number}")
        hits, wrong = get(rig.store, load.keys)
        assert not wrong
        assert any(hits)
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
