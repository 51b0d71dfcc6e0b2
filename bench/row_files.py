"""A directory of row files at rest: what its mover costs while nothing is stored and no other engine writes.

    python -m bench.row_files [--rows 1000000] [--path DIR] [--seconds 60]

Makes empty row files of one page, lists them, and goes on listing as a mover does. CPU time of the whole process, and
its private memory; files that lie in `--path` take inodes, but no space.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.mover_memory import keys, private_bytes
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.quota import FANOUT
from nixl_tiers.tiers.rowfile.tier import RowFileTier

GEOMETRY = Geometry(1, 1000)
NAMESPACE = bytes(16)
POLL_S = 0.05


@dataclass(frozen=True)
class AtRest:
    rows: int
    first_listing_s: float
    cpu_share: float  # of a core, at rest
    listings: int
    longest_step_s: float  # of the mover's loop in a listing, in thread CPU time
    bytes_a_row: float


def make_rows(path: Path, rows: int) -> None:
    home = path / NAMESPACE.hex()
    for number in range(FANOUT):
        (home / f"{number:02x}").mkdir(0o700, parents=True)
    home.chmod(0o700)
    for key in keys(rows):
        row = path.joinpath(*RowPath.of(NAMESPACE.hex(), key)[:2], f"{key.hex()}.row")
        descriptor = os.open(row, os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(descriptor, GEOMETRY.row_bytes)
        os.close(descriptor)


def measure(path: Path, seconds: float) -> AtRest:
    """`path` holds what `make_rows` made."""
    config = FileConfig(type="file", layout="files", path=path, capacity=1 << 50)
    with HostRegion.create(GEOMETRY, 16) as region:
        tier = RowFileTier(config, GEOMETRY, region)
        before_bytes, began_s, rows, longest_s = private_bytes(), time.monotonic(), 0, 0.0
        tier.open(NAMESPACE, 0)

        def list_once() -> int:
            nonlocal longest_s
            listing, found = tier.list_rows(), 0
            while True:
                step_s = time.thread_time()
                batch = next(listing, None)
                longest_s = max(longest_s, time.thread_time() - step_s)
                if batch is None:
                    return found
                found += len(batch)
                if not batch:
                    time.sleep(POLL_S)

        rows = list_once()
        first_s = time.monotonic() - began_s
        began_s, cpu_s, listings = time.monotonic(), time.process_time(), 0
        while time.monotonic() - began_s < seconds:
            time.sleep(tier.relist_s or 0.0)
            list_once()
            listings += 1
        share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
        bytes_a_row = (private_bytes() - before_bytes) / max(1, rows)
        tier.close()
    return AtRest(rows, first_s, share, listings, longest_s, bytes_a_row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--path", type=Path, help="where to make the directory, which is deleted at the end")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.path) as place:
        make_rows(Path(place), arguments.rows)
        print(measure(Path(place), arguments.seconds))


if __name__ == "__main__":
    main()
