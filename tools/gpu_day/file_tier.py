"""Does a file tier pay? 7000 tokens of 128 KiB from a tmpfs to blocks on the GPU, by some threads, as a mover does it:
a row is read, verified and copied to page-locked memory in one pass, and loaded from there."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from nixl_tiers.memory.seal import Sealer, Verdict
from tools.gpu_day.here import SUB_BLOCKS, Here

COMPUTED_S = 0.18  # the same tokens computed by a model of 8 billion parameters: docs/guide/sizing.md
THREADS = (1, 2, 4, 8)
KEY = b"gpu-day"


def run(here: Here) -> None:
    blocks = here.blocks((438, 64 << 10, 32), (20, 512, 2))
    swap = blocks.swap("staged")
    here.tell("page_locked", swap.pinned)
    here.tell("bytes", blocks.round_trip(swap))
    here.left_out("times: sizes are tiny, and GPU memory is the CPU's")
    sealer = Sealer(blocks.geometry, bytes(16), 1)
    row_bytes = blocks.geometry.row_bytes
    file = os.memfd_create("gpu-day")  # a tmpfs whose size nothing limits but memory
    for number, row in enumerate(blocks.rows):
        sealer.seal(row, KEY)
        os.pwrite(file, row.data, number * row_bytes)
    here.tell("megabytes", blocks.nbytes // 10**6)
    here.tell("computed_s", COMPUTED_S)

    stagings = [np.ones(row_bytes, np.uint8) for _ in range(max(THREADS))]

    def load(first: int, threads: int, verified: bool) -> list[object]:
        """Every `threads`-th row from `first` on."""
        transfers: list[object] = []
        staging = stagings[first]
        for number in range(first, blocks.n_rows, threads):
            row = blocks.rows[number]
            os.preadv(file, [(staging if verified else row).data], number * row_bytes)
            if verified and sealer.verify(staging, KEY, row) is not Verdict.OK:
                raise RuntimeError(f"row {number} is not what was written")
            places = np.arange(number * SUB_BLOCKS, min(blocks.count, (number + 1) * SUB_BLOCKS))
            transfers.append(swap.load(0, blocks.ids[places], places))
        return transfers

    for verified in (True, False):
        for threads in THREADS:
            times = []
            for _ in range(here.size(3, 1)):
                blocks.poison()
                blocks.rows[:] = 0
                with ThreadPoolExecutor(threads) as pool:
                    begin_s = time.perf_counter()
                    parts = list(pool.map(load, range(threads), [threads] * threads, [verified] * threads))
                    for transfer in (one for part in parts for one in part):
                        transfer.wait()  # type: ignore[attr-defined]
                    times.append(time.perf_counter() - begin_s)
            name = f"{'verified' if verified else 'unverified'}_by_{threads}"
            here.tell(name, {"s": round(min(times), 4), "bytes": "right" if blocks.right() else "WRONG"})
    begin_s = time.perf_counter()
    swap.load(0, blocks.ids, np.arange(blocks.count)).wait()
    here.tell("from_rows_s", time.perf_counter() - begin_s)
