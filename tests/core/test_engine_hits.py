"""Engine hits: a scheduler's report of what the engine had in its own memory costs it nothing per chunk."""

from __future__ import annotations

from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Key, Namespace, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.config import schema as configuration
from nixl_tiers.core import engine_hits
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import TierSpec
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from tests.support import inside
from tests.support.core import all_good, end_step, opened, put, touched

KEYS = [b"key-%03d" % number for number in range(200)]
LIMITS = Limits(rows_per_slice=16)


def end_all_stores(core: TierManager) -> None:
    while jobs := core.turn(0.0, 0.0):
        for job in jobs:
            core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), 0.0)


class Unread(list[Key]):
    """Keys that nothing may look at yet."""

    readable = False

    def __getitem__(self, place: Any) -> Any:
        assert self.readable
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        assert self.readable
        return super().__iter__()


def core_of(*, rows: int = len(KEYS), stored: int = 0) -> TierManager:
    """With one tier, which holds that many of the keys, each used later than the one before."""
    core = TierManager(rows, 4096, [TierSpec("file", Write.THROUGH, True)], LIMITS)
    opened(core, 0, len(KEYS))
    core.events.listed(0, [(n, key, 1 + n) for n, key in enumerate(KEYS[:stored])], last=True)
    return core


def test_a_report_looks_at_no_key_and_is_worked_off_in_slices() -> None:
    core = core_of(stored=100)
    hits = Unread(KEYS[:40])
    core.used("request", hits)
    core.finish("request")
    assert core.urgency.wants_turn == (True, False)
    hits.readable = True
    turns = 0
    while inside.uses_to_note(core):
        before = inside.uses_to_note(core)
        core.turn(0.0, 0.0)
        assert 0 < before - inside.uses_to_note(core) <= LIMITS.rows_per_slice
        assert core.events.unfinished or not inside.uses_to_note(core)
        turns += 1
    assert turns == 3
    assert not core.urgency.can_start
    # Now they are the last to go, the deepest first.
    assert core.tiers[0].index.select_victims(100) == [*KEYS[40:100], *reversed(KEYS[:40])]


def test_of_several_reports_the_last_one_counts() -> None:
    core = core_of(stored=6)
    core.used("first", KEYS[:2])
    core.used("second", KEYS[2:4])
    core.used("third", KEYS[:1])
    core.events.work(0.0)
    assert core.tiers[0].index.select_victims(6) == [KEYS[4], KEYS[5], KEYS[1], KEYS[3], KEYS[2], KEYS[0]]


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_a_root_leaves_after_what_its_request_stores_behind_it(later: bool) -> None:
    core = core_of(rows=8)
    put(core, KEYS[:4], "another")
    core.used("request", KEYS[:4])
    if not later:
        core.events.work(0.0)
    put(core, KEYS[4:8], "request")
    core.events.work(0.0)
    core.host.make_room(4)
    assert list(core.host.index) == KEYS[:4]


def test_what_a_request_has_stored_and_then_hits_is_no_younger_than_what_another_stores_then() -> None:
    """The report of a request that looked nothing up has all of its chunks."""
    core = core_of()
    core.prepare_store("request", KEYS[:1])
    core.complete_store(KEYS[:1], all_good)
    end_all_stores(core)
    touched(core, KEYS[:1], "request")
    put(core, KEYS[1:2], "another")
    end_all_stores(core)
    assert core.tiers[0].index.select_victims(1) == KEYS[:1]
    assert [row.key for row in core.host.select_victims(1)] == KEYS[:1]


def test_a_reset_forgets_what_was_reported() -> None:
    core = core_of()
    core.used("request", Unread(KEYS[:40]))
    core.reset(keep_tiers=True)
    assert inside.uses_to_note(core) == 0
    core.turn(0.0, 0.0)


def test_reports_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_hits, "MAX_KEYS", 50)
    core = core_of(stored=100)
    for start in range(0, 100, 20):
        core.used(f"request {start}", KEYS[start : start + 20])
        assert inside.uses_to_note(core) <= 50
    touched(core, [], "none")
    assert core.tiers[0].index.select_victims(60) == KEYS[:60]
    assert inside.uses_to_note(core) == 0


def test_without_storage_tiers_steps_work_them_off() -> None:
    tiers = configuration.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}]})
    with HostRegion.create(Geometry(1, 4096), 8) as region:
        coordinator = Coordinator(tiers, Namespace.of({"name": "n"}), region)
        core = coordinator._core
        put(core, KEYS[:8], "first")
        core.used("request", KEYS[:4] * 100)
        end_step(coordinator)
        assert inside.uses_to_note(core) == 0
        core.host.make_room(4)
        assert list(core.host.index) == KEYS[:4]
        coordinator.close(0.0)


def test_the_first_request_is_told_from_one_of_low_priority() -> None:
    """Which gives what it stores the oldest use of all, as if it had been no use."""
    core = TierManager(8, 4096, [], LIMITS)
    core.arrive("low", RequestWishes(evict_first=True))
    put(core, KEYS[:1], "low")
    touched(core, KEYS[:1], "first")
    assert core.host.index[KEYS[0]].tick > 0
