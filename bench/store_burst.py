"""What a burst of stores costs the supervisor's thread, in us of processor time a row.

    python -m bench.store_burst [--rows 400] [--row-kib 2048] [--tiers 1] [--s3] [--rounds 5] [--profile]
                                [--part 64] [--every-ms 0]

The engine's step needs the interpreter's lock for as long as the supervisor has it. A real store over file tiers (the
second one written through too), or over an S3 tier whose server keeps objects in memory, with real movers. Rows
complete `--part` at a time, `--every-ms` after the last (a steady trickle), and a step ends every 10 ms until all are
written, as in an engine that decodes meanwhile. Prints a line for each round: us a row, turns of the supervisor, us a
turn, and how often the thread gave up the processor (each time it may have to wait for the interpreter's lock again).
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import hashlib
import os
import pstats
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np

import nixl_tiers
from bench.memory_s3 import memory_server
from nixl_tiers.mover.supervisor import Supervisor
from tests.support.core import end_step

STEP_S: Final = 0.01
FLUSH_S: Final = 300.0


class Watched:
    """The supervisor's thread: its processor time and how often it waited; with `profile`, also where the time goes."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        run = Supervisor._run
        self._clock = self._native = 0

        def watched(supervisor: Supervisor) -> None:
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._native = threading.get_native_id()
            if profile is None:
                run(supervisor)
            else:
                profile.runcall(run, supervisor)

        Supervisor._run = watched  # type: ignore[method-assign]

    def figures(self) -> tuple[float, int]:
        status = Path(f"/proc/self/task/{self._native}/status").read_text()
        waits = next(line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
        return time.clock_gettime(self._clock), int(waits.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--row-kib", type=int, default=2048)
    parser.add_argument("--host-rows", type=int, help="4 times --rows by default")
    parser.add_argument("--tiers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--s3", action="store_true", help="instead of file tiers")
    parser.add_argument("--part", type=int, default=64)
    parser.add_argument("--every-ms", type=float, default=0.0)
    parser.add_argument("--path", help="where the file tiers are; a temporary directory by default")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    profile = cProfile.Profile(time.thread_time) if args.profile else None
    watched = Watched(profile)
    nbytes = args.row_kib << 10
    host_rows = args.host_rows or 4 * args.rows
    capacity = 2 * host_rows * (nbytes + 4096)
    tiers: list[dict[str, object]] = [{"type": "cpu", "capacity": capacity // 2}]
    with contextlib.ExitStack() as stack:
        if args.s3:
            server = stack.enter_context(memory_server())
            os.environ.update(server.env)
            tiers.append({"type": "s3", "bucket": "burst", "endpoint": server.endpoint, "capacity": capacity})
        else:
            path = stack.enter_context(tempfile.TemporaryDirectory(dir=args.path))
            tiers += (
                {"type": "file", "path": f"{path}/{number}", "capacity": capacity, "min_free": 0}
                for number in range(args.tiers)
            )
        store = stack.enter_context(nixl_tiers.open({"tiers": tiers}, nbytes, "burst"))
        store.wait_ready(60)
        for round_ in range(args.rounds):
            _round(store, watched, args, round_)
    if profile is not None:
        pstats.Stats(profile).sort_stats("cumtime").print_stats(45)


def _round(store: nixl_tiers.TieredStore, watched: Watched, args: argparse.Namespace, round_: int) -> None:
    coordinator = store.coordinator
    data = np.full(store.chunk_bytes, round_, np.uint8)
    supervisor = coordinator._link.supervisor
    (cpu_s, waits), turns, began_s = watched.figures(), supervisor.turns, time.perf_counter()
    stop = threading.Event()

    def steps() -> None:
        while not stop.wait(STEP_S):
            end_step(coordinator)

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    keys = [hashlib.sha256(b"%d/%d" % (round_, number)).digest() for number in range(args.rows)]
    for start in range(0, args.rows, args.part):
        part = keys[start : start + args.part]
        store.put(part, [data] * len(part))
        time.sleep(args.every_ms / 1e3)
    store.flush(FLUSH_S)
    stop.set()
    thread.join()
    (cpu_end_s, waits_end), turns = watched.figures(), supervisor.turns - turns
    us = 1e6 * (cpu_end_s - cpu_s)
    print(
        f"{us / args.rows:7.1f} us a row, {turns:4} turns, {us / max(1, turns):6.0f} us a turn, "
        f"{waits_end - waits:5} waits, {time.perf_counter() - began_s:6.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
