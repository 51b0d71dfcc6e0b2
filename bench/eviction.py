"""Hit rates of the order of eviction on a trace of real conversations, and the processor time of the core.

    python -m bench.eviction --trace PATH [--shares 1,2,5,10,20] [--profile]

Replays a trace in Mooncake's format (bench/trace.py) through the real core, in virtual time and without I/O, and with a
file tier below. Capacities are shares of the trace's distinct blocks. "Belady" knows the future: the block needed last
is evicted first, and a block that is never needed again is not admitted. The second table has a host tier of 1 % over a
file tier of 10 %, whose movers finish at once. The third has a directory that 1 or 8 engines share and that evicts by
samples (tiers/rowfile/evict.py), each engine with every eighth request.

Exits with 1 if LRU or Belady is further than half a percentage point from the known figures of the Mooncake
conversation trace (checked for that trace only), or a directory has two points less than LRU. Writes all numbers to
bench-out/eviction.json.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import heapq
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import cycle
from pathlib import Path
from random import Random

from bench.trace import Prompt, read
from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.rows import CPU
from nixl_tiers.core.types import TierSpec
from nixl_tiers.tiers.rowfile.budget import Budget, Swept
from nixl_tiers.tiers.rowfile.evict import FANOUTS, Evictor, Row
from tests.support.core import all_good, look_up_key

ROOT = Path(__file__).resolve().parent.parent
ROW_BYTES = 4096  # nothing is moved
OUT = ROOT / "bench-out" / "eviction.json"
HOST_PERCENT, FILE_PERCENT = 1, 10

# Mooncake's conversation trace: distinct blocks, look-ups, and hits in per cent by capacity in per cent.
KNOWN_SIZE = (182_790, 288_500)
KNOWN: dict[str, dict[int, float]] = {
    "lru": {1: 5.3, 2: 7.9, 5: 19.6, 10: 27.9, 20: 34.5},
    "belady": {1: 24.6, 2: 31.4, 5: 36.6, 10: 36.6, 20: 36.6},
}
TOLERANCE = 0.5
ENGINES = (1, 8)  # that share a directory
DIRECTORY_TOLERANCE = 2.0


class Meter:
    """Processor time that the core took, by kind of call, and the blocks that it was spent on."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._blocks: dict[str, int] = {}
        self.slowest_s = 0.0  # of the slowest request, all its calls together

    @contextmanager
    def take(self, kind: str) -> Iterator[None]:
        """Around the calls of this kind; "request": around all of one request."""
        start = time.thread_time()
        yield
        spent_s = time.thread_time() - start
        if kind == "request":
            self.slowest_s = max(self.slowest_s, spent_s)
        else:
            self._seconds[kind] = self._seconds.get(kind, 0.0) + spent_s

    def count(self, kind: str, blocks: int) -> None:
        self._blocks[kind] = self._blocks.get(kind, 0) + blocks

    def us_per_block(self) -> dict[str, float]:
        return {kind: round(1e6 * s / max(1, self._blocks[kind]), 2) for kind, s in self._seconds.items()}


@dataclass(frozen=True)
class Result:
    """`hits`: per cent of all look-ups, by the tier that the bytes came from."""

    hits: dict[str, float]
    us_per_block: dict[str, float]
    slowest_ms: float  # of the slowest request, all its calls together


def timed(prompts: Sequence[Prompt], rows: int, below: int = 0) -> Result:
    """`replay`, with what it costs."""
    meter = Meter()
    gc.collect()
    hits = replay(prompts, rows, below, meter)
    return Result(hits, meter.us_per_block(), 1e3 * meter.slowest_s)


def replay(prompts: Sequence[Prompt], rows: int, below: int, meter: Meter) -> dict[str, float]:
    """All prompts through a host tier of `rows` rows, over a file tier of `below` rows if there are any. Hits in per
    cent of all look-ups, by the tier that the bytes came from."""
    specs = [TierSpec("file", Write.THROUGH, physical_slots=True)] if below else []
    core = TierManager(rows, ROW_BYTES, specs)
    if below:
        take_all(core.events.opened(0, below))
        core.events.listed(0, [], last=True)
    hits: dict[str, int] = dict.fromkeys((CPU, *(spec.name for spec in specs)), 0)
    for prompt in prompts:
        with meter.take("request"):
            found = _look_up(core, prompt, meter)
            for source in core.sources(found):
                hits[source] += 1
            _serve(core, prompt, found, meter)
    blocks = sum(len(prompt.keys) for prompt in prompts)
    return {tier: 100 * count / max(1, blocks) for tier, count in hits.items()}


def _look_up(core: TierManager, prompt: Prompt, meter: Meter) -> list[Key]:
    """Scan the prefix, wait for promotions, scan again, as an engine does until a request may run."""
    while True:
        hits = 0
        answer = Lookup.MISS
        pending = False
        with meter.take("lookup"):
            for end, key in enumerate(prompt.keys):
                answer = look_up_key(core, key, prompt.name, end, prompt.now_s)
                if answer is Lookup.MISS:
                    break
                pending = pending or answer is Lookup.PENDING
                hits += 1
        meter.count("lookup", hits + (answer is Lookup.MISS))
        if not pending:
            return prompt.keys[:hits]
        core.end_step()
        _run_movers(core, prompt.now_s, meter)


def _serve(core: TierManager, prompt: Prompt, found: list[Key], meter: Meter) -> None:
    rest = prompt.keys[len(found) :]
    with meter.take("load"):
        core.prepare_load(prompt.name, found, 0.0)
        core.complete_load(prompt.name, 0.0)
    with meter.take("store"):
        plan = core.prepare_store(prompt.name, rest)
        core.complete_store(plan.keys, all_good)
    with meter.take("end"):
        core.finish(prompt.name)
        core.end_step()
    for kind, keys in (("load", found), ("store", rest), ("end", prompt.keys)):
        meter.count(kind, len(keys))
    if core.tiers:
        _run_movers(core, prompt.now_s, meter)


def _run_movers(core: TierManager, now_s: float, meter: Meter) -> None:
    """Movers that finish all planned jobs at once."""
    while True:
        with meter.take("plan"):
            jobs = core.events.plan(now_s)
        rows = sum(len(job.moves) for job in jobs)
        meter.count("plan", rows)
        with meter.take("finished"):
            for job in jobs:
                core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), now_s)
        meter.count("finished", rows)
        for tier in core.tiers:
            for _ in tier.members[0].delete_batches(256):
                pass
        if not jobs:
            return


def belady(prompts: Sequence[Prompt], rows: int) -> float:
    """Hits in per cent if the next use of each block is known; among equals the deepest block is evicted first."""
    never = len(prompts)
    next_use: list[list[int]] = [[] for _ in prompts]
    upcoming: dict[Key, int] = {}
    for turn in range(len(prompts) - 1, -1, -1):
        keys = prompts[turn].keys
        next_use[turn] = [upcoming.get(key, never) for key in keys]
        upcoming.update(dict.fromkeys(keys, turn))
    due: dict[Key, int] = {}
    latest: list[tuple[int, int, Key]] = []  # a heap with stale entries: those that `due` does not confirm
    hits = 0
    for turn, prompt in enumerate(prompts):
        hits += next((depth for depth, key in enumerate(prompt.keys) if key not in due), len(prompt.keys))
        for depth, (key, use) in enumerate(zip(prompt.keys, next_use[turn], strict=True)):
            due.pop(key, None)
            if use != never:
                due[key] = use
                heapq.heappush(latest, (-use, -depth, key))
        while len(due) > rows:
            use, _, key = heapq.heappop(latest)
            if due.get(key) == -use:
                del due[key]
    return 100 * hits / sum(len(prompt.keys) for prompt in prompts)


def one_tier(prompts: Sequence[Prompt], distinct: int, shares: Sequence[int]) -> dict:
    """Prints and returns the first table."""
    known = KNOWN if (distinct, sum(len(p.keys) for p in prompts)) == KNOWN_SIZE else {}
    columns = ["lru", "belady"]
    print("\nOne tier: hits in per cent of look-ups" + (" (known figures in brackets)" if known else ""))
    print(f"{'capacity':>9}" + "".join(f"{name:>16}" for name in columns))
    table: dict[str, dict[str, object]] = {}
    off: list[str] = []
    for share in shares:
        rows = distinct * share // 100
        line: dict[str, object] = {"rows": rows}
        text = f"{share:>7} %"
        for name in columns:
            if name == "belady":
                rate = belady(prompts, rows)
                line[name] = {"hits": {CPU: rate}}
            else:
                result = timed(prompts, rows)
                rate = result.hits[CPU]
                line[name] = asdict(result)
            expected = known.get(name, {}).get(share)
            text += f"{rate:>9.1f}" + (f" ({expected:4.1f})" if expected is not None else " " * 7)
            if expected is not None and abs(rate - expected) > TOLERANCE:
                off.append(f"{name} at {share} %: {rate:.1f} where {expected} is known")
        table[str(share)] = line
        print(text, flush=True)
    return {"table": table, "off": off, "checked": bool(known)}


def two_tiers(prompts: Sequence[Prompt], distinct: int) -> list[dict[str, object]]:
    """Prints and returns the second table."""
    host, file = distinct * HOST_PERCENT // 100, distinct * FILE_PERCENT // 100
    print(f"\nTwo tiers: host {HOST_PERCENT} % ({host} rows) over file {FILE_PERCENT} % ({file} rows)")
    print(f"{'from host':>12}{'from file':>12}{'together':>12}")
    result = timed(prompts, host, file)
    rates = (result.hits[CPU], result.hits["file"], sum(result.hits.values()))
    print("".join(f"{rate:>12.1f}" for rate in rates), flush=True)
    return [asdict(result)]


class Directory:
    """Rows by fan-out directory: name -> when it was last used."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        keys = {key for prompt in prompts for key in prompt.keys}
        self.places = {key: (FANOUTS[blake2b(key, digest_size=1).digest()[0]], key.hex()) for key in keys}
        self.used: dict[str, dict[str, int]] = {fanout: {} for fanout in FANOUTS}
        self.count = 0

    def has(self, key: Key) -> bool:
        fanout, name = self.places[key]
        return name in self.used[fanout]

    def use(self, key: Key, at_ns: int) -> None:
        fanout, name = self.places[key]
        self.count += name not in self.used[fanout]
        self.used[fanout][name] = at_ns

    def namespaces(self) -> Sequence[str]:
        return ("",)

    def rows(self, namespace: str, fanout: str) -> Sequence[Row]:
        return [Row(namespace, fanout, name, used, ROW_BYTES) for name, used in self.used[fanout].items()]

    def unlink(self, rows: Sequence[Row]) -> Sequence[Row]:
        for row in rows:
            del self.used[row.fanout][row.name]
        self.count -= len(rows)
        return rows


def by_samples(prompts: Sequence[Prompt], rows: int, engines: int) -> tuple[float, float]:
    """Hits in per cent of a directory of `rows` rows, and the most rows that were ever there, in per cent of that."""
    directory, random = Directory(prompts), Random(0)
    budgets = [Budget(rows * ROW_BYTES, ROW_BYTES) for _ in range(engines)]
    evictors = [Evictor(directory, budget, random) for budget in budgets]
    hits = most = 0
    for prompt, budget, evictor in zip(prompts, cycle(budgets), cycle(evictors), strict=False):
        found = next((n for n, key in enumerate(prompt.keys) if not directory.has(key)), len(prompt.keys))
        hits += found
        for depth, key in enumerate(prompt.keys):
            if depth >= found and not directory.has(key) and not _has_room(directory, budget, evictor):
                break
            directory.use(key, int(1e9 * prompt.now_s) + depth)
        most = max(most, directory.count)
    return 100 * hits / sum(len(prompt.keys) for prompt in prompts), 100 * most / rows


def _has_room(directory: Directory, budget: Budget, evictor: Evictor) -> bool:
    """For a row, which is stored at once."""
    while not budget.reserve():
        if budget.sweep_due:
            budget.begin_sweep()
            budget.end_sweep(Swept({"": (directory.count, ROW_BYTES)}))
        elif budget.excess_bytes:
            for _ in evictor.steps():
                pass
        else:
            return False
    budget.ended()
    return True


def shared(prompts: Sequence[Prompt], table: dict[str, dict]) -> list[dict[str, object]]:
    """Prints and returns the third table; `table`: the first one's."""
    print("\nA directory that engines share: hits in per cent of look-ups, and the most that was in it")
    print(f"{'capacity':>9}{'engines':>9}{'hits':>9}{'lru':>9}{'most':>9}")
    lines: list[dict[str, object]] = []
    for share, line in table.items():
        lru = line["lru"]["hits"][CPU]
        for engines in ENGINES:
            hits, most = by_samples(prompts, line["rows"], engines)
            print(f"{share:>7} %{engines:>9}{hits:>9.1f}{lru:>9.1f}{most:>7.1f} %", flush=True)
            lines.append({"share": share, "engines": engines, "hits": hits, "lru": lru, "most": most})
    return lines


def costs(report: dict) -> None:
    """Prints what the core's calls cost in these same runs."""
    kinds = ("lookup", "load", "store", "end", "plan", "finished")
    print("\nCost of the core: us of processor time a block, and the most that one request took, all calls")
    print(f"{'run':>24}" + "".join(f"{kind:>10}" for kind in kinds) + f"{'most ms':>12}")
    runs = [
        (f"{name}, {share} %", run)
        for share, line in report["one_tier"]["table"].items()
        for name, run in line.items()
        if isinstance(run, dict) and "us_per_block" in run
    ]
    runs += [("two tiers", run) for run in report["two_tiers"]]
    for label, run in runs:
        cells = (f"{run['us_per_block'][kind]:10.2f}" if kind in run["us_per_block"] else " " * 10 for kind in kinds)
        print(f"{label:>24}" + "".join(cells) + f"{run['slowest_ms']:12.2f}")


def profiled(work: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    profile.runcall(work)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--shares", default="1,2,5,10,20", help="capacities in per cent of the distinct blocks")
    parser.add_argument("--profile", action="store_true", help="profile the two-tier replay and do nothing else")
    args = parser.parse_args()
    prompts = read(args.trace)
    distinct = len({key for prompt in prompts for key in prompt.keys})
    print(f"{len(prompts)} requests, {sum(len(p.keys) for p in prompts)} look-ups, {distinct} distinct blocks")
    if args.profile:
        sizes = distinct * HOST_PERCENT // 100, distinct * FILE_PERCENT // 100
        profiled(lambda: replay(prompts, sizes[0], sizes[1], Meter()))
        return 0
    report = {
        "trace": args.trace.name,
        "distinct": distinct,
        "one_tier": one_tier(prompts, distinct, [int(share) for share in args.shares.split(",")]),
        "two_tiers": two_tiers(prompts, distinct),
    }
    report["shared"] = shared(prompts, report["one_tier"]["table"])
    costs(report)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(report, indent=1))
    print(f"\nwritten: {OUT.relative_to(ROOT)}")
    off = report["one_tier"]["off"]
    off += [f"{line}" for line in report.get("shared", ()) if line["hits"] < line["lru"] - DIRECTORY_TOLERANCE]
    for line in off:
        print(f"off the known figures: {line}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
