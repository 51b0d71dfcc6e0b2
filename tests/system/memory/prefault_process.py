"""One rank that allocates the rows' memory: `prefault_process.py FD RANK`, in pieces of two rows of 2 MiB."""

from __future__ import annotations

import sys

from nixl_tiers.memory import backing
from nixl_tiers.memory.region import HostRegion


def main() -> None:
    backing.PIECE_BYTES = 4 << 20
    region = HostRegion.attach(int(sys.argv[1]))
    rank = backing.Backing(region, int(sys.argv[2]), threads=1)
    rank.go_on()
    assert rank.wait()
    region.close()


main()
