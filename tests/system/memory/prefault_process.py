"""One rank that prefaults: `prefault_process.py FD CELL`, with chunks of 1 MiB and one thread.

Prints `share` when it has done its own share, waits for a line on standard input, and prints `done` at the end.
"""

from __future__ import annotations

import sys

from nixl_tiers.memory import pages
from nixl_tiers.memory.region import HostRegion

populate = pages.Prefault._populate_part


def main() -> None:
    pages._CHUNK_BYTES = 1 << 20
    region = HostRegion.attach(int(sys.argv[1]))
    share = region.nbytes // region.geometry.cells

    def stopping(self: pages.Prefault, address: int, size: int) -> int:
        if self.populated_bytes == share:
            print("share", flush=True)
            sys.stdin.readline()
        return populate(self, address, size)

    pages.Prefault._populate_part = stopping  # type: ignore[method-assign]
    running = region.prefault(1, rank=int(sys.argv[2]))
    running.wait()
    assert running.populated_bytes == region.nbytes
    print("done", flush=True)
    region.close()


main()
