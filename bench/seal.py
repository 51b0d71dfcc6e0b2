"""Hashing speed of rows by hash function and piece size, and the cost of the whole seal: docs/reference/formats.md.

    python bench/seal.py [--row-bytes 3145728] [--seconds 0.25] [--rounds 5]

Prints a table in GB/s (10^9 bytes). "cold": rows are read from a region larger than the last-level cache, as after
O_DIRECT; "hot": the same row repeatedly, as after a copy; "busy": cold, while another thread of the process runs Python
and contends for the GIL. Candidates alternate, so that other load on the machine affects all alike; values are medians
of the rounds. CRC-32C is included if the package crc32c is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.seal import Sealer

KiB = 1 << 10
PIECES = (4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, 1024 * KiB)
COLD_BYTES = 768 << 20

Digest = Callable[[memoryview], bytes]


def hashes() -> dict[str, Digest]:
    found: dict[str, Digest] = {
        "XXH3-64": xxhash.xxh3_64_digest,
        "XXH3-128": xxhash.xxh3_128_digest,
        "CRC-32 (zlib)": lambda data: zlib.crc32(data).to_bytes(4, "big"),
        "BLAKE2b": lambda data: hashlib.blake2b(data, digest_size=16).digest(),
        "SHA-256": lambda data: hashlib.sha256(data).digest(),
    }
    with contextlib.suppress(ImportError):
        crc32c = importlib.import_module("crc32c").crc32c
        found["CRC-32C"] = lambda data: crc32c(data).to_bytes(4, "big")
    return found


def tree(digest: Digest, piece_bytes: int) -> Callable[[memoryview], bytes]:
    def run(row: memoryview) -> bytes:
        pieces = [digest(row[at : at + piece_bytes]) for at in range(0, len(row), piece_bytes)]
        return xxhash.xxh3_128_digest(b"".join(pieces))

    return run


@contextlib.contextmanager
def busy_thread(enabled: bool) -> Iterator[None]:
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            pass

    thread = threading.Thread(target=spin)
    if enabled:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if enabled:
            thread.join()


def rate(run: Callable[[int], object], row_bytes: int, rows: int, seconds: float) -> float:
    """GB/s of calling run(0), run(1), ..., run(rows - 1), run(0), ... for `seconds`."""
    done, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        run(done % rows)
        done += 1
    return done * row_bytes / spent / 1e9


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    widest = next(
        (isa for isa in ("avx512f", "avx2", "sse2") if isa in facts.get("flags", "").split()), "no SIMD known"
    )
    model = f"{facts.get('model name', 'unknown processor')}, model {facts.get('model', '?')}"
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {widest}; xxhash {xxhash.VERSION} ({xxhash.XXHASH_VERSION})"


def main() -> None:
    parser = argparse.ArgumentParser(description="hash and piece sizes of the seal")
    parser.add_argument("--row-bytes", type=int, default=3 << 20, help="payload of a row (default 3 MiB)")
    parser.add_argument("--seconds", type=float, default=0.25, help="per value and round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    geometry = Geometry(1, options.row_bytes)
    rows = max(2, COLD_BYTES // geometry.row_bytes)
    region = np.random.default_rng(1).integers(0, 256, (rows, geometry.row_bytes), dtype=np.uint8)
    payloads = [memoryview(row)[: options.row_bytes] for row in region]
    sealer = Sealer(geometry, bytes(16), 0)

    candidates: dict[tuple[str, str], Callable[[int], object]] = {}
    for name, digest in hashes().items():
        slow = name in {"BLAKE2b", "SHA-256", "CRC-32 (zlib)"}
        for piece_bytes in (64 * KiB,) if slow else PIECES:
            run = tree(digest, piece_bytes)
            candidates[name, f"{piece_bytes // KiB} KiB"] = lambda n, run=run: run(payloads[n])
        if not slow:
            candidates[name, "whole row"] = lambda n, digest=digest: digest(payloads[n])
    candidates["Sealer.seal", "64 KiB"] = lambda n: sealer.seal(region[n], b"row %d" % n)
    candidates["Sealer.verify", "64 KiB"] = lambda n: sealer.verify(region[n], b"row %d" % n)
    for n in range(rows):
        sealer.seal(region[n], b"row %d" % n)

    columns = {"cold": (rows, False), "hot": (1, False), "busy": (rows, True)}
    figures: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(options.rounds):
        for column, (used, busy) in columns.items():
            with busy_thread(busy):
                for (name, piece), run in candidates.items():
                    figure = rate(run, options.row_bytes, used, options.seconds)
                    figures.setdefault((name, piece, column), []).append(figure)

    print(f"{machine()}\nrow of {options.row_bytes} bytes, median of {options.rounds} rounds, GB/s\n")
    print("| hash | pieces | " + " | ".join(columns) + " |\n| --- | --- |" + " --- |" * len(columns))
    for name, piece in candidates:
        cells = (f"{statistics.median(figures[name, piece, column]):.1f}" for column in columns)
        print(f"| {name} | {piece} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
