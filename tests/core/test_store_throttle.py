"""Write-back keeps out of the way of promotions, and is not starved by them."""

from __future__ import annotations

from itertools import pairwise

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support.core import look_up_key, opened, put

ROWS = 100
LIMITS = Limits(store_hold_s=0.5, hold_share=0.25, load_share=0.2, store_share=0.1, reserve_share=0.1)
WINDOW = 5  # a tenth of the host's rows, shared by two tiers
STORED = [b"stored-%d" % number for number in range(200)]
TURN_S = 0.05


class Driver:
    """Two tiers, the lower of which holds many rows; movers that do nothing until a test ends their jobs."""

    def __init__(self) -> None:
        specs = [
            TierSpec(f"tier{n}", write, physical_slots=False) for n, write in enumerate((Write.OFF, Write.THROUGH))
        ]
        self.core = TierManager(ROWS, 4096, specs, LIMITS)
        self.now = 0.0
        self.jobs: list[Job] = []
        for tier, listed in enumerate(([], STORED)):
            opened(self.core, tier, 1000, [(0, key, 0) for key in listed])

    def put(self, *keys: Key) -> None:
        put(self.core, keys)
        assert all(key in self.core.host.index for key in keys)

    def ask(self, key: Key, request: str | None = None) -> None:
        assert look_up_key(self.core, key, request or f"asks for {key!r}", 0, self.now) is Lookup.PENDING
        self.core.end_step()

    def turn(self) -> list[Job]:
        """The jobs that begin."""
        begun = self.core.turn(self.now, self.now)
        self.jobs += begun
        return begun

    def stored(self) -> list[Key]:
        """The keys of the stores that begin, whose jobs end at once."""
        keys = []
        for job in [job for job in self.turn() if job.direction is Direction.STORE]:
            keys += [move.key for move in job.moves]
            self.end(job)
        return keys

    def end(self, job: Job) -> None:
        self.jobs.remove(job)
        self.core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), self.now)


def new_keys(number: int) -> list[Key]:
    return [b"new-%d" % each for each in range(number)]


def test_steady_stream_of_promotions_does_not_starve_stores() -> None:
    """While one promotion ends and another begins all the time, each turn."""
    driver = Driver()
    driver.put(*new_keys(20))
    began: list[tuple[float, int]] = []
    for number in range(round(2.5 / TURN_S)):
        driver.now = number * TURN_S
        driver.ask(STORED[number], f"asks-{number}")
        if keys := driver.stored():
            began.append((driver.now, len(keys)))
        driver.core.finish(f"asks-{number - 1}")
        for job in [job for job in driver.jobs if job.direction is Direction.LOAD]:
            driver.end(job)
    assert all(rows <= WINDOW for _, rows in began)
    assert all(later - earlier >= LIMITS.store_hold_s - 1e-6 for (earlier, _), (later, _) in pairwise(began))
    assert sum(rows for _, rows in began) == 20


def test_tier_that_is_far_behind_is_not_held_up() -> None:
    driver = Driver()
    driver.ask(STORED[0])
    driver.turn()
    driver.put(*new_keys(25))
    assert driver.stored() == []
    driver.put(b"one more")
    assert driver.stored() == new_keys(WINDOW)
    assert driver.stored() == []
