"""Loading and computing in virtual time: a request takes hardly longer than by the better of the two."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.lookup import Scan
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.types import Job, Limits, TierSpec
from tests.support.core import all_good, opened, put

TOKENS = 128
ROW_BYTES = 2_950_000
TOKENS_PER_S = 3000.0
LATENCY_S = 0.006
STEP_S = 0.001
LENGTHS = (3, 11, 27)  # chunks


class Engine:
    """One request at a time, over one tier whose jobs share the medium (as S3's connections do) or have it one after
    the other (as a disk's)."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.bytes_per_s = 20e6
        prefill = PrefillEstimate()
        prefill.limit_step(8192)
        prefill.restore([(tokens, tokens / 2, tokens / TOKENS_PER_S) for tokens in (1, 64, 512, 4096)])
        specs = [TierSpec("s3", Write.THROUGH, physical_slots=False)]
        self.core = TierManager(400, ROW_BYTES, specs, Limits(wait_s=120.0), prefill=prefill)
        self.chains = {length: [b"%d of %d" % (place, length) for place in range(length)] for length in LENGTHS}
        keys = [key for chain in self.chains.values() for key in chain]
        opened(self.core, 0, 1000, [(slot, key, 0) for slot, key in enumerate(keys)])
        self.now = 0.0
        self.asked = 0
        self._running: dict[int, tuple[Job, float, list[float]]] = {}  # when its bytes begin to flow, how many are left

    def better_s(self, length: int, held: int) -> float:
        """By the better of loading all and loading nothing but what the host holds."""
        load_s = LATENCY_S + (length - held) * ROW_BYTES / self.bytes_per_s
        return min(load_s, (length - held) * TOKENS / TOKENS_PER_S)

    def ask(self, length: int, held: int = 0) -> float:
        """Seconds until the chain is loaded or computed, with nothing in the host but its first `held` chunks. The next
        request comes soon after it."""
        self.core.reset(True, self.now)
        self.core.flushed()
        keys = self.chains[length]
        put(self.core, keys[:held])
        self.asked += 1
        name, began_s = f"r{self.asked}", self.now
        self.core.arrive(name)
        self.core.anticipate(name, keys, (0.0,))
        self._advance(self.now)  # the supervisor may be quicker than the scheduler
        while (scan := self._scan(name, keys)).waits:
            self._advance(self.now + STEP_S)
        loaded = scan.end // TOKENS
        self._advance(self.now + (length - loaded) * TOKENS / TOKENS_PER_S)
        took_s = self.now - began_s
        self.core.complete_load(name, 0.0)
        self.core.complete_store(keys, all_good)
        self.core.finish(name)
        self._advance(self.now + 1.5)
        return took_s

    def _scan(self, name: str, keys: Sequence[Key]) -> Scan:
        """A step. What it computes is stored: it gets its host rows before the supervisor's next turn."""
        scan = self.core.look_up(name, Chain((Group(keys, TOKENS),)), 0, self.now)
        if not scan.waits:
            loaded = scan.end // TOKENS
            self.core.prepare_load(name, keys[:loaded], 0.0)
            self.core.prepare_store(name, keys[loaded:])
        self.core.end_step([] if scan.waits else [name])
        return scan

    def _advance(self, until_s: float) -> None:
        self._plan()
        while self.now < until_s:
            flowing = [each for each in self._running.values() if each[1] <= self.now]
            flowing = flowing if self.shared else flowing[:1]
            steps = [until_s - self.now, *(each[1] - self.now for each in self._running.values() if each[1] > self.now)]
            steps += [each[2][0] * len(flowing) / self.bytes_per_s for each in flowing]
            step_s = min(steps)
            self.now = until_s if step_s == steps[0] else self.now + step_s
            for job, _, left in flowing:
                left[0] -= step_s * self.bytes_per_s / len(flowing)
                if left[0] < 1.0:
                    del self._running[job.id]
                    self.core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), self.now)
            self._plan()

    def _plan(self) -> None:
        while jobs := self.core.turn(self.now, self.now):
            for job in jobs:
                self._running[job.id] = job, self.now + LATENCY_S, [float(len(job.moves) * ROW_BYTES)]


def worst(engine: Engine) -> float:
    """The largest ratio to the better, after some seconds of requests that ask for the tier's rows."""
    for _ in range(6):
        engine.ask(LENGTHS[0])
    asked = [(length, held) for length in LENGTHS for held in (0, length // 2)] * 3
    return max(engine.ask(length, held) / engine.better_s(length, held) for length, held in asked)


@pytest.mark.parametrize("shared", [True, False])
def test_the_better_way_is_found_again_after_a_change_of_speed(shared: bool) -> None:
    engine = Engine(shared=shared)
    for megabytes_per_s in (20, 100, 1000, 100, 20, 5, 100):
        engine.bytes_per_s = megabytes_per_s * 1e6
        assert worst(engine) <= 1.15, megabytes_per_s
