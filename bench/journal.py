"""Cost of a shard's journal: writing a record for every slot, reading them at open, and listing the rows.

python -m bench.journal [--rows 400000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab.journal import Journal


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") * 4 + bytes(4)  # as long as a block hash with its group


def spent(what: str, work: Callable[[], object]) -> None:
    """Processor time of the whole process."""
    start, begun = time.process_time(), time.perf_counter()
    work()
    used, took = time.process_time() - start, time.perf_counter() - begun
    print(f"| {what} | {used:.2f} s of processor time in {took:.2f} s |")


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of a shard's journal")
    parser.add_argument("--rows", type=int, default=400_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as directory, Folder.base(Path(directory)) as folder:
        journal = Journal(folder, rows)

        def write() -> None:
            for slot in range(rows):
                journal.put(slot, key(slot), slot * 7919 % rows, 1_790_000_000)
            journal.close()

        spent(f"{rows} rows put one by one, and closed", write)
        again = Journal(folder, rows)
        batches = again.list_rows()
        count = 0

        def read() -> None:
            nonlocal count
            while not (batch := next(batches)):
                time.sleep(0.001)
            count += len(batch)

        longest_s = 0.0

        def listing() -> None:
            nonlocal count, longest_s
            start = time.thread_time()
            for batch in batches:
                longest_s = max(longest_s, time.thread_time() - start)
                count += len(batch)
                start = time.thread_time()

        spent("read and checked at open", read)
        spent("listed", listing)
        print(f"| longest step of the listing | {longest_s * 1e3:.2f} ms |")
        assert count == rows
        again.close()


if __name__ == "__main__":
    main()
