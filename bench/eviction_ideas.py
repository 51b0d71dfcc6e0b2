"""Two ideas for eviction from papers, replayed on a trace beside the order that we use. A model, without the core.

    python -m bench.eviction_ideas [--trace PATH] [--shares 1,2,5,10,20]

- `tail`: Tail-Optimised LRU (arXiv 2510.15152): of each prompt, so many of the deepest blocks go before everything else
  that the next turn is still expected to compute no more than a threshold (`xi` blocks, less a mean turn's new ones);
- `class`: classes of reuse (arXiv 2506.02634): blocks by the depth in their prompt and by whether the prompt was the
  first of its conversation; how often blocks of a class are used again, and after how long, is learned while the trace
  runs, and the class whose next victim is least likely to be used again gives it up.

The victim's order is otherwise the same as ours: least recently used, leaf first. Printed are hits in per cent of all
look-ups, and the 50th, 90th and 95th percentile of the blocks that a prompt had to compute.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import exp
from pathlib import Path
from statistics import mean, quantiles
from typing import Final, NamedTuple

from bench.eviction import TRACE
from bench.trace import Prompt, read
from nixl_tiers.base.chunk import Key

DEPTHS: Final = (1, 4, 16)  # of classes: blocks before the first, between, and behind
XIS: Final = (16, 32, 64)
LEARNING: Final = 100  # uses of a class before it is judged


class Place(NamedTuple):
    """Of a block in a prompt: how many are before and behind it, whether the prompt follows another one of its
    conversation."""

    before: int
    behind: int
    follows: bool


Rank = Callable[[Place], int]
"""The queue that a block is put in."""


@dataclass
class Class:
    """What is learned of one queue's blocks."""

    uses: int = 0
    reuses: int = 0
    waited_s: float = 0.0
    order: list[tuple[int, int, Key]] = field(default_factory=list)  # (tick, -depth, key), with stale entries

    def chance(self, age_s: float) -> float:
        """Of a block being used again that was used so long ago: exponential, as in the paper."""
        if self.uses < LEARNING or not self.reuses:
            return 1.0
        return self.reuses / self.uses * exp(-age_s * self.reuses / max(self.waited_s, 1e-9))


class Cache:
    """`rows` blocks in queues. `learned`: the least likely next victim goes, else that of the first queue with one."""

    def __init__(self, rows: int, rank: Rank, *, learned: bool) -> None:
        self._rows, self._rank, self._learned = rows, rank, learned
        self._queues: dict[int, Class] = {}
        self._held: dict[Key, tuple[int, int]] = {}  # key -> (queue, tick)
        self._last: dict[Key, tuple[int, float]] = {}  # of all keys ever: (queue, when)
        self._used_s: list[float] = []  # by tick
        self._ticks = count()

    def serve(self, prompt: Prompt) -> int:
        """How many of its blocks were there, in a leading run; all of them are there afterwards, as far as they fit."""
        hits = next((at for at, key in enumerate(prompt.keys) if key not in self._held), len(prompt.keys))
        follows = prompt.keys[0] in self._last
        tick = next(self._ticks)
        self._used_s.append(prompt.now_s)
        for depth, key in enumerate(prompt.keys):
            if (last := self._last.get(key)) is not None:
                earlier = self._queues[last[0]]
                earlier.reuses += 1
                earlier.waited_s += prompt.now_s - last[1]
            queue = self._rank(Place(depth, len(prompt.keys) - 1 - depth, follows))
            held = self._queues.setdefault(queue, Class())
            held.uses += 1
            heapq.heappush(held.order, (tick, -depth, key))
            self._held[key] = queue, tick
            self._last[key] = queue, prompt.now_s
        while len(self._held) > self._rows:
            self._evict(prompt.now_s)
        return hits

    def _evict(self, now_s: float) -> None:
        best: tuple[float, int] | None = None
        for number in sorted(self._queues):
            held = self._queues[number]
            while held.order and self._held.get(held.order[0][2]) != (number, held.order[0][0]):
                heapq.heappop(held.order)
            if not held.order:
                continue
            value = held.chance(now_s - self._used_s[held.order[0][0]]) if self._learned else 0.0
            if best is None or value < best[0]:
                best = value, number
        assert best is not None
        del self._held[heapq.heappop(self._queues[best[1]].order)[2]]


def reuse_class(place: Place) -> int:
    """By depth and turn."""
    return 2 * sum(place.before >= bound for bound in DEPTHS) + place.follows


def tail(xi: int, turn: float) -> Rank:
    """Queue 0 is what goes first: nothing with a threshold of 0."""
    return lambda place: int(place.behind >= round(xi - turn))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--shares", default="1,2,5,10,20")
    arguments = parser.parse_args()
    prompts = [prompt for prompt in read(arguments.trace) if prompt.keys]
    blocks = sum(len(prompt.keys) for prompt in prompts)
    distinct = len({key for prompt in prompts for key in prompt.keys})
    turn = new_blocks(prompts)
    print(f"{len(prompts)} prompts, {blocks} look-ups, {distinct} distinct blocks, {turn:.1f} new ones a later turn")
    arms: list[tuple[str, Rank, bool]] = [("lru", tail(0, turn), False), ("class", reuse_class, True)]
    arms += [(f"tail {xi}", tail(xi, turn), False) for xi in XIS]
    for share in map(int, arguments.shares.split(",")):
        for name, rank, learned in arms:
            cache = Cache(distinct * share // 100, rank, learned=learned)
            missed = [len(prompt.keys) - cache.serve(prompt) for prompt in prompts]
            p = quantiles(missed, n=20)
            hits = 100 * (1 - sum(missed) / blocks)
            computed = " / ".join(f"{p[at]:.0f}" for at in (9, 17, 18))
            print(f"{share:>3} % {name:>8}: {hits:5.1f} % hits; computed {computed}", flush=True)


def new_blocks(prompts: Sequence[Prompt]) -> float:
    """Blocks of a prompt that no earlier prompt had, on average over those whose first block was known."""
    known: set[Key] = set()
    new = []
    for prompt in prompts:
        if prompt.keys[0] in known:
            new.append(sum(key not in known for key in prompt.keys))
        known.update(prompt.keys)
    return mean(new)


if __name__ == "__main__":
    main()
