"""Words that movers, in processes of their own, write and a worker's streams read; movers are killed at each step.

The test is the core: it gives row numbers to keys, lowers limits, and gives a number away only once its mover has
reported the row or is gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.row_words import WAITING
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.host import HostSwap
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from nixl_tiers.swap.step import Pairs
from nixl_tiers.swap.streams import Ended, Stream, Streams
from tests.support.waiting import until

ROWS = 16
PLACES = 8
CELL_BYTES = 1 << 20  # a run of rows is copied long enough for a limit to fall in between


class Node:
    """The core, a worker with PLACES blocks, and what forks movers."""

    def __init__(self, region: HostRegion, forks: subprocess.Popen[str]) -> None:
        self.region = region
        self.forks = forks
        self.blocks = np.zeros((PLACES, CELL_BYTES // 8), np.uint64)
        segment = Segment(self.blocks.ctypes.data, CELL_BYTES, CELL_BYTES, 0, PLACES)
        self.plan = CopyPlan([[segment]], region.geometry, Share(0), region.address, region.rows)
        self.swap = HostSwap(self.plan)
        self.streams = Streams(self.plan, region.words, region.limits, region.bell)
        region.at_close(self.streams.close)
        self.number = 0

    def insert(self, row: int) -> None:
        """Of a key, before any mover knows of it."""
        self.region.words[row] = WAITING

    def begin(self, rows: Sequence[int], coming: Sequence[int]) -> Stream:
        self.number += 1
        self.blocks[:] = 0
        self.cut(PLACES)
        call = self.swap.load_call(0)
        pairs = Pairs.of(self.plan.pairs(0, np.arange(len(rows)), np.array(rows)))
        packed = np.array(rows, "<u4").tobytes()
        limit = self.number % 64, self.number
        return self.streams.begin(call, pairs, packed, skipped=0, coming=coming, limit=limit, deadline_s=math.inf)

    def cut(self, place: int) -> None:
        self.region.limits[self.number % 64] = self.number << 32 | place

    def mover(self, point: str, loads: Sequence[tuple[int, int]], killed_after_s: float | None = None) -> None:
        """Start a mover that loads these (row, key), and dies at `point`, or is killed."""
        self.say(f"{point} {' '.join(f'{row}={key}' for row, key in loads)}")
        mover = os.pidfd_open(int(self.said()))
        self.say("")
        if killed_after_s is not None:
            time.sleep(killed_after_s)
            with contextlib.suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(mover, signal.SIGKILL)
        os.close(mover)

    def say(self, line: str) -> None:
        assert self.forks.stdin is not None
        self.forks.stdin.write(line + "\n")
        self.forks.stdin.flush()

    def said(self) -> str:
        assert self.forks.stdout is not None
        return self.forks.stdout.readline().strip()

    def reports(self) -> list[int]:
        """The rows that the mover has reported, once it is gone."""
        return [int(row) for row in iter(self.said, "gone")]

    def end(self, stream: Stream) -> Ended:
        until(lambda: self.streams.ended(stream), "the stream ends")
        ended = self.streams.ended(stream)
        assert ended is not None
        return ended

    def check(self, ended: Ended, keys: Sequence[int]) -> None:
        """What counts as copied is the keys' bytes."""
        for place in range(ended.gap):
            assert (self.blocks[place] == keys[place]).all(), f"place {place} of {ended}"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with HostRegion.create(Geometry(1, CELL_BYTES), ROWS) as region:
        command = [sys.executable, "-m", "tests.system.mover.row_movers", str(region.fd)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, pass_fds=[region.fd], stdin=pipe, stdout=pipe, text=True) as forks:
            yield Node(region, forks)
            forks.kill()


@pytest.mark.parametrize("point", ["bytes", "word", "bell", "report", "never"])
def test_a_mover_that_dies_leaves_whole_rows_or_a_gap(node: Node, point: str) -> None:
    """It loads two rows and dies at the second one. Whoever has the number next, his bytes are never taken for it."""
    rows, keys = [3, 5, 7, 9], [103, 105, 107, 109]
    for row in (5, 7):
        node.insert(row)
    for place in (0, 3):
        node.region.rows_view[rows[place]].view(np.uint64)[:] = keys[place]
    stream = node.begin(rows, coming=[1, 2])
    node.mover(point, [(5, 105), (7, 107)])
    reported = node.reports()
    assert reported == ([5, 7] if point == "never" else [5])
    arrived = point in {"bell", "report", "never"}
    if arrived:  # though the core may not know
        assert node.end(stream).gap == PLACES // 2
    node.cut(2)
    node.insert(7)
    node.mover("never", [(7, 207)])
    assert node.reports() == [7]
    ended = node.end(stream)
    assert ended.gap == (4 if arrived else 2)
    node.check(ended, keys)


def test_a_word_of_the_last_key_is_no_arrival(node: Node) -> None:
    node.insert(3)
    node.mover("never", [(3, 33)])
    assert node.reports() == [3]
    node.insert(3)
    stream = node.begin([3, 3], coming=[0, 1])
    node.cut(0)
    assert node.end(stream).gap == 0


@pytest.mark.parametrize("seed", range(3))
def test_no_bytes_of_another_key_count_whatever_is_killed_and_when(node: Node, seed: int) -> None:
    """Limits fall, movers are killed, and numbers go to other keys, while rows are copied."""
    draw = random.Random(seed)
    copied = cut = 0
    for turn in range(40):
        rows = draw.sample(range(ROWS), PLACES)
        keys = [1000 * turn + 2 * place + 1 for place in range(PLACES)]
        for row in rows:
            node.insert(row)
        stream = node.begin(rows, coming=range(PLACES))
        loads = list(zip(rows, keys, strict=True))
        if draw.random() < 0.5:
            draw.shuffle(loads)
        point, killed = draw.choice(("bytes", "word", "bell", "report", "never")), draw.random() < 0.5
        node.mover(point, loads, draw.random() * 0.004 if killed else None)
        place = draw.randrange(PLACES + 1)
        if draw.random() < 0.5:
            node.cut(place)
        reported = node.reports()
        node.cut(place)
        others = [(row, 7) for row in rows[place:]]
        for row, other in others:
            node.insert(row)
            node.region.rows_view[row].view(np.uint64)[:] = other
            node.region.arrive([row])
        if not set(rows[:place]) <= set(reported):  # of those that the dead mover has not reported nothing is known
            node.cut(min(rows.index(row) for row in rows if row not in reported))
        ended = node.end(stream)
        node.check(ended, keys)
        copied += ended.gap
        cut += ended.gap < PLACES
    assert copied
    assert cut


def test_numbers_go_to_other_keys_while_their_rows_are_copied(node: Node) -> None:
    """They had been reported, so that nobody waits for anybody."""
    draw = random.Random(7)
    cut = 0
    for turn in range(100):
        rows = draw.sample(range(ROWS), PLACES)
        keys = [1000 * turn + 2 * place + 1 for place in range(PLACES)]
        for row, key in zip(rows, keys, strict=True):
            node.region.rows_view[row].view(np.uint64)[:] = key
        node.region.arrive(rows)
        stream = node.begin(rows, coming=range(PLACES))
        time.sleep(draw.random() * 0.001)
        place = draw.randrange(PLACES)
        node.cut(place)
        for row in rows[place:]:
            node.insert(row)
            node.region.rows_view[row].view(np.uint64)[:] = 7
        ended = node.end(stream)
        node.check(ended, keys)
        cut += ended.gap < PLACES
    assert cut
