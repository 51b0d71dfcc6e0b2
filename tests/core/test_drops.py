"""Every chunk that is not written to a tier is counted there, once and by reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Direction, Limits, TierSpec
from tests.support import inside
from tests.support.core import opened, put, set_aside


def cascade(slots: int = 100, rows: int = 4, *, physical_slots: bool = True) -> TierManager:
    """A host of `rows` rows over a file tier of `slots`."""
    core = TierManager(rows, 4096, [TierSpec("file", Write.THROUGH, physical_slots)], Limits())
    opened(core, 0, slots)
    core.events.listed(0, [], last=True)
    return core


def saying(refusal: str) -> TierManager:
    """Whose medium says why it takes no rows."""
    core = cascade()
    core.tiers[0].members[0].refusal = refusal  # type: ignore[assignment]
    return core


def settle(core: TierManager, outcome: Outcome = Outcome.OK) -> None:
    for job in core.events.plan(0.0):
        core.events.finished(0, job.id, [outcome] * len(job.moves), 0.0)


def no_room() -> TierManager:
    core = cascade(slots=1, rows=16)
    put(core, [b"one", b"two"])  # two stores at once
    core.events.plan(0.0)
    return core


def behind() -> TierManager:
    core = cascade()
    for number in range(5):  # four wait to be written, and no mover takes them
        put(core, [b"%d" % number])
    return core


def evicted() -> TierManager:
    core = cascade()
    put(core, [b"one"])
    inside.state(core).make_room(4)  # before it was written
    settle(core)
    return core


def evicted_above_a_tier_that_is_down() -> TierManager:
    core = TierManager(4, 4096, [TierSpec("file", Write.ON_EVICT, physical_slots=True)], Limits())
    put(core, [b"one"])
    inside.state(core).make_room(4)
    return core


def refused(said: str = "") -> TierManager:
    """It is down, whatever it said before."""
    core = saying(said)
    put(core, [b"one"])
    core.events.down(0, 0.0)
    return core


def failed() -> TierManager:
    core = cascade()
    put(core, [b"one"])
    settle(core, Outcome.FAILED)
    return core


def full(said: str = "") -> TierManager:
    """A shared prefix whose budget is not known is refused as a full one is: an outage is no lack of room."""
    core = saying(said)
    put(core, [b"one"])
    settle(core, Outcome.NO_SPACE)
    return core


def aside() -> TierManager:
    core = cascade(physical_slots=False)
    set_aside(core.tiers[0], [b"one"], 600.0)
    put(core, [b"one"])
    settle(core)
    return core


def circuit_open(said: str = "") -> TierManager:
    core = saying(said)
    core.tiers[0].members[0].breakers[Direction.STORE].trip(0.0)
    put(core, [b"one"])
    return core


@pytest.mark.parametrize(
    ("drop", "reason"),
    [
        (no_room, "full"),
        (full, "full"),
        (lambda: full("denied"), "denied"),
        (lambda: full("unreachable"), "unreachable"),
        (behind, "slow"),
        (evicted, "slow"),
        (refused, "unreachable"),
        (evicted_above_a_tier_that_is_down, "unreachable"),
        (lambda: refused("denied"), "unreachable"),
        (circuit_open, "unreachable"),
        (lambda: circuit_open("denied"), "denied"),
        (failed, "failed"),
        (aside, "failed"),
    ],
)
def test_a_drop_is_counted_once_and_by_its_reason(drop: Callable[[], TierManager], reason: str) -> None:
    counters = drop().counters()["file"].counters
    assert getattr(counters, f"dropped_{reason}") == counters.dropped == 1
    assert counters.failed == (drop is failed), "what a full medium refuses has not failed"
