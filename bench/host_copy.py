"""Speed of copies between host blocks and region rows, as a fraction of one libc memmove of as many contiguous bytes.

    python -m bench.host_copy [--pages 512,32768] [--layers 32] [--megabytes 512] [--ids random|sequential]
                              [--rounds 5] [--json FILE]

For every page size the same number of bytes is copied between `layers` tensors of pages (private memory, like vLLM's)
and rows of one block each (a memfd, like the region's). Each round runs every contender once, in random order, right
after a memmove in the same direction; the result is the median of the ratios of the two times, which is robust against
other load on the machine. The bytes that each contender copies are verified first.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.swap import host
from nixl_tiers.swap.host import HostSwap
from nixl_tiers.swap.plan import CopyPlan, Segment, Share

KERNEL_PLAIN = 1  # one memcpy per page


class Buffers:
    """Engine memory and a region of `total_bytes` payload, both touched before anything is timed."""

    def __init__(self, total_bytes: int) -> None:
        # Includes padding and seal of each row: at most two pages per block of at least 16 KiB.
        region_bytes = total_bytes * 3 // 2 + (1 << 20)
        self.fd = os.memfd_create("host_copy")
        os.ftruncate(self.fd, region_bytes)
        self.region = np.frombuffer(mmap.mmap(self.fd, region_bytes), dtype=np.uint8)
        self.engine = np.frombuffer(mmap.mmap(-1, total_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        self.engine[:] = np.random.default_rng(0).integers(0, 256, total_bytes, dtype=np.uint8)
        self.region[:] = 1


def measure(buffers: Buffers, page: int, layers: int, ids: str, rounds: int) -> dict[str, float]:
    """For one page size: the median GB/s of memmove, and the median of each contender as a fraction of it."""
    total = buffers.engine.size
    blocks = total // (layers * page)
    geometry = Geometry(cells=1, cell_payload=layers * page)
    if blocks * geometry.row_bytes > buffers.region.size:
        raise SystemExit(f"{layers} layers of {page} bytes are too small: rows would be mostly padding\n")
    address = buffers.engine.ctypes.data
    segments = [Segment(address + i * blocks * page, page, page, i * page, blocks) for i in range(layers)]
    swap = HostSwap(CopyPlan([segments], geometry, Share(0), buffers.region.ctypes.data, blocks))
    rng = np.random.default_rng(1)
    block_ids = rng.permutation(blocks) if ids == "random" else np.arange(blocks)
    places = np.arange(blocks, dtype=np.uint32)
    moved = blocks * layers * page

    def memmove(to: np.ndarray, source: np.ndarray) -> Callable[[], None]:
        return lambda: ctypes.memmove(to.ctypes.data, source.ctypes.data, moved) and None

    def with_kernel(kernel: int, call: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            host.KERNEL_AUTO = kernel
            call(0, block_ids, places)

        return run

    def without_library(call: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            library, swap._library = swap._library, None
            call(0, block_ids, places)
            swap._library = library

        return run

    contenders: dict[str, Callable[[], None]] = {}
    for name, call in (("store", swap.store), ("load", swap.load)):
        if host.backend() == "c":
            contenders[f"swap {name}"] = with_kernel(0, call)
            contenders[f"memcpy {name}"] = with_kernel(KERNEL_PLAIN, call)
        contenders[f"numpy {name}"] = without_library(call)
    check(buffers, contenders, moved)
    memmoves = {"store": memmove(buffers.region, buffers.engine), "load": memmove(buffers.engine, buffers.region)}
    shares: dict[str, list[float]] = {name: [] for name in contenders}
    speeds: list[float] = []
    order = list(contenders)
    shuffle = random.Random(2).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            reference = seconds(memmoves[name.split()[1]])
            speeds.append(moved / reference / 1e9)
            shares[name].append(reference / seconds(contenders[name]))
    medians = {name: statistics.median(values) for name, values in shares.items()}
    return {"page_bytes": page, "moved_bytes": moved, "memmove_gb_per_s": statistics.median(speeds), **medians}


def seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def check(buffers: Buffers, contenders: dict[str, Callable[[], None]], moved: int) -> None:
    """Each contender's load must restore exactly what its store copied: a wrong copy must not count as a fast one."""
    wanted = buffers.engine[:moved].copy()
    for kind in {name.partition(" ")[0] for name in contenders}:
        buffers.region[:] = 0xEE
        contenders[f"{kind} store"]()
        buffers.engine[:] = 0xEE
        contenders[f"{kind} load"]()
        if not np.array_equal(buffers.engine[:moved], wanted):
            raise SystemExit(f"{kind} moved wrong bytes\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="512,1024,2048,4096,8192,16384,32768,65536", help="bytes, comma-separated")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--ids", choices=["random", "sequential"], default="random")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    buffers = Buffers(arguments.megabytes << 20)
    print(f"{arguments.megabytes} MiB, {arguments.layers} layers, {arguments.ids} blocks, backend {host.backend()}")
    print(f"{'':26}fractions of memmove: swap     memcpy per page     numpy")
    print("page bytes  memmove GB/s     store      load     store      load     store      load")
    results = []
    for page in map(int, arguments.pages.split(",")):
        result = measure(buffers, page, arguments.layers, arguments.ids, arguments.rounds)
        results.append(result)
        columns = ("swap store", "swap load", "memcpy store", "memcpy load", "numpy store", "numpy load")
        cells = [f"{result[name]:9.2f}" if name in result else "        -" for name in columns]
        print(f"{page:10d}  {result['memmove_gb_per_s']:12.1f}", *cells, flush=True)
    if arguments.json:
        facts = {"machine": platform.machine(), "cpus": os.cpu_count(), "arguments": vars(arguments) | {"json": ""}}
        arguments.json.write_text(json.dumps({**facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
