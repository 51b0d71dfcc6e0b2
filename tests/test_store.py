"""What a put of more than fits, and a get of many keys, ask of the cascade."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Key, Namespace, Outcome
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.types import Job, Limits
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.blocking import POLL_S
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from tests.support.core import opened

SIZE = 1000
WAIT_S = 2.0
ROW_BYTES = Geometry(1, SIZE).row_bytes


def keys_of(count: int) -> list[Key]:
    return [b"key-%05d" % number for number in range(count)]


def config(*storage: dict[str, Any], rows: int, **others: Any) -> dict[str, Any]:
    return {"tiers": [{"type": "cpu", "capacity": rows * ROW_BYTES}, *storage], **others}


class SlowTier:
    """A store over a tier that holds `keys`, without a mover: whenever the store waits, time passes and one load ends,
    but for those of `stuck`."""

    def __init__(self, keys: list[Key], monkeypatch: pytest.MonkeyPatch, *stuck: Key) -> None:
        self.now = 100.0
        self.stop_s = 0.0  # during the next wait the machine is stopped for so long
        self._stopped_s = 0.0
        self._stuck = stuck
        self.outcome = Outcome.OK
        self._jobs: deque[Job] = deque()
        path = {"type": "file", "path": "/nowhere", "capacity": "1MiB", "min_free": 0}
        geometry = Geometry(1, SIZE)
        self.coordinator = Coordinator(
            configuration.load(config(path, rows=64, wait_s=WAIT_S)),
            Namespace.of({"name": "slow"}),
            HostRegion.create(geometry, 64),
            limits=Limits(wait_s=WAIT_S, moves_per_job=1),
            clock=lambda: self.now,
        )
        self._core = self.coordinator._core
        opened(self._core, 0, 256)
        self._core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
        self._core.tiers[0].members[0].send_credits = len(keys)
        monkeypatch.setattr(self.coordinator.changed, "wait", self._wait)
        monkeypatch.setattr("nixl_tiers.runtime.blocking.time", SimpleNamespace(monotonic=self._monotonic))

    def _monotonic(self) -> float:
        return self.now + self._stopped_s

    def _wait(self, timeout: float) -> bool:
        self.now += timeout
        if self.stop_s:
            self._stopped_s, self.stop_s = self._stopped_s + self.stop_s, 0.0
            return True
        self._jobs += self._core.events.plan(self.now)
        stuck = [job for job in self._jobs if job.moves[0].key in self._stuck]
        self._jobs = deque(job for job in self._jobs if job not in stuck)
        if self._jobs:
            self._core.events.finished(0, self._jobs.popleft().id, [self.outcome], self.now)
        return True


def test_no_key_is_a_miss_while_rows_still_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(60)
    tier = SlowTier(keys, monkeypatch)
    with TieredStore(tier.coordinator) as store:
        assert store.get(keys, np.zeros((60, SIZE), np.uint8)) == [True] * 60
    assert tier.now > 100.0 + 60 / 4 * POLL_S > 100.0 + WAIT_S, "each quarter of the host took longer than that"


def test_no_key_is_a_miss_because_the_machine_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(60)
    tier = SlowTier(keys, monkeypatch)
    tier.stop_s = 60.0
    with TieredStore(tier.coordinator) as store:
        assert store.get(keys, np.zeros((60, SIZE), np.uint8)) == [True] * 60


def test_rows_that_never_come_are_misses_soon_after_the_last_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(60)
    tier = SlowTier(keys, monkeypatch, *keys[::20])
    with TieredStore(tier.coordinator) as store:
        assert store.get(keys, np.zeros((60, SIZE), np.uint8)) == ([False] + [True] * 19) * 3
    assert tier.now <= 100.0 + 60 * POLL_S + WAIT_S
