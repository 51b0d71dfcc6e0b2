"""What the stress test does to a running engine whose loads are streams, and how it sees what became of these.

A fault is drawn for each stream, and comes a moment after that has begun: a mover is killed, or stopped for a while;
bits of stored rows are flipped; and the engine's supervisor hangs beside a stopped mover, so that nobody cuts a stream,
until all that are open have ended by their deadlines or are long past them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nixl_tiers.base.chunk import Outcome
from tests.system.vllm.one_stream import supervisor_of

MOMENT_S = 0.03  # a fault comes so long after a stream has begun, at most
STOPPED_S = 2.0  # a mover, at most
HUNG_S = 5.0  # beyond the deadlines of streams, after which the supervisor goes on though they have not ended
FLIPPED = 8  # of so many rows one


class WatchedStreams:
    """`cuts`: by reason, as the core cut them; what failed by what a mover reported, or `died`. `ended`: how many ended
    at the worker by their deadline. `late_s`: how long after its deadline one was seen open at most: looked at in each
    step, so that a long step counts for nothing."""

    def __init__(self, coordinator: Any, streamed: Any) -> None:
        self._core, self._region, self._streamed = coordinator._core, coordinator.region, streamed
        self.cuts: Counter[str] = Counter()
        self.ended = 0
        self.late_s = float("-inf")
        self.begun = 0
        self._outcome = ""
        streams, jobs = self._core.streams, self._core._promotion_jobs
        self._begin, self._finished = streamed.begin, streamed.finished
        streamed.begin, streamed.finished = self.begin, self.finished
        self._cut, self._load_ended = streams._cut, jobs.load_ended
        streams._cut, jobs.load_ended = self.cut, self.load_ended

    @property
    def open(self) -> int:
        return len(self._streamed.open)

    def requests(self) -> list[str]:
        """Those whose loads are streams, as they are called outside of vLLM."""
        return [stream.request.rpartition("-")[0] for stream in self._core.streams._open.values()]

    def begin(self, *load: Any) -> None:
        self.begun += 1
        self._begin(*load)

    def cut(self, stream: Any, place: int, reason: str) -> None:
        if place < stream.limit:
            self.cuts[self._outcome if reason == "failed" else reason] += 1
        self._cut(stream, place, reason)

    def load_ended(self, tier: Any, move: Any, outcome: Outcome, now: float) -> None:
        died = outcome is Outcome.FAILED and any(member.dead for member in tier.members)
        self._outcome = "died" if died else outcome.name.lower()
        self._load_ended(tier, move, outcome, now)

    def finished(self) -> Any:
        now, open_ = time.monotonic(), [load.stream.raw for load in self._streamed.open.values()]
        results = self._finished()
        still = {id(load.stream.raw) for load in self._streamed.open.values()}
        for raw in open_:
            if id(raw) in still:
                self.late_s = max(self.late_s, now - raw.deadline_s)
            elif raw.deadline_s <= now and not raw.cancelled and raw.gap < self._limit(raw):
                self.ended += 1
        return results

    def _limit(self, raw: Any) -> int:
        word = int(self._region.limits[raw.slot])
        return min(word & 0xFFFFFFFF, raw.n_places) if word >> 32 == raw.number else 0

    def left(self, scheduler: Any, patience_s: float = 30.0) -> dict[str, int]:
        """What is still held once all requests have ended, and movers have had time to end what they do."""
        pool, manager = scheduler.kv_cache_manager.block_pool, scheduler.connector.connector_scheduler.manager
        end_s = time.monotonic() + patience_s
        while True:
            held = {
                "rows": sum(row.referenced for row in self._core.host.index.values()),
                "streams": len(self._core.streams._open) + self.open + len(manager.streams._open),
                "slots": len(self._region.limits) - len(self._core.streams._slots),
                "loads": len(manager._loads) + len(manager.streams.gaps),
                "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            }
            if not any(held.values()) or time.monotonic() > end_s:
                return held
            time.sleep(0.05)


class Faults:
    """`kinds`: how likely each is for a stream. `folder`: of the tier."""

    def __init__(
        self, coordinator: Any, watched: WatchedStreams, rng: random.Random, kinds: Mapping[str, float], folder: Path
    ) -> None:
        self._coordinator, self._watched, self._rng, self._kinds = coordinator, watched, rng, kinds
        self._folder = folder
        self._stopped: int | None = None  # the mover
        self._until_s = 0.0  # if nothing hangs
        self._goes_on = supervisor_of(coordinator)
        for backoff in coordinator._link.supervisor._backoff:
            backoff._backoff_s = (0.05,)  # or there is no mover for most of the time
        self._drawn = 0
        self._next: tuple[float, str] | None = None
        self.counts: Counter[str] = Counter()

    @property
    def lasts(self) -> bool:
        """Whether a mover is stopped, and the supervisor may hang."""
        return self._stopped is not None

    def before_step(self) -> None:
        now = time.monotonic()
        if self._stopped is not None:
            if self._is_over(now):
                self.end()
            return
        if self._watched.begun > self._drawn:
            self._drawn = self._watched.begun
            none = max(0.0, 1.0 - sum(self._kinds.values()))
            (kind,) = self._rng.choices(["", *self._kinds], [none, *self._kinds.values()])
            if kind:
                self._next = now + self._rng.uniform(0, MOMENT_S), kind
        mover = self._coordinator.mover_pids[0]
        if self._next is not None and now >= self._next[0] and mover is not None:
            kind = self._next[1]
            self._next = None
            self.counts[kind] += 1
            self._strike(kind, mover, now)

    def _strike(self, kind: str, mover: int, now: float) -> None:
        if kind == "kill":
            os.kill(mover, signal.SIGKILL)
        elif kind == "flip":
            self._flip()
        else:
            os.kill(mover, signal.SIGSTOP)
            self._stopped, self._until_s = mover, now + self._rng.uniform(0, STOPPED_S)
            if kind == "hang":
                self._goes_on.clear()

    def _is_over(self, now: float) -> bool:
        if self._goes_on.is_set():
            return now >= self._until_s
        return not self._watched.open or self._watched.late_s >= HUNG_S

    def end(self) -> None:
        """At once: a load of an aborted request may be open still, and no step looks at it."""
        if self._stopped is not None:
            with contextlib.suppress(ProcessLookupError):  # the supervisor has killed it
                os.kill(self._stopped, signal.SIGCONT)
        self._goes_on.set()
        self._stopped = None

    def _flip(self) -> None:
        """A bit in one of FLIPPED rows, or in what has room for one."""
        row_bytes = self._coordinator.region.geometry.row_bytes
        for file in self._folder.rglob("slab-*.kv"):
            with file.open("r+b") as rows:
                for row in range(self._rng.randrange(FLIPPED), file.stat().st_size // row_bytes, FLIPPED):
                    at = row * row_bytes + self._rng.randrange(row_bytes)
                    (byte,) = os.pread(rows.fileno(), 1, at)
                    os.pwrite(rows.fileno(), bytes([byte ^ 1]), at)
