"""Memory of a mover per row of its tier: the private memory of a process that holds only its index.

    python -m bench.mover_memory [--rows 1000000]

Keys of 36 bytes, as vLLM's; each index in a process of its own. Slabs keep their journal on the disk and share the
rest with the engine: docs/internals/tier-index.md.
"""

from __future__ import annotations

import argparse
import gc
import platform
import tempfile
from array import array
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from nixl_tiers.base.chunk import Key
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.quota import DirQuota
from nixl_tiers.tiers.s3.listing import Run
from nixl_tiers.tiers.s3.names import KeySet, RowNames
from nixl_tiers.tiers.s3.quota import Group, PrefixQuota

ROW_BYTES, CAPACITY, NAMESPACE = 2 << 20, 1 << 60, "0" * 32


def keys(rows: int) -> Iterator[Key]:
    random = np.random.default_rng(0)
    for start in range(0, rows, 4096):
        raw = random.bytes(36 * min(4096, rows - start))
        yield from (raw[at : at + 36] for at in range(0, len(raw), 36))


def held_objects(rows: int) -> object:
    names = RowNames("kv")
    quota = PrefixQuota(names, ROW_BYTES, CAPACITY)
    quota.serve(NAMESPACE, 0.0)
    for key in keys(rows):
        quota.reserve(key)
    return quota


def listed_objects(rows: int) -> object:
    """A full listing at its end, when its rows are in the order of their age, and none is handed over yet."""
    names = RowNames("kv")
    quota = PrefixQuota(names, ROW_BYTES, CAPACITY)
    quota.serve(NAMESPACE, 0.0)
    run, modified_s = Run(), array("d")
    for number, key in enumerate(keys(rows)):
        run.add(b"\0" + key, float(number))  # not in order, which takes the same memory
        modified_s.append(float(number))
    run.end()
    quota.adopt({(NAMESPACE, ROW_BYTES): Group(KeySet(run.leaves), 0.0)})
    return quota, modified_s, np.argsort(np.frombuffer(modified_s))


def row_files(rows: int) -> object:
    """The quota, as a tier fills it while it stores; it also says which rows the core knows."""
    quota = DirQuota(CAPACITY, ROW_BYTES)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(ROW_BYTES)
        status = Path(file.name).stat()
    for number, key in enumerate(keys(rows)):
        quota.record(RowPath.of("0" * 32, key), status, 1_700_000_000 + number // 100, stored=True)
    return quota


INDEXES: dict[str, Callable[[int], object]] = {
    "objects, held": held_objects,
    "objects, at the end of a first listing": listed_objects,
    "row files": row_files,
}


def private_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) << 10


def measure(name: str, rows: int) -> float:
    before = private_bytes()
    index = INDEXES[name](rows)
    used = private_bytes() - before
    del index
    return used / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    print(f"{rows} rows, Python {platform.python_version()}")
    print(f"{'index':40} {'bytes per row':>13} {'MB':>8}")
    for name in INDEXES:
        with get_context("spawn").Pool(1) as process:
            each = process.apply(measure, (name, rows))
        print(f"{name:40} {each:13.0f} {each * rows / 1e6:8.0f}")


if __name__ == "__main__":
    main()
