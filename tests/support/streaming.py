"""The simulation with streams: loads that are prepared while some of their rows are still to come.

A worker of a stream reads its limit, then the words of its rows, and copies what has arrived below the limit that it
read, which may be an old one by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.row_words import ARRIVED, MAX_STREAMS
from nixl_tiers.core.copies import LoadPlan
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.rows import Row, RowState
from nixl_tiers.core.streams import StreamPlan
from nixl_tiers.core.types import Direction
from tests.support.core import empty_host
from tests.support.simulation import (
    TOKENS,
    Content,
    Prompt,
    Scan,
    SimulatedJob,
    SimulatedMover,
    Simulation,
    require,
)
from tests.support.stream_words import FakeWords


@dataclass
class StreamJob:
    """A load that a worker's thread has been given. `rows`: those that there are, of the first of `keys`; `copied`: the
    places that it has copied; `seen`: the limit that it read last. `stale`: prepared before the last reset."""

    name: str
    prompt: Prompt
    keys: list[Key]
    rows: list[Row]
    numbers: list[int]
    plan: StreamPlan
    epoch: int
    seen: int
    copied: set[int] = field(default_factory=set)
    stale: bool = False
    aborted: bool = False

    @property
    def gap(self) -> int:
        """The first place that was not copied."""
        return next((place for place in range(len(self.keys)) if place not in self.copied), len(self.keys))


class StreamSimulation(Simulation):
    """`has_blocks`: whether the engine prepares the load of a request that it was told early to hit."""

    has_blocks = True
    words: FakeWords

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.streaming: list[StreamJob] = []
        self.told: set[str] = set()  # requests that were told early
        super().__init__(*arguments, **named)

    def _start(self) -> TierManager:
        core = super()._start()
        for tier in range(len(core.tiers)):
            self.slow_down(tier, 0.001)  # it is measured
        return core

    # --- the engine --------------------------------------------------------------------------------------------

    def _more(self) -> dict[str, Any]:
        self.words = FakeWords()
        return {"streams": self.words}

    def _early(self, name: str, prompt: Prompt) -> int:
        return len(prompt.chain) * TOKENS if prompt.scan is Scan.CHAIN else 0

    def _told_early(self, name: str, prompt: Prompt, chunks: int) -> list[Key] | None:
        hits, index = prompt.chain[:chunks], self.core.host.index
        self._check_hits([key for key in hits if key in index and index[key].state is RowState.READY])
        require(name not in self.told, "a request is told early twice")
        self.told.add(name)
        return hits if self.has_blocks else None

    def _copy(self, name: str, prompt: Prompt, hits: list[Key], plan: LoadPlan) -> bool:
        if plan.stream is None:
            return super()._copy(name, prompt, hits, plan)
        rows = self.core.copies._loads[name][-1].rows
        self.streaming.append(
            StreamJob(name, prompt, hits, [*rows], [row.index for row in rows], plan.stream, self.epoch, len(hits))
        )
        for place, row in enumerate(rows):
            if place not in plan.stream.coming:
                self._check_row(row.index, writing=False)
        self.core.end_step()
        self.tick()
        return False

    def abort_stream(self, number: int) -> None:
        job = self.streaming[number]
        if not (job.aborted or job.stale):
            job.aborted = True
            self._finish(job.name)
            require(not self._limit(job), "the stream of a request that was aborted is not cut")
            self.tick()

    def _limit(self, job: StreamJob) -> int:
        return self.words.limit_of(job.plan.slot, job.plan.stream)

    def host_forgets(self) -> None:
        """All host rows that nobody uses are evicted."""
        self.retained.clear()
        empty_host(self.core)
        self.tick()

    # --- workers -----------------------------------------------------------------------------------------------

    def worker_copies(self, number: int, count: int, *, looks: bool = True) -> None:
        """The thread copies some rows; `looks`: after it has read the limit again."""
        job = self.streaming[number]
        if looks:
            job.seen = self._limit(job)
        for place in range(len(job.rows)):
            if not count:
                return
            may = place not in job.plan.coming or (place < job.seen and self.words.words[job.numbers[place]] == ARRIVED)
            if may and place not in job.copied:
                held = self.region[job.numbers[place]]
                require(held == Content(job.keys[place], job.epoch), f"a stream loads {held} as {job.keys[place]!r}")
                job.copied.add(place)
                count -= 1

    def stream_goes_on(self, number: int, good: bool = True) -> None:
        """The thread copies all that it can, and ends the stream if it has to."""
        job = self.streaming[number]
        self.worker_copies(number, len(job.keys))
        over = job.seen <= job.gap or self.now > job.plan.deadline_s
        if over or not good:
            self._end_stream(job, good)

    def worker_finishes(self, number: int, good: bool = True) -> None:
        if not self.workers[number].stale:
            self._cancel()
        super().worker_finishes(number, good)

    def _cancel(self) -> None:
        """The engine ends what was open at a reset ahead of what came after it: that cancels streams."""
        self.streaming = [job for job in self.streaming if not job.stale]

    def _end_stream(self, job: StreamJob, good: bool) -> None:
        if not job.stale:
            self._cancel()
            for old in [other for other in self.workers if other.stale]:
                self._work(old, good=True)
        self.streaming.remove(job)
        if job.stale:
            return
        gap = job.gap
        before = [row.worker_refs for row in job.rows]
        if good:
            self.core.copies.complete_load(job.name, None if gap == len(job.keys) else gap)
        else:
            self._load_failed.add(job.name)
            self.core.copies.fail_load(job.name)
            gap = 0
        released = all(row.worker_refs == refs - 1 for row, refs in zip(job.rows, before, strict=True))
        require(released, "a load does not release each of its rows once")
        if job.aborted:
            self.tick()
        else:
            self.core.end_step()
            self._compute(job.name, job.prompt, job.keys[:gap])

    # --- movers ------------------------------------------------------------------------------------------------

    def _move(self, mover: SimulatedMover, work: SimulatedJob, outcome: Outcome) -> None:
        super()._move(mover, work, outcome)
        place = len(work.done) - 1
        if work.job.direction is Direction.LOAD and work.done[place] is Outcome.OK:
            self.words.arrive(work.rows[place])

    # --- the rest ----------------------------------------------------------------------------------------------

    def reset(self, *, keep: bool = False) -> None:
        ended = [job.name for job in self.streaming if not (job.stale or job.aborted)]
        for job in self.streaming:
            job.stale = True
        super().reset(keep=keep)
        require(not any(map(self._limit, self.streaming)), "a stream of before a reset is not cut")
        for name in ended:
            self._finish(name)

    def crash(self) -> None:
        self.streaming.clear()
        super().crash()

    def abort_all(self) -> None:
        for number in range(len(self.streaming)):
            self.abort_stream(number)
        super().abort_all()

    def _check_row(
        self, number: int, writing: bool, beside: tuple[int, int] | None = None, row: Row | None = None
    ) -> None:
        """Nothing writes to a row that a stream may read, but the mover that loads it."""
        for job in self.streaming:
            if number in job.numbers and writing:
                place = job.numbers.index(number)
                its = row is not None and row is job.rows[place] and place in job.plan.coming
                require(its and place not in job.copied, "a row is allocated while a stream's worker may read it")
        super()._check_row(number, writing, beside, row)

    def check(self) -> None:
        super().check()
        streams = self.core.streams
        live = {job.name: job for job in self.streaming if not job.stale}
        opened = {stream.request: stream for stream in streams._open.values()}
        require(opened.keys() == live.keys(), "a stream is not known, or known for ever")
        require(len(streams._slots) + len(live) == MAX_STREAMS, "a slot is lost, or given twice")
        for name, job in live.items():
            stream = opened[name]
            limit = self._limit(job)
            require(limit == stream.limit, "workers read another limit than the core has set")
            require(
                [row.index for row in job.rows] == job.numbers, "a row is freed while a stream's worker may read it"
            )
            for place in job.plan.coming:
                if place >= limit:
                    continue
                row = job.rows[place]
                known = (
                    row.state is RowState.READY
                    or row.mover_refs > 0
                    or any(row in t.to_stream for t in self.core.tiers)
                )
                require(known, "a row below the limit is loaded by nobody")
                require(not row.invalidated, "a row below the limit was given up")
            late = self._told_s > stream.deadline_s and stream.first_to_come is not None
            require(not late or self.core.events.unfinished, "a stream waits beyond the longest wait")

    def quiesce(self) -> None:
        self.has_blocks = True
        super().quiesce()
        require(not self.streaming, "a stream never ends")
        require(not self.core.streams._of_row, "a row is to come for ever")
        require(not any(tier.to_stream for tier in self.core.tiers), "a row is queued for ever")

    def _run_out(self) -> None:
        for _ in range(3):
            for number in reversed(range(len(self.streaming))):
                if number < len(self.streaming):
                    self.stream_goes_on(number)
            super()._run_out()
        while self.streaming:
            self.advance(0.5)
            for number in reversed(range(len(self.streaming))):
                if number < len(self.streaming):
                    self.stream_goes_on(number)
            super()._run_out()
        super()._run_out()
