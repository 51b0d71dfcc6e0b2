"""Whether rows are there: what the tier says of it, and what becomes of questions that are never answered."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.store import open_with
from nixl_tiers.tiers.existence import MAX_CONCURRENT
from nixl_tiers.tiers.rowfile import tier as module
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from tests.mover.harness import NAMESPACE, key_of
from tests.support.disks import refusing_mount
from tests.support.file_tier import files_tier
from tests.support.load import get, put
from tests.support.times import changed
from tests.support.waiting import until, until_up
from tests.system.tiers.file_tiers import load, make_tier, run_until, store

KEYS = [key_of(number) for number in range(3 * MAX_CONCURRENT)]
Opens = Callable[..., RowFileTier]


@pytest.fixture
def opened(tmp_path: Path, region: HostRegion) -> Iterator[Opens]:
    made: list[RowFileTier] = []

    def opened(times: Times = PRODUCTION) -> RowFileTier:
        tier = make_tier("files", tmp_path, region, times=times)
        assert isinstance(tier, RowFileTier)
        made.append(tier)
        tier.open(NAMESPACE, 0)
        return tier

    yield opened
    for tier in made:
        tier.close()


def answered(tier: RowFileTier, keys: list[bytes], *, chain: bool = False) -> tuple[list[bytes], dict[bytes, int]]:
    """The absent keys, and when the others were last known to be there."""
    assert tier.check_existence(1, keys, chain)
    answers = []
    run_until(tier, lambda: bool(answers.extend(tier.existence_answers()) or answers))
    return list(answers[0].absent), {entry.key: entry.tick for entry in tier.found()}


def test_rows_are_known_by_the_second_in_which_they_were_stored_found_or_loaded(
    opened: Opens, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000]
    monkeypatch.setattr(module, "_now_s", lambda: now[0])
    tier, other = opened(), opened()
    assert tier.gone_before == 940
    store(tier, region, range(3))
    assert {entry.key: entry.tick for entry in tier.found()} == dict.fromkeys(KEYS[:3], 1000)
    assert answered(other, KEYS[:5], chain=True) == (KEYS[3:4], dict.fromkeys(KEYS[:3], 1000))
    assert answered(other, [KEYS[7], KEYS[1]]) == ([KEYS[7]], {KEYS[1]: 1000})
    now[0] += 50
    assert load(tier, region, range(2)) == [Outcome.OK] * 2
    assert {entry.key: entry.tick for entry in tier.found()} == dict.fromkeys(KEYS[:2], 1050)
    assert tier.gone_before == 990
    store(other, region, range(2))
    assert {entry.key: entry.tick for entry in other.found()} == dict.fromkeys(KEYS[:2], 1050), "it was there"
    tier.directory.absolute(RowPath.of(NAMESPACE.hex(), KEYS[0])).unlink()
    assert load(tier, region, range(1)) == [Outcome.MISSING]
    assert tier.found() == []
    assert answered(tier, KEYS[:1]) == (KEYS[:1], {})


def test_tier_is_stuck_when_no_thread_has_been_left_for_a_time(opened: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(changed(file_check_s=0.01, file_stuck_s=0.05))
    hangs = threading.Event()
    monkeypatch.setattr(tier.directory, "stat", lambda _: hangs.wait(60) and None)
    assert answered(tier, KEYS) == ([], {})
    assert not tier.stuck, "since now"
    run_until(tier, lambda: tier.stuck)
    hangs.set()
    run_until(tier, lambda: not tier.stuck)


def test_mover_whose_questions_hang_is_killed_and_the_next_one_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that stops answers nothing, and no thread returns."""
    caplog.set_level(logging.INFO, "nixl_tiers")
    size, keys = 60_000, [b"key-%d" % number for number in range(4)]
    with refusing_mount(tmp_path, {}) as disk:
        files = files_tier(disk.place / "kv", 64 << 20)
        tiers: dict[str, object] = {"tiers": [{"type": "cpu", "capacity": 4 << 20}, files], "wait_s": 1, "probe_s": 1}
        with open_with(changed(file_check_s=0.2, file_stuck_s=0.5), tiers, size, "n") as store:
            until_up(store)
            put(store, keys)
            assert store.flush(60)
            os.kill(disk.pid, signal.SIGSTOP)
            try:
                missing = [b"missing-%d" % number for number in range(3 * MAX_CONCURRENT)]
                assert not any(get(store, missing)[0])
                until(lambda: "existence checks are stuck" in caplog.text, "the mover to be killed")
            finally:
                os.kill(disk.pid, signal.SIGCONT)
            until_up(store)
            assert get(store, keys) == ([True] * 4, [])
