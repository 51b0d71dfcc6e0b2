"""Time to first token with storage tiers, in virtual time: a queue before one engine, mechanisms on and off.

    python -m bench.queueing --trace PATH [--requests N] [--loads 0.5,0.8,1.1]

Replays a trace in Mooncake's format (bench/trace.py) at several loads through the real TierManager. The
engine computes one prompt at a time, the first in the queue that does not wait for storage; movers work beside that.
Each tier has one mover with a latency and a bandwidth, and does its jobs one after the other. What a prompt costs to
compute is known to the core (a speed and a term for its length), so that nothing here depends on learning it.

Arms: `off`: no tiers; `always`: what is stored is always loaded; `alone`: load or recompute, each request weighed
alone; `queue`: what computing costs those in the queue is counted (with vLLM's own connector); `ours`: that, and
promotion at arrival (the default, with NixlTiersConnector); `through`: that, with `prefer: throughput`. Figures: mean
and 99th percentile of the time to first token, the share of promoted rows that was evicted unused. Needs no vLLM; some
minutes. Writes bench-out/queueing.json.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, quantiles
from typing import Any, Final

from bench.trace import read
from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Prefer, Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.types import Job, Limits, TierSpec
from tests.support.core import all_good

OUT: Final = Path(__file__).resolve().parent.parent / "bench-out" / "queueing.json"
CHUNK_TOKENS: Final = 512  # of the trace's blocks
ROW_BYTES: Final = 64 << 20  # an 8B model's 512 tokens
LOOKED_UP: Final = 32  # requests at most that a step looks up
TICK_S: Final = 0.005  # of the engine's steps while it waits, and of the supervisor


@dataclass(frozen=True)
class Medium:
    name: str
    latency_s: float
    bytes_per_s: float
    slots: int


@dataclass(frozen=True)
class Machine:
    """`rows`: of host memory. `prefill_s`, `context_s`: to compute a token, and more for each token before it."""

    rows: int
    media: tuple[Medium, ...]
    prefill_s: float = 1 / 8000
    context_s: float = 1e-9
    copy_s: float = ROW_BYTES / 20e9  # a row to the engine

    def compute_s(self, start: int, end: int) -> float:
        return (end - start) * self.prefill_s + self.context_s * (end * end - start * start) / 2


@dataclass(frozen=True)
class Arm:
    name: str
    tiers: bool = True
    priced: bool = True
    queue: bool = True
    ahead: bool = True
    prefer: Prefer = "latency"


ARMS: Final = (
    Arm("off", tiers=False),
    Arm("always", priced=False, ahead=False),
    Arm("alone", queue=False, ahead=False),
    Arm("queue", ahead=False),
    Arm("ours"),
    Arm("through", prefer="throughput"),
)


@dataclass
class Request:
    name: str
    arrival_s: float
    keys: list[Key]
    first_s: float = 0.0


@dataclass
class Result:
    first_s: list[float] = field(default_factory=list)
    loaded: int = 0
    promoted: int = 0
    unused: int = 0

    def figures(self) -> dict[str, float]:
        return {
            "mean_s": round(mean(self.first_s), 4),
            "p99_s": round(quantiles(self.first_s, n=100)[98], 4),
            "loaded": self.loaded,
            "promoted": self.promoted,
            "unused_share": round(self.unused / max(1, self.promoted), 4),
        }


class VirtualEngine:
    """One engine over one core. Time goes on by events: arrivals, ends of jobs, ticks while something waits."""

    def __init__(self, machine: Machine, arm: Arm, limits: Limits | None = None) -> None:
        self._machine, self._arm = machine, arm
        media = machine.media if arm.tiers else ()
        specs = [TierSpec(medium.name, Write.THROUGH, physical_slots=False) for medium in media]
        prefill = PrefillEstimate(1 / machine.prefill_s if arm.priced else None)
        self.core = TierManager(machine.rows, ROW_BYTES, specs, limits, prefill=prefill, prefer=arm.prefer)
        for number, medium in enumerate(media):
            take_all(self.core.events.opened(number, medium.slots))
            self.core.events.listed(number, [], last=True)
        self.now = 0.0
        self._order = itertools.count()
        self._ends: list[tuple[float, int, Job]] = []
        self._free_s = [0.0] * len(media)
        self.result = Result()
        self._busy = False  # it computes a prompt

    def hold(self, keys: Sequence[Key]) -> None:
        """Each tier holds these keys already."""
        for number, tier in enumerate(self.core.tiers):
            rows = [(slot, key, 0) for slot, key in enumerate(keys[-tier.index.slots.limit :])]
            self.core.events.listed(number, rows, last=True)

    def run(self, requests: Sequence[Request]) -> Result:
        arriving, queue = deque(requests), deque[Request]()
        while arriving or queue:
            if not queue:
                self._go_to(max(self.now, arriving[0].arrival_s))
            self._admit(arriving, queue)
            chosen = self._choose(queue)
            if chosen is None:
                self._pass(TICK_S, arriving, queue)
            else:
                queue.remove(chosen[0])
                self._serve(*chosen, arriving, queue)
        counters = self.core.host.counters
        self.result.promoted, self.result.unused = counters.promoted, counters.unused
        return self.result

    # --- inside ------------------------------------------------------------------------------------------------

    def _admit(self, arriving: deque[Request], queue: deque[Request]) -> None:
        while arriving and arriving[0].arrival_s <= self.now:
            request = arriving.popleft()
            queue.append(request)
            if self._arm.queue:
                self.core.arrive(request.name)
            if self._arm.ahead:
                self.core.anticipate(request.name, request.keys, (0.0,))
            if self._busy:  # the engine's next step, which has no room for it, begins soon: prompts come in chunks
                self.core.end_step()

    def _choose(self, queue: deque[Request]) -> tuple[Request, int] | None:
        """The first in the queue that does not wait for storage, and how many chunks it loads. vLLM looks up one after
        the other until it has one to run."""
        for request in itertools.islice(queue, LOOKED_UP):
            if not (self._arm.tiers and request.keys):
                self.core.end_step([request.name])
                return request, 0
            scan = self.core.look_up(request.name, Chain((Group(request.keys, CHUNK_TOKENS),)), 0, self.now)
            if not scan.waits:
                hits = scan.end // CHUNK_TOKENS
                if hits:
                    self.core.prepare_load(request.name, request.keys[:hits], 0.0)
                self.core.end_step()
                return request, hits
        self.core.end_step()
        return None

    def _serve(self, request: Request, hits: int, arriving: deque[Request], queue: deque[Request]) -> None:
        self._busy = True
        if hits:
            self._pass(hits * self._machine.copy_s, arriving, queue)
            self.core.complete_load(request.name, self.now, hits * self._machine.copy_s)
        tokens = len(request.keys) * CHUNK_TOKENS + 1
        self._pass(self._machine.compute_s(hits * CHUNK_TOKENS, tokens), arriving, queue)
        self._busy = False
        self.result.first_s.append(self.now - request.arrival_s)
        self.result.loaded += hits
        if self._arm.tiers:
            plan = self.core.prepare_store(request.name, request.keys[hits:])
            self.core.complete_store(plan.keys, all_good)
            self.core.finish(request.name)
            self.core.end_step()

    def _pass(self, seconds: float, arriving: deque[Request], queue: deque[Request]) -> None:
        until_s = self.now + seconds
        while self.now < until_s:
            stop_s = until_s if not arriving else min(until_s, max(self.now, arriving[0].arrival_s))
            self._go_to(stop_s)
            self._admit(arriving, queue)

    def _go_to(self, until_s: float) -> None:
        """Movers work until then."""
        self._plan()
        while self._ends and self._ends[0][0] <= until_s:
            self.now, _, job = heapq.heappop(self._ends)
            self.core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), self.now)
            self._plan()
        self.now = max(self.now, until_s)
        self._plan()

    def _plan(self) -> None:
        while True:
            for job in self.core.turn(self.now, self.now):
                medium = self._machine.media[job.tier]
                begin_s = max(self.now, self._free_s[job.tier])
                end_s = begin_s + len(job.moves) * ROW_BYTES / medium.bytes_per_s
                self._free_s[job.tier] = end_s
                heapq.heappush(self._ends, (end_s + medium.latency_s, next(self._order), job))
            for tier in self.core.tiers:
                for _ in tier.members[0].delete_batches(256):
                    pass
            self.core.garbage.drop(1000)
            if not self.core.events.unfinished:
                return


def at_load(requests: Sequence[Request], machine: Machine, load: float) -> list[Request]:
    """The same requests, arriving so fast that computing all of their prompts takes `load` of the time."""
    work_s = sum(machine.compute_s(0, len(each.keys) * CHUNK_TOKENS) for each in requests)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    factor = work_s / load / span_s
    return [replace(each, arrival_s=(each.arrival_s - requests[0].arrival_s) * factor) for each in requests]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--loads", default="0.5,0.8,1.1")
    args = parser.parse_args()
    requests = [Request(each.name, each.now_s, each.keys) for each in read(args.trace)[: args.requests]]
    distinct = len({key for each in requests for key in each.keys})
    media = (Medium("file", 0.001, 2e9, distinct // 5), Medium("s3", 0.03, 5e8, distinct))
    machine = Machine(distinct // 100, media)
    print(f"{len(requests)} requests, {distinct} distinct blocks; host {machine.rows} rows, file {media[0].slots}")
    print(f"{'load':>6} {'arm':>8} {'mean s':>9} {'p99 s':>9} {'loaded':>8} {'promoted':>9} {'unused':>8}")
    report: dict[str, Any] = {"requests": len(requests), "distinct": distinct, "loads": {}}
    for load in map(float, args.loads.split(",")):
        figures = report["loads"][str(load)] = {}
        for arm in ARMS:
            found = VirtualEngine(machine, arm).run(at_load(requests, machine, load)).figures()
            figures[arm.name] = found
            print(
                f"{load:>6} {arm.name:>8} {found['mean_s']:>9.3f} {found['p99_s']:>9.3f} {found['loaded']:>8} "
                f"{found['promoted']:>9} {found['unused_share']:>8.2%}",
                flush=True,
            )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(report, indent=1))
    print(f"\nwritten: {OUT.relative_to(OUT.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
