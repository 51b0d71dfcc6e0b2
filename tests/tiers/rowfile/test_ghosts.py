"""Entries of rows that another engine may have deleted since, with the real core. It forgets those whose tick is old
(`gone_before`): so a tick is the second when the row was last stored, found or loaded, and the mover says that rows of
more than a minute ago may be gone."""

from __future__ import annotations

from random import Random

import pytest

from nixl_tiers.base.policies import Write
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Limits, TierSpec

KEYS = [b"key %d" % number for number in range(12)]
GHOST_S = 60
ABSENT_S = 5.0


class Engine:
    def __init__(self, there: set[bytes]) -> None:
        spec = TierSpec("file", Write.THROUGH, physical_slots=False, asked=True, absent_s=self.absent_s)
        self.core = TierManager(8, 4096, [spec], limits=Limits(absent_keys=65536))
        take_all(self.core.events.opened(0, 100))
        self.core.events.listed(0, [], last=True)
        self.there = there
        self.seen: dict[bytes, int] = {}  # when it was last known for certain that the row is there
        self.missed: dict[bytes, int] = {}  # or that it is not

    absent_s = FileConfig.absent_s
    loads_count = True

    def knows(self, key: bytes) -> bool:
        return key in self.core.tiers[0].index

    def found(self, key: bytes, now: int) -> None:
        self.seen[key] = now
        self.missed.pop(key, None)
        self.core.events.listed(0, [(0, key, now)], last=False)

    def use(self, key: bytes, now: int) -> None:
        """Of a row that is known: a load. Of one that is not: a question, unless it is known to be absent."""
        loads = self.knows(key)
        if not loads and self.core.checks.known_absent(0, key, now):
            return
        if key not in self.there:
            self.core.tiers[0].index.forget(key)
            self.core.checks.mark_absent(0, key, now)
            self.seen.pop(key, None)
            self.missed[key] = now
        elif not loads or self.loads_count:
            self.found(key, now)
        else:
            self.seen[key] = now

    def store(self, key: bytes, now: int) -> None:
        self.there.add(key)
        self.found(key, now)

    def delete(self, key: bytes, now: int) -> None:
        """Nobody else hears of it."""
        self.there.discard(key)

    def heartbeat(self, now: int) -> None:
        self.core.events.gone_before(0, now - GHOST_S)
        self.core.events.work(now)

    def check(self, now: int) -> None:
        for key in KEYS:
            fresh = now - self.seen.get(key, 0) <= GHOST_S
            assert fresh or not self.knows(key), "a ghost is believed"
            assert self.knows(key) or not fresh, "what is known is asked again"
            if key in self.missed and now - self.missed[key] > ABSENT_S and key not in self.seen:
                assert not self.core.checks.known_absent(0, key, now), "what others have stored is not found"


def explore(engine: type[Engine]) -> None:
    for seed in range(10):
        random, there, now = Random(seed), set[bytes](), 1000
        engines = [engine(there) for _ in range(2)]
        for _ in range(300):
            now += random.choice([0, 0, 1, 4, 6, 31])
            for each in engines:
                each.heartbeat(now)
            key, each = random.choice(KEYS), random.choice(engines)
            random.choice([each.use, each.use, each.use, each.store, each.delete])(key, now)
            for each in engines:
                each.check(now)


def test_entries_are_believed_for_a_minute_and_absence_for_5_s() -> None:
    explore(Engine)


class LoadsDoNotCount(Engine):
    loads_count = False


class NothingIsTooOld(Engine):
    def heartbeat(self, now: int) -> None:
        self.core.events.work(now)


class AbsentAsInABucket(Engine):
    absent_s = 30.0


@pytest.mark.parametrize("mutant", [LoadsDoNotCount, NothingIsTooOld, AbsentAsInABucket])
def test_planted_bug_is_caught(mutant: type[Engine]) -> None:
    with pytest.raises(AssertionError):
        explore(mutant)
