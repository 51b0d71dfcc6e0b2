"""Cost of a storage tier's cold index: to build, attach, look up and evict.

    python bench/cold_index.py [--rows 4000000] [--calls 100000] [--used 0.5]

Every slot holds a row. Lookups are calls from Python, the digest of the key included, of keys in random order; "fresh"
are the first ones after attach, whose pages the process has yet to map. `--used`: the share of rows that the core has
moved to its own index before it evicts. Quality: the share of victims that exact LRU would have chosen, in that order.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from nixl_tiers.memory.cold_index import ColdIndexBuilder, SharedColdIndex, key_digests

BATCH = 500


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") * 4 + bytes(4)  # as long as a block hash with its group


def each_us(call: Callable[[bytes], object], keys: Sequence[bytes]) -> float:
    """Median over batches, so that other load on the machine matters little."""
    batches = []
    for at in range(0, len(keys), BATCH):
        batch = keys[at : at + BATCH]
        start = time.perf_counter()
        for one in batch:
            call(one)
        batches.append((time.perf_counter() - start) / len(batch) * 1e6)
    return statistics.median(batches)


def row(name: str, figure: str) -> None:
    print(f"| {name} | {figure} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of a tier's index")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--calls", type=int, default=100_000, help="lookups and evictions per figure")
    parser.add_argument("--used", type=float, default=0.5)
    arguments = parser.parse_args()
    rows, calls = arguments.rows, min(arguments.calls, arguments.rows // 4)
    random = np.random.default_rng(1)

    start = time.process_time()
    digests = key_digests(key(number) for number in range(rows))
    digest_s = time.process_time() - start
    slots = random.permutation(rows).astype(np.uint32)
    ticks = random.integers(0, 1 << 20, rows, dtype=np.uint32)
    start = time.process_time()
    builder = ColdIndexBuilder()
    builder.add_many(digests, slots, ticks)
    fd = builder.build(rows)
    build_s = time.process_time() - start
    memfd_bytes = os.fstat(fd).st_blocks * 512

    start = time.perf_counter()
    index = SharedColdIndex.attach(fd)
    attached = time.perf_counter()
    taken = bytearray(rows)
    index.claim(taken, rows)
    attach_ms, map_ms = (attached - start) * 1e3, (time.perf_counter() - attached) * 1e3

    picked = [key(number) for number in random.choice(rows, 2 * calls, replace=False).tolist()]
    absent = [key(number) for number in range(rows, rows + calls)]
    fresh_us = each_us(index.find, picked[:calls])
    for number in range(0, rows, 64):  # about every page
        index.find(key(number))

    print(f"| {rows} rows, one scheduler process | |\n| --- | --- |")
    row("digests of the keys (mover)", f"{digest_s:.2f} s of processor time")
    row("build (mover)", f"{build_s:.2f} s of processor time")
    row("attach (scheduler)", f"{attach_ms:.2f} ms")
    row("marking the slots (scheduler)", f"{map_ms:.2f} ms")
    row("memory, index and slot map", f"{(memfd_bytes + len(taken)) / rows:.2f} bytes a row")
    row("find, fresh", f"{fresh_us:.2f} us")
    row("find, hit", f"{each_us(index.find, picked[calls:]):.2f} us")
    row("find, miss", f"{each_us(index.find, absent):.2f} us")

    used = random.choice(rows, int(rows * arguments.used), replace=False)
    row("remove", f"{each_us(index.remove, [key(number) for number in used.tolist()]):.2f} us")
    kept = np.ones(rows, bool)
    kept[used] = False
    exact = [number for number in np.argsort(ticks, kind="stable").tolist() if kept[number]][:calls]
    gc.freeze()  # the garbage collector must not scan the millions of keys made here
    victims: list[tuple[bytes, int]] = []
    spent = []
    for _ in range(calls):
        start = time.thread_time()
        victims += index.coldest(1)
        spent.append(time.thread_time() - start)
    mean_us, longest_ms = statistics.mean(spent) * 1e6, max(spent) * 1e3
    row("coldest(1)", f"{mean_us:.2f} us on average, {longest_ms:.2f} ms at most")
    right = [
        victim == (digests[number].tobytes(), slots[number]) for victim, number in zip(victims, exact, strict=True)
    ]
    row("victims as by exact LRU", f"{sum(right) / calls:.1%}")


if __name__ == "__main__":
    main()
