"""Forks a mover for each line that it reads: what to die at, and which rows to load as which keys ("word 3=17 5=18").

It writes the mover's process id, has it begin at the next line, and writes "gone" when it has ended.

A mover fills each row with its key's number, and reports it like any other; a report is a line "ROW". It dies before
the report of its last row, at `bytes` (half of it is written), `word`, `bell` (after the word) or `report`; or `never`.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.row_words import ARRIVED
from nixl_tiers.memory import arrivals
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.jobs import RunningJobs
from nixl_tiers.mover.protocol import Load
from nixl_tiers.tiers.base import FinishedBatch, Move
from tests.mover.stub_tiers import InstantTier, StubConfig


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def move(region: HostRegion, point: str, loads: list[tuple[int, int]]) -> None:
    tier = InstantTier(StubConfig(type="stub", stub="InstantTier"), region.geometry, region)
    arrive = arrivals.arrive
    for number, (row, key) in enumerate(loads, 1):
        last = number == len(loads)
        if last and point == "word":
            arrivals.arrive = lambda *_: die()
        elif last and point == "bell":
            arrivals.arrive = lambda words, rows, _: (words.__setitem__(rows, ARRIVED), die())
        view = region.rows_view[row].view(np.uint64)
        if last and point == "bytes":
            view[: len(view) // 2] = key
            die()
        view[:] = key
        say = (lambda _: die()) if last and point == "report" else (lambda _, row=row: os.write(1, b"%d\n" % row))
        jobs = RunningJobs(tier, region, say)
        jobs.begin(Load(number, [Move(row, row, b"key")]), time.monotonic())
        jobs.report([FinishedBatch(number, [Outcome.OK])], time.monotonic())
    arrivals.arrive = arrive


def main(fd: int) -> None:
    for line in sys.stdin:
        point, *loads = line.split()
        begins, begin = os.pipe()
        mover = os.fork()
        if not mover:
            os.read(begins, 1)
            region = HostRegion.attach(os.dup(fd))
            move(region, point, [(int(row), int(key)) for row, key in (load.split("=") for load in loads)])
            os._exit(0)
        print(mover, flush=True)
        sys.stdin.readline()
        os.write(begin, b".")
        os.close(begin)
        os.close(begins)
        os.waitpid(mover, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
