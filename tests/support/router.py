"""A router that subscribes to an engine's KV events over ZeroMQ, as those of Dynamo and llm-d do.

It counts how often each block was stored and removed in each tier, asks the engine for batches that it has missed, and
refuses what those routers would drop in silence: a block without tokens, or whose parent it does not know.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch

GPU = ("GPU", None, None)


class Block(NamedTuple):
    parent: Any
    tokens: tuple[int, ...]


class Router:
    """`places`: of each block, (medium, ownership, locality) -> how often it was stored there and not removed."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        self._live, self._replay_endpoint, self._context = context.socket(zmq.SUB), replay_endpoint, context
        self._live.connect(endpoint)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next = 0
        self.blocks: dict[Any, Block] = {}
        self.places: dict[Any, Counter[tuple[str, str | None, str | None]]] = {}

    def receive(self) -> None:
        """Take all that was published."""
        while self._live.poll(200):
            _, number, batch = self._live.recv_multipart()
            self._take(int.from_bytes(number, "big"), batch)
        self._ask_for_missed()  # a subscription may begin late

    def close(self) -> None:
        self._live.close(linger=0)

    def prefix(self, block: Any) -> list[int]:
        """The tokens from a prompt's first to this block's last."""
        parts: list[tuple[int, ...]] = []
        while block is not None:
            block, tokens = self.blocks[block]
            parts.append(tokens)
        return [token for tokens in reversed(parts) for token in tokens]

    def tiers(self, block: Any) -> set[tuple[str, str | None, str | None]]:
        """Where it is, but for the engine's own cache."""
        return {place for place, count in self.places.get(block, Counter()).items() if count} - {GPU}

    def _take(self, number: int, batch: bytes) -> None:
        if number > self._next:
            self._ask_for_missed()
        if number < self._next:
            return
        self._next = number + 1
        for event in self._decoder.decode(batch).events:
            if isinstance(event, AllBlocksCleared):
                for counts in self.places.values():
                    del counts[GPU]
            elif isinstance(event, BlockStored):
                self._stored(event)
            else:
                place = (event.medium, event.ownership, event.locality)
                for block in event.block_hashes:
                    assert self.places[block][place] > 0, f"{block} is not in {place}"
                    self.places[block][place] -= 1

    def _stored(self, event: BlockStored) -> None:
        place, size, parent = (event.medium, event.ownership, event.locality), event.block_size, event.parent_block_hash
        assert size > 0, "a placeholder, which only says that something was stored"
        assert len(event.token_ids) == size * len(event.block_hashes), "not one hash a block"
        assert parent is None or parent in self.blocks, "a child comes before its parent"
        for start, block in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[start * size : (start + 1) * size])
            assert self.blocks.setdefault(block, Block(parent, tokens)) == Block(parent, tokens)
            counts = self.places.setdefault(block, Counter())
            assert place == GPU or not counts[place], f"{block} is stored twice in {place}"
            counts[place] += 1
            parent = block

    def _ask_for_missed(self) -> None:
        with self._context.socket(zmq.DEALER) as replay:
            replay.connect(self._replay_endpoint)
            replay.send_multipart([b"", self._next.to_bytes(8, "big")])
            while True:
                assert replay.poll(60_000), "the engine replays nothing"
                *_, number, batch = replay.recv_multipart()
                if int.from_bytes(number, "big", signed=True) < 0:
                    return
                self._take(int.from_bytes(number, "big"), batch)
