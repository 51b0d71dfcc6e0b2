"""Engine hits: what the engine had in its own memory is as recent here as what it loads."""

from __future__ import annotations

import pytest

from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import Limits, TierSpec
from tests.support.core import opened, put, touched

KEYS = [b"key-%03d" % number for number in range(200)]
LIMITS = Limits(rows_per_slice=16)


def core_of(*, rows: int = len(KEYS), stored: int = 0) -> TierManager:
    """With one tier, which holds that many of the keys, each used later than the one before."""
    core = TierManager(rows, 4096, [TierSpec("file", Write.THROUGH, True)], LIMITS)
    opened(core, 0, len(KEYS))
    core.events.listed(0, [(n, key, 1 + n) for n, key in enumerate(KEYS[:stored])], last=True)
    return core


def test_what_the_engine_used_goes_last_and_the_deepest_of_it_first() -> None:
    core = core_of(stored=100)
    for start in (32, 16, 0):  # in parts, as of a long prompt
        core.used("request", KEYS[start : min(start + 16, 40)])
    assert core.tiers[0].index.select_victims(100) == [*KEYS[40:100], *reversed(KEYS[:40])]


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_a_root_leaves_after_what_its_request_stores_behind_it(later: bool) -> None:
    core = core_of(rows=8)
    put(core, KEYS[:4], "another")
    if not later:
        core.used("request", KEYS[:4])
    put(core, KEYS[4:8], "request")
    if later:
        core.used("request", KEYS[:4])
    core.host.make_room(4)
    assert list(core.host.index) == KEYS[:4]


def test_the_first_request_is_told_from_one_of_low_priority() -> None:
    """Which gives what it stores the oldest use of all, as if it had been no use."""
    core = TierManager(8, 4096, [], LIMITS)
    core.arrive("low", RequestWishes(evict_first=True))
    put(core, KEYS[:1], "low")
    touched(core, KEYS[:1], "first")
    assert core.host.index[KEYS[0]].tick > 0
