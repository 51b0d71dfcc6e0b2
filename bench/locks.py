"""How long the core keeps the coordinator's lock, at scale: the longest call of each kind, in ms of thread CPU time.

    python bench/locks.py [REPEATS]

Builds a host tier of 100,000 rows over a file tier and an S3 tier, with 1,000 requests that wait and 10,000 rows under
way, and no movers: the same calls as the coordinator makes, one lock hold each. A kind of work that is done in slices
is repeated until nothing is left, as the supervisor does; the longest slice counts. Prints a table of medians over the
repeats: the longest hold, what Python's garbage collector took of one hold at most, and the median hold. The collector
runs as it does in an engine, over the bench's own objects too, but for what is there at the start.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, NamedTuple

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Eviction, Write
from nixl_tiers.core.key_lookup import Lookup
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.rows import Row
from nixl_tiers.core.types import Job, TierSpec
from nixl_tiers.runtime.blocking import SLICE

ROWS: Final = 100_000
TIER_ROWS: Final = 200_000  # as Python objects; more do not change these figures
SLOTS: Final = 10_000_000
REQUESTS: Final = 1_000
CHAIN: Final = 4_000
ROW_BYTES: Final = 65_536
MOST_TURNS: Final = 20_000


class Hold(NamedTuple):
    """Of the lock: in ms of thread CPU time, and what Python's garbage collector took of it."""

    ms: float
    gc_ms: float


Holds = dict[str, list[Hold]]


class _Collector:
    """What Python's garbage collector has taken since `spent_ms` was last set to 0."""

    def __init__(self) -> None:
        self.spent_ms = 0.0
        self._began_s = 0.0

    def __call__(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._began_s = time.thread_time()
        else:
            self.spent_ms += 1e3 * (time.thread_time() - self._began_s)


_collector: Final = _Collector()


def key_of(number: int) -> Key:
    return b"%036d" % number


class Bench:
    """One core, and the longest call of each kind so far."""

    def __init__(self, write: Write = Write.THROUGH, policy: Eviction = "lru") -> None:
        specs = [
            TierSpec("file", write, physical_slots=True),
            TierSpec("s3", Write.THROUGH, physical_slots=False, asked=True),
        ]
        limits = replace(Limits(), wait_s=60.0)
        self.core = TierManager(ROWS, ROW_BYTES, specs, limits, policy)
        self.holds: dict[str, list[Hold]] = {}
        self.now = 0.0
        for tier in range(len(specs)):
            take_all(self.core.events.opened(tier, SLOTS))
            self.core.events.listed(tier, [], last=True)

    def list_rows(self, tier: int, count: int) -> None:
        entries = [(number, key_of(number), 0) for number in range(count)]
        self.core.events.listed(tier, entries, last=True)

    def timed(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        _collector.spent_ms = 0.0
        began_s = time.thread_time()
        result = call(*arguments)
        took_ms = 1e3 * (time.thread_time() - began_s)
        self.holds.setdefault(what, []).append(Hold(took_ms, _collector.spent_ms))
        return result

    def turn(self, what: str) -> list[Job]:
        """One turn of the supervisor: what it does with the lock held."""
        for tier in self.core.tiers:
            tier.members[0].send_credits = 1 << 20

        def hold() -> list[Job]:
            jobs = self.core.turn(self.now, self.now)
            for tier in self.core.tiers:
                tier.members[0].delete_batches(self.core.limits.deletes_per_batch)
            self.core.health.overdue(self.now)
            return jobs

        return self.timed(what, hold)

    def drain(self, what: str) -> list[Job]:
        """Turns until there is nothing left to do at once."""
        jobs: list[Job] = []
        for _ in range(MOST_TURNS):
            new = self.turn(what)
            jobs += new
            if not (new or self.core.events.unfinished):
                return jobs
        raise RuntimeError(f"{what}: work is left for ever")

    def fill(self, count: int, *, first: int = 1 << 40, name: str = "filler") -> list[Key]:
        """Host rows that are ready."""
        keys = [key_of(first + number) for number in range(count)]
        for start in range(0, count, 1000):
            part = keys[start : start + 1000]
            self.core.copies.prepare_store(part, f"{name}-{start}")
            self.core.copies.complete_store(self.core.copies.rows_being_filled(part), ())
            self.core.finish_request(f"{name}-{start}")
        return keys

    def written(self, jobs: Sequence[Job], outcome: Outcome = Outcome.OK, what: str = "finished") -> None:
        for job in jobs:
            outcomes = [outcome] * len(job.moves)
            self.timed(what, self.core.events.finished, job.tier, job.id, outcomes, self.now)

    def settle(self) -> None:
        """Write all that is queued."""
        while jobs := self.drain("plan"):
            self.written(jobs)

    def requests_wait(self, keys: Sequence[Key], requests: int = REQUESTS, name: str = "request") -> list[Job]:
        """Requests look up these keys, and wait; returns the jobs that come of it."""
        for number in range(requests):
            for position, key in enumerate(keys):
                self.core.lookup(key, f"{name}-{number}", position, self.now)
        self.core.end_step()
        return self.drain("plan")


def _killed(holds: Holds, *, kill: bool) -> None:
    bench = Bench()
    bench.list_rows(0, TIER_ROWS)
    bench.list_rows(1, TIER_ROWS)
    shared = [key_of(number) for number in range(40)]
    bench.requests_wait(shared)
    for number in range(10):
        keys = [key_of(1000 * (number + 1) + place) for place in range(1000)]
        bench.requests_wait(keys, 1, f"long-{number}")
    under_way = bench.core.tiers[0].rows_loading
    assert under_way > 4_900, under_way
    if kill:
        bench.timed("killed", bench.core.events.killed, 0, bench.now)
        bench.drain("killed")
    bench.timed("lost", bench.core.events.lost, 0, bench.now)
    bench.drain("lost")
    _merge(holds, bench, "killed", "lost", "plan")


def _late(holds: Holds) -> None:
    bench = Bench()
    bench.list_rows(0, TIER_ROWS)
    bench.list_rows(1, TIER_ROWS)
    bench.requests_wait([key_of(number) for number in range(40)])
    bench.requests_wait([key_of(1000 + number) for number in range(CHAIN)], 2, "long")
    bench.now += 61.0
    bench.drain("late jobs")
    _merge(holds, bench, "late jobs")


def _failed(holds: Holds) -> None:
    """A job fails whose rows all requests wait for."""
    bench = Bench()
    bench.list_rows(0, TIER_ROWS)
    bench.list_rows(1, TIER_ROWS)
    jobs = bench.requests_wait([key_of(number) for number in range(64)])
    bench.written(jobs, Outcome.FAILED, "a failed job")
    bench.drain("after a failed job")
    _merge(holds, bench, "a failed job", "after a failed job")


def _pinned(holds: Holds, policy: Eviction) -> None:
    bench = Bench(policy=policy)
    keys = bench.fill(ROWS)
    bench.settle()
    for start in range(0, ROWS // 2, 1000):  # the oldest are in use
        bench.core.copies.prepare_load(_hits(bench, keys[start : start + 1000], f"user-{start}"), f"user-{start}")
    for number in range(20):
        new = [key_of((1 << 41) + 16 * number + place) for place in range(16)]
        bench.timed(f"make_room, pinned ({policy})", bench.core.copies.prepare_store, new, f"new-{number}")
    _merge(holds, bench, f"make_room, pinned ({policy})")


def _pinned_by_waiting(holds: Holds, policy: Eviction) -> None:
    """Requests that wait pin the oldest half of the host."""
    bench = Bench(policy=policy)
    bench.list_rows(0, TIER_ROWS)
    keys = bench.fill(ROWS - 10_000)
    bench.settle()
    for number in range(50):
        chain = [*keys[1000 * number : 1000 * (number + 1)], key_of(number)]
        for position, key in enumerate(chain):
            bench.core.lookup(key, f"waiting-{number}", position, bench.now)
    bench.core.end_step()
    for number in range(700):
        new = [key_of((1 << 41) + 16 * number + place) for place in range(16)]
        bench.timed(f"make_room, waited for ({policy})", bench.core.copies.prepare_store, new, f"new-{number}")
    _merge(holds, bench, f"make_room, waited for ({policy})")


def _evicting(holds: Holds) -> None:
    """The rows that are evicted ahead of need cannot leave: half of them are being written, and all are hits of this
    step."""
    bench = Bench(Write.ON_EVICT)
    bench.fill(ROWS)
    bench.drain("plan")
    evicting = bench.core.host.evicting
    assert bench.core.tiers[0].rows_storing > 2_000, bench.core.tiers[0].rows_storing
    _hits(bench, list(evicting), "reader")
    for number in range(20):
        new = [key_of((1 << 41) + 16 * number + place) for place in range(16)]
        bench.timed("make_room, evicting", bench.core.copies.prepare_store, new, f"new-{number}")
    _merge(holds, bench, "make_room, evicting")


def _hits(bench: Bench, keys: Sequence[Key], name: str) -> list[Key]:
    hits = [key for key in keys if bench.core.lookup(key, name, None, bench.now) is Lookup.HIT]
    assert len(hits) == len(keys)
    return hits


def _reset(holds: Holds) -> None:
    bench = Bench()
    bench.list_rows(0, TIER_ROWS)
    bench.list_rows(1, TIER_ROWS)
    keys = bench.fill(ROWS - 20_000)
    bench.settle()
    for start in range(0, 10_000, 1000):
        bench.core.copies.prepare_load(_hits(bench, keys[start : start + 1000], f"user-{start}"), f"user-{start}")
    for number in range(REQUESTS):
        chain = [*keys[20_000 + 40 * number : 20_000 + 40 * (number + 1)], key_of(number)]
        for position, key in enumerate(chain):
            bench.core.lookup(key, f"waiting-{number}", position, bench.now)
    bench.core.end_step()
    bench.drain("plan")
    garbage = bench.timed("reset", bench.core.reset, False)
    bench.drain("after a reset")
    del garbage
    new = [key_of((1 << 41) + place) for place in range(16)]
    bench.timed("prepare_store after a reset", bench.core.copies.prepare_store, new, "new")
    bench.timed("flushed", bench.core.flushed)
    bench.drain("flushed")
    _merge(holds, bench, "reset", "after a reset", "prepare_store after a reset", "flushed")


def _down(holds: Holds) -> None:
    bench = Bench(Write.ON_EVICT)
    bench.list_rows(0, TIER_ROWS)
    bench.fill(ROWS)
    for number in range(100):
        for position in range(CHAIN):
            bench.core.lookup(key_of(position), f"request-{number}", position, bench.now)
    bench.timed("down", bench.core.events.down, 0, bench.now)
    bench.drain("down")
    _merge(holds, bench, "down")


def _demote_all(holds: Holds) -> None:
    bench = Bench(Write.ON_EVICT)
    bench.fill(ROWS)
    bench.settle()
    rows: list[Row] = []
    slices = bench.core.host.in_slices(SLICE)
    while part := bench.timed("demote_all", next, slices, []):
        rows += part
    assert len(rows) > 0.9 * ROWS, len(rows)
    for start in range(0, len(rows), SLICE):
        bench.timed("demote_all", bench.core.demote, rows[start : start + SLICE])
    _merge(holds, bench, "demote_all")


def _request_ends(holds: Holds) -> None:
    """A request with 10,000 rows that it has pinned is finished."""
    bench = Bench()
    bench.list_rows(0, TIER_ROWS)
    chain = [*bench.fill(10_000), key_of(0)]
    bench.settle()
    for position, key in enumerate(chain):
        bench.core.lookup(key, "request", position, bench.now)
    bench.core.end_step()
    bench.timed("finish of a request, 10,000 rows", bench.core.finish_request, "request")
    _merge(holds, bench, "finish of a request, 10,000 rows")


def _scan(holds: Holds) -> None:
    """A request waits for the last of 4,000 chunks."""
    bench = Bench()
    bench.list_rows(0, TIER_ROWS)
    chain = [*bench.fill(CHAIN), key_of(0)]
    bench.settle()

    def scan(stop: bool) -> None:
        for position, key in enumerate(chain):
            answer = bench.core.lookup(key, "request", position, bench.now)
            if stop and answer is Lookup.MISS:
                break

    scan(stop=False)
    for _ in range(10):
        bench.core.end_step()
        bench.drain("plan")
        bench.timed("a waiting request's scan", scan, True)
    _merge(holds, bench, "a waiting request's scan")


def _ends(holds: Holds) -> None:
    """Many requests that wait pass their deadlines in one turn."""
    bench = Bench()
    bench.list_rows(0, TIER_ROWS)
    keys = bench.fill(40_000)
    bench.settle()
    for number in range(REQUESTS):
        for position, key in enumerate([*keys[40 * number : 40 * number + 40], key_of(number)]):
            bench.core.lookup(key, f"request-{number}", position, bench.now)
    bench.core.end_step()
    bench.drain("plan")
    bench.now += 1000.0
    bench.core.tiers[0].jobs.clear()
    bench.drain("expire")
    _merge(holds, bench, "expire")


def _merge(holds: Holds, bench: Bench, *what: str) -> None:
    for name in what:
        holds.setdefault(name, []).extend(bench.holds.get(name, ()))


def all_holds() -> Holds:
    """By kind of call: its lock holds."""
    holds: Holds = {}
    gc.collect()
    gc.freeze()  # modules, as vLLM does after its start
    gc.callbacks.append(_collector)
    try:
        _killed(holds, kill=True)
        _killed(holds, kill=False)
        _late(holds)
        _failed(holds)
        for policy in ("lru", "s3fifo", "arc"):
            _pinned(holds, policy)  # type: ignore[arg-type]
            _pinned_by_waiting(holds, policy)  # type: ignore[arg-type]
        _evicting(holds)
        _reset(holds)
        _down(holds)
        _demote_all(holds)
        _request_ends(holds)
        _scan(holds)
        _ends(holds)
    finally:
        gc.callbacks.remove(_collector)
    return holds


def longest_holds(repeats: int = 1) -> dict[str, float]:
    """By kind of call: its longest lock hold in ms of thread CPU time, the median over the repeats."""
    runs = [all_holds() for _ in range(repeats)]
    return {name: median(max(hold.ms for hold in run[name]) for run in runs) for name in runs[0]}


def main() -> None:
    runs = [all_holds() for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3)]
    print(f"{'ms':32} {'longest':>8} {'of it gc':>8} {'without gc':>10} {'median':>8} {'holds':>8}")
    for name in runs[0]:
        longest = [max(run[name]) for run in runs]
        without = median(max(hold.ms - hold.gc_ms for hold in run[name]) for run in runs)
        usual = median(hold.ms for run in runs for hold in run[name])
        took, collected = median(hold.ms for hold in longest), median(hold.gc_ms for hold in longest)
        print(f"{name:32} {took:8.2f} {collected:8.2f} {without:10.2f} {usual:8.2f} {len(runs[0][name]):8}")


if __name__ == "__main__":
    main()
