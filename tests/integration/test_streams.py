"""Streams from end to end, but for vLLM: the core tells early, movers of a file tier load, a worker's thread copies
what arrives. What counts as copied is always the keys' bytes, every load ends, and nothing is left pinned."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.swap.host import HostSwap
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from nixl_tiers.swap.step import Pairs
from nixl_tiers.swap.streams import Stream, Streams
from tests.support.checked_rows import SIZE, content, hits, put
from tests.support.file_tier import file_tier
from tests.support.waiting import until, until_up

pytestmark = pytest.mark.timeout(600)

TOKENS = 16
KEYS = [b"key-%04d" % number for number in range(512)]
HOST_ROWS = 256
MOST = 16  # chunks of a request


class Node:
    """A store, and a worker with MOST blocks."""

    def __init__(self, store: nixl_tiers.TieredStore) -> None:
        self.store = store
        region = store.coordinator.region
        self.blocks = np.zeros((MOST, region.geometry.cell_payload), np.uint8)
        nbytes = self.blocks.shape[1]
        segment = Segment(self.blocks.ctypes.data, nbytes, nbytes, 0, MOST)
        self.plan = CopyPlan([[segment]], region.geometry, Share(0), region.address, region.rows)
        self.swap = HostSwap(self.plan)
        self.streams = Streams(self.plan, region.words, region.limits, region.bell)
        region.at_close(self.streams.close)
        self.requests = self.told = self.gaps = 0

    def begin(self, keys: Sequence[bytes]) -> tuple[str, Stream] | None:
        """A request for these keys is told early, and its load begins; None if it is not."""
        self.requests += 1
        name, coordinator = f"r{self.requests}", self.store.coordinator
        with coordinator.core() as core:
            scan = core.scan(name, Chain((Group(list(keys), TOKENS),)), 0, coordinator.now(), early=MOST)
            if not scan.coming:
                core.finish_request(name)
                core.end_step()
                return None
        assert scan.end == TOKENS * len(keys)
        plan = coordinator.plan_load(keys, name, tokens=[TOKENS] * len(keys), end=scan.end)
        with coordinator.core() as core:
            core.end_step()
        self.blocks[:] = 0
        pairs = Pairs.of(self.plan.pairs(0, np.arange(len(keys)), np.array(plan.rows)))
        packed, stream = np.array(plan.rows, "<u4").tobytes(), plan.stream
        if stream is None:  # all of it has come meanwhile
            coordinator.complete_load(keys, name)
            self.finish(name)
            return None
        self.told += 1
        return name, self.streams.begin(
            self.swap.load_call(0), pairs, packed,
            skipped=0, coming=stream.coming, limit=(stream.slot, stream.stream), deadline_s=stream.deadline_s,
        )  # fmt: skip

    def end(self, name: str, stream: Stream, keys: Sequence[bytes], *, is_reset: bool = False) -> int:
        """Wait for the end of a load, and check what it copied: how many chunks."""
        until(lambda: self.streams.ended(stream), "the stream ends", timeout_s=30.0)
        ended = self.streams.ended(stream)
        assert ended is not None
        assert not ended.failed
        for place in range(ended.gap):
            assert self.blocks[place].tobytes() == content(keys[place]).tobytes(), f"{ended}: {keys[place]!r}"
        if not is_reset:
            self.store.coordinator.complete_load(keys, name, loaded=ended.gap if ended.gap < len(keys) else None)
        self.gaps += ended.gap < len(keys)
        self.finish(name)
        return ended.gap

    def finish(self, name: str) -> None:
        with self.store.coordinator.core() as core:
            core.finish_request(name)
            core.end_step()

    def is_idle(self) -> bool:
        with self.store.coordinator.core() as core:
            rows = list(core.host.index.values())
            return core.host.used == len(rows) and not any(row.referenced for row in rows)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    tiers = [{"type": "cpu", "capacity": HOST_ROWS * SIZE}, file_tier(tmp_path, 64 << 20)]
    config = {"tiers": tiers, "wait_s": 5.0, "prefill_tokens_per_s": 50}
    with nixl_tiers.open(config, SIZE, "streams") as store:
        until_up(store)
        put(store, KEYS)
        assert store.flush(60.0)
        for _ in range(3):
            hits(store, KEYS)  # to learn what a load takes
        yield Node(store)


def drawn(draw: random.Random) -> list[bytes]:
    first, count = draw.randrange(len(KEYS) - MOST), draw.randint(4, MOST)
    return KEYS[first : first + count]


def test_what_is_told_early_comes(node: Node) -> None:
    draw = random.Random(1)
    for _ in range(60):
        keys = drawn(draw)
        if (begun := node.begin(keys)) is not None:
            assert node.end(*begun, keys) == len(keys)
    assert node.told > 20
    assert node.store.stats()["file"]["streams"] == node.told
    until(node.is_idle, "nothing is pinned")
