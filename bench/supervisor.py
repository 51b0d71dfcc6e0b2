"""What a row that is stored or loaded costs the engine's process beside its step, in us of processor time.

    python -m bench.supervisor [--rows 65536 2097152 8388608] [--megabytes 512] [--rounds 5] [--tiers 1]
        [--s3] [--path DIR] [--part 64] [--every-ms 0] [--pieces] [--json FILE]

Counted is the processor time of the supervisor's thread, by its own clock, and nothing else: what it receives, decodes
and applies, its turns, what it plans, encodes and sends, its waits. That is all which the engine's process does for a
row between the step that asks for it and the step that finds it; what the step itself does is told by `bench.stores`,
`bench.lookups` and `bench.hit`. The engine's step needs the interpreter's lock for as long as this thread has it.

Real movers over file tiers on a tmpfs (`--path`: elsewhere; `--tiers 2`: the second one written through too), or over
an S3 tier whose server keeps objects in memory (`--s3`). Requests of 64 rows; a step ends every 10 ms, as in an engine
that decodes meanwhile. Stores: rows complete `--part` at a time, `--every-ms` after the last (a steady trickle), until
all are written. Loads: of rows that host memory has evicted; all requests wait at once and look up each step, until all
have loaded. Host memory and tiers are full, so each row evicts another; windows are those of host memory of 64 GiB,
since with a small one jobs are small.

A line for each size and direction: us a row (median and quartiles of the rounds), rows a job, messages of movers,
turns, and how often the thread gave up the processor (each time it may have to wait for the interpreter's lock again).
`--pieces`: also where the time goes: thread time around what the supervisor calls, which costs a little itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import nixl_tiers
from bench.machine import machine
from bench.memory_s3 import memory_server
from bench.rounds import Spread
from nixl_tiers.base.chunk import Geometry, Key, Namespace
from nixl_tiers.config import schema
from nixl_tiers.core.key_lookup import Lookup
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.manager import TierManager
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.child import Child
from nixl_tiers.mover.supervisor import Supervisor
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.runtime.mover_link import MoverLink
from tests.support.core import end_step

STEP_S: Final = 0.01
FLUSH_S: Final = 300.0
MOST_ROWS: Final = 4096  # of a round
HOST_ROUNDS: Final = 2  # whose rows host memory holds: those of the last loads and stores
TIER_ROUNDS: Final = 5
HOST_BYTES: Final = 64 << 30  # of the host whose windows are used
PROMPT: Final = 64  # rows of a request
PIECES: Final[dict[str, tuple[type, str]]] = {
    "turn": (MoverLink, "on_tick"),
    "of it: plan": (TierManager, "turn"),
    "of it: encode": (MoverLink, "_packet_of"),
    "send": (Child, "flush"),
    "apply": (MoverLink, "on_message"),
    "of it: events": (MoverLink, "_on_rows_ended"),
    "wait": (Supervisor, "_wait"),
}


class Figures(NamedTuple):
    cpu_s: float
    waits: int  # how often the thread gave up the processor
    turns: int
    messages: int
    jobs: int


class Round(NamedTuple):
    took: Figures
    pieces: Counter[str]


class Watched:
    """The supervisor's thread: its processor time and how often it waited. `pieces`: seconds in each of PIECES."""

    def __init__(self, pieces: bool) -> None:
        self.pieces: Counter[str] = Counter()
        self._clock = self._native = self._messages = 0
        self._on_thread(Supervisor, "_run", self._began)
        self._on_thread(MoverLink, "on_message", self._counted)
        for name, (owner, method) in PIECES.items() if pieces else ():
            self._on_thread(owner, method, functools.partial(self._timed, name))

    def _on_thread(self, owner: type, method: str, around: Callable[..., Any]) -> None:
        made = getattr(owner, method)
        setattr(owner, method, lambda *given, **named: around(made, *given, **named))

    def _began(self, run: Callable[..., Any], *given: Any) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._native = threading.get_native_id()
        run(*given)

    def _counted(self, on_message: Callable[..., Any], *given: Any) -> None:
        self._messages += 1
        on_message(*given)

    def _timed(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        began_s = time.thread_time()
        try:
            return call(*given, **named)
        finally:
            self.pieces[name] += time.thread_time() - began_s

    def figures(self, coordinator: Coordinator) -> Figures:
        status = Path(f"/proc/self/task/{self._native}/status").read_text()
        waits = next(line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
        link = coordinator._link
        jobs = coordinator._core._state.last_job_id
        return Figures(
            time.clock_gettime(self._clock), int(waits.split()[1]), link.supervisor.turns, self._messages, jobs
        )


@contextlib.contextmanager
def stepping(coordinator: Coordinator) -> Iterator[None]:
    """A step ends every STEP_S meanwhile."""
    stop = threading.Event()

    def steps() -> None:
        while not stop.wait(STEP_S):
            end_step(coordinator)

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def store_all(store: nixl_tiers.TieredStore, keys: Sequence[Key], part: int, every_s: float) -> None:
    data = np.full(store.chunk_bytes, 7, np.uint8)
    with stepping(store.coordinator):
        for start in range(0, len(keys), part):
            some = keys[start : start + part]
            if store.put(some, [data] * len(some)) < len(some):
                raise SystemExit("a row found no room")
            time.sleep(every_s)
        store.flush(FLUSH_S)


def load_all(store: nixl_tiers.TieredStore, keys: Sequence[Key], name: str) -> None:
    coordinator = store.coordinator
    prompts = {f"{name}/{start}": keys[start : start + PROMPT] for start in range(0, len(keys), PROMPT)}
    while prompts:
        for request, prompt in [*prompts.items()]:
            with coordinator.core() as core:
                now = coordinator.now()
                found = [core.lookup(key, request, place, now) for place, key in enumerate(prompt)]
            if Lookup.PENDING not in found:  # one that waits is told so at its first key, and nothing of the others
                if Lookup.MISS in found:
                    raise SystemExit("a row is a miss")
                coordinator.plan_load(prompt, request)
                coordinator.complete_load(request)
                with coordinator.core() as core:
                    core.finish_request(request)
                del prompts[request]
        end_step(coordinator)
        time.sleep(STEP_S)


def rows_of(options: argparse.Namespace, row_bytes: int) -> int:
    """That are moved in a round."""
    return max(PROMPT, min(MOST_ROWS, (options.megabytes << 20) // row_bytes))


@contextlib.contextmanager
def opened(options: argparse.Namespace, row_bytes: int) -> Iterator[nixl_tiers.TieredStore]:
    geometry, rows = Geometry(1, row_bytes), rows_of(options, row_bytes)
    capacity = TIER_ROUNDS * rows * geometry.row_bytes
    tiers: list[dict[str, object]] = [{"type": "cpu", "capacity": HOST_ROUNDS * rows * geometry.row_bytes}]
    with contextlib.ExitStack() as stack:
        if options.s3:
            server = stack.enter_context(memory_server())
            os.environ.update(server.env)
            tiers.append({"type": "s3", "bucket": "burst", "endpoint": server.endpoint, "capacity": capacity})
        else:
            path = stack.enter_context(tempfile.TemporaryDirectory(dir=options.path))
            file = {"type": "file", "capacity": capacity, "min_free": 0}
            tiers += ({**file, "path": f"{path}/{number}"} for number in range(options.tiers))
        config = schema.load({"wait_s": 60, "prefill_tokens_per_s": 1, "tiers": tiers})
        limits, times = Limits(wait_s=60.0), max(1.0, HOST_BYTES / (HOST_ROUNDS * rows * row_bytes))
        limits = replace(limits, load_share=times * limits.load_share, store_share=times * limits.store_share)
        region = HostRegion.create(geometry, HOST_ROUNDS * rows)
        region.prefault()
        coordinator = Coordinator(config, Namespace.of({"bench": "supervisor"}), region, limits=limits)
        coordinator.start(ready_s=60.0)
        yield stack.enter_context(nixl_tiers.TieredStore(coordinator))


def measure(options: argparse.Namespace, row_bytes: int, watched: Watched) -> dict[str, list[Round]]:
    rows, taken = rows_of(options, row_bytes), dict[str, list[Round]]()
    with opened(options, row_bytes) as store:
        for number in range(TIER_ROUNDS + options.rounds):
            keys, former = (
                [hashlib.sha256(b"%d/%d" % (which, row)).digest() for row in range(rows)]
                for which in (number, number - HOST_ROUNDS)
            )
            # Loads first: what is stored next evicts what was neither stored nor loaded lately.
            for direction in ("load", "store") if number >= HOST_ROUNDS else ("store",):
                before = watched.figures(store.coordinator)
                watched.pieces.clear()
                if direction == "store":
                    store_all(store, keys, options.part, options.every_ms / 1e3)
                else:
                    load_all(store, former, str(number))
                after = watched.figures(store.coordinator)
                if number >= TIER_ROUNDS:  # it is full, and its speed known
                    took = Figures(*(end - start for start, end in zip(before, after, strict=True)))
                    taken.setdefault(direction, []).append(Round(took, Counter(watched.pieces)))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64 << 10, 2 << 20, 8 << 20], help="payload, in bytes")
    parser.add_argument("--megabytes", type=int, default=512, help="that are moved in each round")
    parser.add_argument("--tiers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--s3", action="store_true", help="instead of file tiers")
    parser.add_argument("--part", type=int, default=PROMPT)
    parser.add_argument("--every-ms", type=float, default=0.0)
    parser.add_argument("--path", default="/dev/shm", help="where the file tiers are")
    parser.add_argument("--pieces", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    watched = Watched(options.pieces)
    about, results = machine(), []
    print(*(f"- {name}: {value}" for name, value in about.items()), sep="\n")
    for row_bytes in options.rows:
        rows = rows_of(options, row_bytes)
        for direction, taken in measure(options, row_bytes, watched).items():
            us = Spread.of([1e6 * took.cpu_s / rows for took, _ in taken])
            total = Figures(*(sum(each) / len(taken) for each in zip(*(took for took, _ in taken), strict=True)))
            pieces = {
                name: round(1e6 * sum(seen[name] for _, seen in taken) / len(taken) / rows, 2)
                for name in PIECES
                if options.pieces
            }
            print(
                f"{row_bytes >> 10:5} KiB {direction:5}: {us.median:6.1f} us a row ({us.low:.1f} to {us.high:.1f}),"
                f" {rows / max(1, total.jobs):5.1f} rows a job, {total.messages:5.0f} messages,"
                f" {total.turns:5.0f} turns, {total.waits:5.0f} waits {pieces or ''}",
                flush=True,
            )
            about_rows = {"row_bytes": row_bytes, "rows": rows, "direction": direction}
            results.append({**about_rows, "us_a_row": us, **total._asdict(), **pieces})
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
