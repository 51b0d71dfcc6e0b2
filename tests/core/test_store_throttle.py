"""Write-back keeps out of the way of promotions, and is not starved by them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support.core import all_good, look_up_key, opened

ROWS = 100
LIMITS = Limits(store_hold_s=0.5, hold_share=0.25, load_share=0.2, store_share=0.1, reserve_share=0.1)
WINDOW = 5  # a tenth of the host's rows, shared by two tiers
STORED = [b"stored-%d" % number for number in range(200)]
TURN_S = 0.05


class Driver:
    """Two tiers, the lower of which holds many rows; movers that do nothing until a test ends their jobs."""

    def __init__(self, writes: tuple[Write, Write] = (Write.THROUGH, Write.THROUGH), rows: int = ROWS) -> None:
        specs = [TierSpec(f"tier{number}", write, physical_slots=False) for number, write in enumerate(writes)]
        self.core = TierManager(rows, 4096, specs, LIMITS)
        self.now = 0.0
        self.jobs: list[Job] = []
        for tier, listed in enumerate(([], STORED)):
            opened(self.core, tier, 1000)
            self.core.events.listed(tier, [(0, key, 0) for key in listed], last=True)

    def put(self, *keys: Key) -> None:
        plan = self.core.prepare_store("put", keys)
        assert len(plan.keys) == len(keys)
        self.core.complete_store(plan.keys, all_good)
        self.core.finish("put")
        self.core.end_step()

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

    def end_loads(self) -> None:
        for job in [job for job in self.jobs if job.direction is Direction.LOAD]:
            self.end(job)


def new_keys(number: int) -> list[Key]:
    return [b"new-%d" % each for each in range(number)]


def steady_stream(driver: Driver, seconds: float) -> Iterator[list[Key]]:
    """Each turn's stores, while one promotion ends and another begins all the time."""
    for number in range(round(seconds / TURN_S)):
        driver.now = number * TURN_S
        driver.ask(STORED[number], f"asks-{number}")
        yield driver.stored()
        driver.core.finish(f"asks-{number - 1}")
        driver.end_loads()


def written_beside_promotions() -> int:
    """How many rows are written to the lower tier in 2.5 s."""
    driver = Driver((Write.OFF, Write.THROUGH))
    driver.put(*new_keys(20))
    began: list[tuple[float, int]] = []
    for keys in steady_stream(driver, 2.5):
        began += [(driver.now, len(keys))] if keys else []
    assert all(rows <= WINDOW for _, rows in began)
    assert all(later - earlier >= LIMITS.store_hold_s - 1e-6 for (earlier, _), (later, _) in pairwise(began))
    return sum(rows for _, rows in began)


def test_steady_stream_of_promotions_does_not_starve_stores() -> None:
    assert written_beside_promotions() == 20


def test_tier_that_is_far_behind_is_not_held_up() -> None:
    driver = Driver((Write.OFF, Write.THROUGH))
    driver.ask(STORED[0])
    driver.turn()
    driver.put(*new_keys(25))
    assert driver.stored() == []
    driver.put(b"one more")
    assert driver.stored() == new_keys(WINDOW)
    assert driver.stored() == []
