"""What is lost, and what is saved, if only what is expected to come back is stored. A model, without the core.

    python -m bench.store_ideas [--trace PATH] [--shares 2,10,50] [--new 0,90]

A trace, and between its prompts others that never come back (`--new`: their share of all blocks), through a cache of a
share of the trace's distinct blocks, least recently used, leaf first. Of what a prompt had to compute a prefix is
stored:

- `all`: all of it;
- `second`: blocks that were computed before, as far as a ghost knows: an index of as many keys as the cache has rows,
  without bytes, in the same order;
- `pays n`: `second` while the share of blocks that the ghost knows is below n %, else `all`;
- `pays n + 16th`: and one in 16 of the beginnings that the ghost does not know, wholly, with what continues it;
- `sample n`: no ghost. While of the stored blocks less than n % were used before their eviction, only one in 16
  beginnings that the cache does not hold, else `all`.

Printed are hits in per cent of the trace's own blocks, and the stored blocks in per cent of the computed ones.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final
from zlib import crc32

from bench.eviction import TRACE, Prompt, read
from nixl_tiers.base.chunk import Key

SAMPLE: Final = 16
WINDOW: Final = 4096  # blocks after which what was seen counts half
THRESHOLDS: Final = (2, 5, 10, 20)
LENGTH: Final = 24  # blocks of a prompt that never comes back, as one of the trace has on average


class Order:
    """`rows` keys, least recently used, the deepest of a prompt first. `left`: how many have left, of late, and of
    these `left_used`, which were used after they had come."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ticks: dict[Key, int] = {}
        self._uses: dict[Key, int] = {}
        self._heap: list[tuple[int, int, Key]] = []
        self._tick = count()
        self.left = self.left_used = 0.0

    def __contains__(self, key: Key) -> bool:
        return key in self._ticks

    def run(self, keys: Sequence[Key]) -> int:
        """How many of the first keys are there."""
        return next((at for at, key in enumerate(keys) if key not in self._ticks), len(keys))

    def use(self, keys: Sequence[Key]) -> None:
        """They are there from now on, as far as there is room."""
        tick = next(self._tick)
        for depth, key in enumerate(keys):
            self._uses[key] = self._uses[key] + 1 if key in self._ticks else 0
            self._ticks[key] = tick
            heapq.heappush(self._heap, (tick, -depth, key))
        while len(self._ticks) > self._rows:
            at, _, key = heapq.heappop(self._heap)
            if self._ticks.get(key) == at:
                del self._ticks[key]
                self.left, self.left_used = self.left + 1, self.left_used + (self._uses.pop(key) > 0)
                if self.left > WINDOW:
                    self.left, self.left_used = self.left / 2, self.left_used / 2


@dataclass
class Share:
    """Of blocks that came back."""

    seen: float = 0.0
    known: float = 0.0

    def add(self, seen: int, known: int) -> None:
        self.seen, self.known = self.seen + seen, self.known + known
        if self.seen > WINDOW:
            self.seen, self.known = self.seen / 2, self.known / 2

    def is_below(self, percent: int) -> bool:
        return self.seen >= WINDOW / 4 and self.known < self.seen * percent / 100


Rule = Callable[[Sequence[Key], int], int]
"""Of a prompt whose first blocks are hits: how many of its blocks are held afterwards."""


def store_all(keys: Sequence[Key], _hits: int) -> int:
    return len(keys)


def drawn(key: Key) -> bool:
    return crc32(key) % SAMPLE == 0


class Ghost:
    """`percent`: below it only what was computed before is stored; None: always. `samples`: beside it one in SAMPLE."""

    def __init__(self, rows: int, percent: int | None, *, samples: bool = False) -> None:
        self._order = Order(rows)
        self._percent, self._samples = percent, samples
        self._share = Share()
        self._wholly: set[Key] = set()  # the last block of each prompt that was drawn, or continues such a one

    def __call__(self, keys: Sequence[Key], hits: int) -> int:
        known = self._order.run(keys)
        self._order.use(keys)
        self._share.add(len(keys), known)
        if self._percent is not None and not self._share.is_below(self._percent):
            return len(keys)
        follows = known > 0 and keys[known - 1] in self._wholly
        if self._samples and known < len(keys) and (follows or drawn(keys[known])):
            self._wholly.add(keys[-1])
            return len(keys)
        return max(hits, known)


class Sample:
    def __init__(self, cache: Order, percent: int) -> None:
        self._cache, self._percent = cache, percent

    def __call__(self, keys: Sequence[Key], hits: int) -> int:
        left, used = self._cache.left, self._cache.left_used
        below = left > WINDOW / 4 and used < left * self._percent / 100
        return hits if below and hits < len(keys) and not drawn(keys[hits]) else len(keys)


def prompts_with_new(prompts: Sequence[Prompt], percent: int) -> Iterator[tuple[Sequence[Key], bool]]:
    """Each prompt's keys, and whether it is of the trace."""
    numbers = count(1 << 40)
    owed = 0.0
    for prompt in prompts:
        yield prompt.keys, True
        owed += len(prompt.keys) * percent / (100 - percent)
        while owed >= LENGTH:
            owed -= LENGTH
            yield [next(numbers).to_bytes(32, "little") + bytes(4) for _ in range(LENGTH)], False


def replay(prompts: Sequence[Prompt], percent: int, rows: int, make: Callable[[Order], Rule]) -> tuple[float, float]:
    cache = Order(rows)
    rule = make(cache)
    own = found = computed = stored = 0
    for keys, of_trace in prompts_with_new(prompts, percent):
        hits = cache.run(keys)
        held = rule(keys, hits)
        cache.use(keys[:held])
        own += len(keys) * of_trace
        found += hits * of_trace
        computed += len(keys) - hits
        stored += held - hits
    return 100 * found / own, 100 * stored / computed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--shares", default="2,10,50")
    parser.add_argument("--new", default="0,90")
    arguments = parser.parse_args()
    prompts = [prompt for prompt in read(arguments.trace) if prompt.keys]
    distinct = len({key for prompt in prompts for key in prompt.keys})
    for share in map(int, arguments.shares.split(",")):
        rows = distinct * share // 100
        arms: dict[str, Callable[[Order], Rule]] = {
            "all": lambda _: store_all,
            "second": lambda _, rows=rows: Ghost(rows, None),
        }
        for percent in THRESHOLDS:
            arms[f"pays {percent}"] = lambda _, rows=rows, percent=percent: Ghost(rows, percent)
            arms[f"pays {percent} + 16th"] = lambda _, rows=rows, percent=percent: Ghost(rows, percent, samples=True)
            arms[f"sample {percent}"] = lambda cache, percent=percent: Sample(cache, percent)
        for new in map(int, arguments.new.split(",")):
            print(f"{share} % of the blocks, {new} % never come back", flush=True)
            for name, make in arms.items():
                hits, stored = replay(prompts, new, rows, make)
                print(f"    {name:>14}: {hits:5.1f} % hits, {stored:5.1f} % stored", flush=True)


if __name__ == "__main__":
    main()
