"""Rows are copied as they arrive. Words and limits are written here as the core and movers write them."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Collection, Iterator

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.row_words import ARRIVED, MAX_STREAMS, WAITING
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap import streams as module
from nixl_tiers.swap.host import HostSwap
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from nixl_tiers.swap.step import Pairs
from nixl_tiers.swap.streams import Ended, LoadCall, Stream, Streams
from tests.support.places import places_of
from tests.support.waiting import until

BLOCK_BYTES = 4096
SUB_BLOCKS = 2
ROWS = 12
BLOCKS = 2 * ROWS
NEVER = math.inf
COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Rig:
    """A rank with one group, its rows full of a byte each, its blocks empty."""

    def __init__(self, region: HostRegion) -> None:
        self.region = region
        self.engine = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        segment = Segment(self.engine.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, 0, BLOCKS)
        self.plan = CopyPlan([[segment]], region.geometry, Share(1), region.address, region.rows)
        self.swap = HostSwap(self.plan)
        self.streams = Streams(self.plan, region.words, region.limits, region.bell)
        region.at_close(self.streams.close)
        for row in range(ROWS):
            region.rows_view[row] = row + 1
        self.began = 0
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], int | None] = lambda: None

    def begin(
        self, rows: list[int], coming: Collection[int], *, skipped: int = 0, deadline_s: float = NEVER,
        limit: int | None = None, watched: bool = False,
    ) -> Stream:  # fmt: skip
        """The load of these rows to blocks 0 and following, as stream 1, 2, and so on, each in a slot of that number.
        `watched`: `before` and `after` are called around each copy."""
        self.began += 1
        self.region.words[[rows[place] for place in coming]] = WAITING
        self.limit(self.began, len(rows) if limit is None else limit)
        count = len(rows) * SUB_BLOCKS - skipped
        places = places_of(self.plan, rows, skipped, count)
        pairs = Pairs.of(self.plan.pairs(0, np.arange(skipped, skipped + count), places))
        call = self.swap.load_call(0)
        return self.streams.begin(
            self.watched(call) if watched else call, pairs, np.array(rows, "<u4").tobytes(),
            skipped=skipped, coming=coming, limit=(self.began, self.began), deadline_s=deadline_s,
        )  # fmt: skip

    def watched(self, call: LoadCall) -> LoadCall:
        inner = COPY(call.function)

        def copy(_: object, pairs: int, n: int) -> int:
            self.before()
            failed: int = inner(call.context, pairs, n)
            return self.after() or failed

        outer = COPY(copy)
        return LoadCall(ctypes.cast(outer, ctypes.c_void_p).value or 0, 0, (call, outer))

    def limit(self, stream: int, place: int) -> None:
        self.region.limits[stream] = stream << 32 | place

    def end(self, stream: Stream) -> Ended:
        until(lambda: self.streams.ended(stream), "the stream ends")
        ended = self.streams.ended(stream)
        assert ended is not None
        return ended

    def blocks(self) -> list[int]:
        """What each row's blocks hold: its byte, 0 for nothing."""
        assert (self.engine == self.engine[:, :1]).all()
        return self.engine[:, 0].tolist()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with HostRegion.create(Geometry(2, SUB_BLOCKS * BLOCK_BYTES, SUB_BLOCKS), ROWS) as region:
        yield Rig(region)


def test_rows_that_are_there_are_copied_at_once_and_others_when_they_arrive(rig: Rig) -> None:
    stream = rig.begin([7, 2, 9, 4], coming=[1, 3])
    until(lambda: rig.blocks()[:8] == [8, 8, 0, 0, 10, 10, 0, 0], "what is there was copied")
    rig.region.arrive([4])
    until(lambda: rig.blocks()[:8] == [8, 8, 0, 0, 10, 10, 5, 5], "what came was copied")
    assert rig.streams.ended(stream) is None
    rig.region.arrive([2])
    ended = rig.end(stream)
    assert (ended.gap, ended.pairs, ended.failed) == (4, 8, False)
    assert ended.copy_s > 0
    assert rig.blocks()[:9] == [8, 8, 3, 3, 10, 10, 5, 5, 0]
    assert not rig.engine[8:].any()


def test_a_load_may_begin_and_end_inside_a_row(rig: Rig) -> None:
    stream = rig.begin([7, 2], coming=[0, 1], skipped=1)
    rig.region.arrive([2])
    until(lambda: rig.blocks()[:4] == [0, 0, 3, 3], "the second row was copied")
    rig.region.arrive([7])
    assert rig.end(stream)[:2] == (2, 3)
    assert rig.blocks()[:5] == [0, 8, 3, 3, 0]


def test_a_row_that_arrives_without_the_bell_is_seen(rig: Rig) -> None:
    """Its mover died in between."""
    stream = rig.begin([7, 2], coming=[0, 1])
    rig.region.words[[2, 7]] = ARRIVED
    assert rig.end(stream).gap == 2


def test_other_words_are_no_arrival(rig: Rig) -> None:
    stream = rig.begin([7, 2, 9], coming=[0, 1, 2])
    rig.region.words[7], rig.region.words[2] = 0, 3
    rig.region.arrive([9])
    until(lambda: rig.blocks()[4] == 10, "what came was copied")
    rig.limit(1, 0)
    assert rig.end(stream)[:2] == (0, 2)


def test_a_cut_ends_it_with_what_is_before_and_says_where_the_gap_is(rig: Rig) -> None:
    stream = rig.begin([7, 2, 9, 4], coming=[0, 1, 2, 3])
    rig.region.arrive([7])
    until(lambda: rig.blocks()[0] == 8, "what came was copied")
    rig.limit(1, 2)  # which rings no bell
    rig.region.words[[9, 4]] = ARRIVED
    rig.region.arrive([2])
    assert rig.end(stream)[:2] == (2, 4)
    assert rig.blocks()[:6] == [8, 8, 3, 3, 0, 0]


def test_a_cut_before_what_was_copied_takes_nothing_back(rig: Rig) -> None:
    """It was verified, and copied while it was below the limit."""
    stream = rig.begin([7, 2, 9, 4], coming=[2])
    until(lambda: rig.blocks()[6] == 5, "what is there was copied")
    rig.limit(1, 1)
    assert rig.end(stream)[:2] == (2, 6)


def test_a_row_that_fell_behind_the_limit_while_it_was_copied_does_not_count(rig: Rig) -> None:
    """Its bytes may have been another key's by then."""
    rig.after = lambda: rig.limit(1, 1)
    stream = rig.begin([7, 2, 9], coming=[], watched=True)
    assert rig.end(stream)[:2] == (1, 2)


def test_a_slot_that_is_another_streams_is_a_limit_of_nothing(rig: Rig) -> None:
    rig.after = lambda: rig.region.limits.__setitem__(1, 99 << 32 | 3)
    stream = rig.begin([7, 2, 9], coming=[], watched=True)
    assert rig.end(stream)[:2] == (0, 0)
    later = rig.begin([7], coming=[0])
    rig.region.limits[2] = 99 << 32 | 1
    rig.region.arrive([7])
    assert rig.end(later).gap == 0


def test_a_limit_beyond_the_end_is_the_end(rig: Rig) -> None:
    assert rig.end(rig.begin([7, 2], coming=[], limit=0xFFFFFFFF))[:2] == (2, 4)


def test_nothing_begins_after_the_deadline(rig: Rig) -> None:
    stream = rig.begin([7, 2], coming=[], deadline_s=time.monotonic())
    assert rig.end(stream)[:2] == (0, 0)
    assert not rig.engine.any()
    hung = rig.begin([7, 2], coming=[1], deadline_s=time.monotonic() + 0.05)
    ended = rig.end(hung)  # though nobody says anything
    assert ended.gap <= 1


def test_a_cancelled_stream_ends_without_what_is_to_come(rig: Rig) -> None:
    streams = [rig.begin([row], coming=[0]) for row in (7, 2)]
    rig.streams.cancel(streams[:1])
    cancelled = rig.streams.ended(streams[0])
    assert cancelled is not None
    assert cancelled.gap == 0
    rig.region.arrive([7, 2])
    assert rig.end(streams[1]).gap == 1
    assert not (rig.engine == 8).any()


def test_to_cancel_waits_for_the_copy_that_began(rig: Rig) -> None:
    began: list[bool] = []
    ended: list[bool] = []

    def before() -> None:
        began.append(True)
        time.sleep(0.05)

    rig.before, rig.after = before, lambda: ended.append(True)
    stream = rig.begin([7, 2], coming=[1], watched=True)
    until(lambda: began, "a copy began")
    rig.streams.cancel([stream])
    assert ended
    assert rig.streams.ended(stream) is not None


def test_after_its_end_nothing_is_copied(rig: Rig) -> None:
    stream = rig.begin([7, 2], coming=[0, 1])
    rig.limit(1, 0)
    rig.end(stream)
    rig.limit(1, 2)
    rig.region.arrive([7, 2])
    assert rig.end(rig.begin([9], coming=[]))[:2] == (1, 2)  # the thread has been round
    assert not np.isin(rig.engine, (8, 3)).any()


def test_a_copy_that_fails_ends_it(rig: Rig) -> None:
    rig.after = lambda: 1
    ended = rig.end(rig.begin([7, 2], coming=[1], watched=True))
    assert (ended.gap, ended.pairs, ended.failed) == (0, 0, True)


def test_streams_take_turns_and_none_waits_for_another(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUN_BYTES", 1)  # row by row
    order: list[int] = []
    waiting = rig.begin([11], coming=[0])
    rig.before = lambda: order.append(1)
    stalls = rig.begin([10, 9, 8], coming=[0], watched=True)
    assert rig.end(rig.begin([1, 2, 3], coming=[]))[:2] == (3, 6)
    assert rig.streams.ended(waiting) is rig.streams.ended(stalls) is None
    until(lambda: len(order) == 2, "each row was a copy of its own")


def test_close_ends_what_is_open(rig: Rig) -> None:
    stream = rig.begin([7, 2], coming=[1])
    rig.region.close()
    ended = rig.streams.ended(stream)
    assert ended is not None
    assert ended.gap <= 1
    with pytest.raises(OSError, match="no thread"):
        rig.begin([7], coming=[])


@pytest.mark.parametrize(("coming", "slot"), [([2], 1), ([-1], 1), ([0], MAX_STREAMS), ([0], -1)])
def test_places_and_slots_that_do_not_exist_are_refused(rig: Rig, coming: list[int], slot: int) -> None:
    call = rig.swap.load_call(0)
    pairs = Pairs.of(rig.plan.pairs(0, [0], [0]))
    with pytest.raises(ValueError, match="a stream of 2 rows in slot"):
        rig.streams.begin(call, pairs, bytes(8), skipped=0, coming=coming, limit=(slot, 1), deadline_s=NEVER)


def test_without_the_library_there_are_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_library", lambda: None)
    with pytest.raises(RuntimeError, match="without its native library"):
        Streams(rig.plan, rig.region.words, rig.region.limits, rig.region.bell)
