"""Streams from end to end, but for vLLM: the core tells early, movers of a file tier load, a worker's thread copies
what arrives. What counts as copied is always the keys' bytes, every load ends, and nothing is left pinned."""

from __future__ import annotations

import os
import random
import signal
import time
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

    def begin(self, keys: Sequence[bytes]) -> tuple[str, Stream, Sequence[bytes]] | None:
        """A request for these keys is told early, and the load of so many of them begins; None if it is not."""
        self.requests += 1
        name, coordinator = f"r{self.requests}", self.store.coordinator
        with coordinator.core() as core:
            scan = core.scan(name, Chain((Group(list(keys), TOKENS),)), 0, coordinator.now(), early=MOST * TOKENS)
            if not scan.coming:
                core.finish_request(name)
                core.end_step()
                return None
        keys = keys[: scan.end // TOKENS]
        plan = coordinator.plan_load(keys, name, tokens=[TOKENS] * len(keys), end=scan.end)
        with coordinator.core() as core:
            core.end_step()
        self.blocks[:] = 0
        pairs = Pairs.of(self.plan.pairs(0, np.arange(len(keys)), np.array(plan.rows)))
        packed, stream = np.array(plan.rows, "<u4").tobytes(), plan.stream
        if stream is None:  # all of it has come meanwhile
            coordinator.complete_load(name)
            self.finish(name)
            return None
        self.told += 1
        begun = self.streams.begin(
            self.swap.load_call(0), pairs, packed,
            skipped=0, coming=stream.coming, limit=(stream.slot, stream.stream), deadline_s=stream.deadline_s,
        )  # fmt: skip
        return name, begun, keys

    def end(self, name: str, stream: Stream, keys: Sequence[bytes], *, is_reset: bool = False) -> int:
        """Wait for the end of a load, and check what it copied: how many chunks."""
        until(lambda: self.streams.ended(stream), "the stream ends")
        ended = self.streams.ended(stream)
        assert ended is not None
        assert not ended.failed
        for place in range(ended.gap):
            assert self.blocks[place].tobytes() == content(keys[place]).tobytes(), f"{ended}: {keys[place]!r}"
        if is_reset:
            with self.store.coordinator.core() as core:
                core.flushed()
        else:
            self.store.coordinator.complete_load(name, loaded=ended.gap if ended.gap < len(keys) else None)
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
    # Whatever a busy machine's mover takes for a row, to wait for it is quicker than to compute it.
    config = {"tiers": tiers, "wait_s": 60.0, "prefill_tokens_per_s": 1}
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
            assert node.end(*begun) == len(keys)
    assert node.told > 20
    assert node.store.stats()["file"]["streams"] == node.told
    until(node.is_idle, "nothing is pinned")


def damage(folder: Path, row_bytes: int, draw: random.Random) -> None:
    """Flip a byte in every sixteenth place of a row."""
    for slab in folder.rglob("*"):
        if slab.is_file() and slab.stat().st_size >= 16 * row_bytes:
            with slab.open("r+b") as file:
                for at in range(0, slab.stat().st_size - row_bytes, 16 * row_bytes):
                    file.seek(at + draw.randrange(row_bytes))
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))


def test_whatever_fails_meanwhile_only_the_keys_bytes_count(node: Node, tmp_path: Path) -> None:
    """A mover is killed, rows are damaged, requests are aborted, and the store is reset."""
    draw, coordinator = random.Random(2), node.store.coordinator
    damage(tmp_path, coordinator.region.geometry.row_bytes, draw)
    kills = 0
    for turn in range(150):
        if (begun := node.begin(drawn(draw))) is None:
            continue
        time.sleep(draw.random() * 0.002)
        if draw.random() < 0.1:
            with coordinator.core() as core:
                core.streams.cut(begun[0])
        elif (turn > 30 and not kills) or (turn > 100 and kills < 2):
            kills += 1
            os.kill(coordinator.mover_pids[0] or 0, signal.SIGKILL)
        node.end(*begun)
        until(lambda: coordinator._core.movers[0].readable, "the mover is up", timeout_s=60.0)
    assert kills == 2
    assert node.told > 30
    assert node.gaps
    stats = node.store.stats()["file"]
    assert stats["corrupt"]
    begun = None
    while begun is None:
        begun = node.begin(drawn(draw))
    node.store.reset()
    node.end(*begun, is_reset=True)
    until(node.is_idle, "nothing is pinned")
