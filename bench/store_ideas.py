"""What is lost, and what is saved, if only what is expected to come back is stored: `store: adaptive` on a trace.

    python -m bench.store_ideas [--trace PATH] [--shares 2,10,50] [--new 0,90] [--json FILE]

A trace, and between its prompts others that never come back (`--new`: their share of all blocks), through a cache of a
share of the trace's distinct blocks, least recently used, leaf first. Of what a prompt had to compute a prefix is
stored:

- `all`: all of it;
- `pays n`: what `Admission` (nixl_tiers/core/ghost.py) admits, where storing everything pays from n % on that come
  back. With 200 that is never: blocks that were computed before, and the sample.

Hits are in per cent of the trace's own blocks; stored blocks in per cent of the computed ones, and those that were
computed again because they had not been stored, too.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from bench.eviction import TRACE
from bench.trace import Prompt, read
from nixl_tiers.base.chunk import Key
from nixl_tiers.core.ghost import Admission

PAYS: Final = (2, 5, 10, 20, 200)
LENGTH: Final = 24  # blocks of a prompt that never comes back, as one of the trace has on average


class Order:
    """`rows` keys, least recently used, the deepest of a prompt first."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ticks: dict[Key, int] = {}
        self._heap: list[tuple[int, int, Key]] = []
        self._tick = count()

    def __contains__(self, key: Key) -> bool:
        return key in self._ticks

    def run(self, keys: Sequence[Key]) -> int:
        """How many of the first keys are there."""
        return next((at for at, key in enumerate(keys) if key not in self._ticks), len(keys))

    def use(self, keys: Sequence[Key]) -> None:
        """They are there from now on, as far as there is room."""
        tick = next(self._tick)
        for depth, key in enumerate(keys):
            self._ticks[key] = tick
            heapq.heappush(self._heap, (tick, -depth, key))
        while len(self._ticks) > self._rows:
            at, _, key = heapq.heappop(self._heap)
            if self._ticks.get(key) == at:
                del self._ticks[key]


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


class Shares(NamedTuple):
    """In per cent."""

    hits: float
    stored: float
    again: float


def replay(prompts: Sequence[Prompt], new: int, rows: int, pays: int | None) -> Shares:
    """`pays`: from how many per cent on; None: everything is stored."""
    cache, admission = Order(rows), Admission(rows)
    admission.pays = None if pays is None else pays / 100
    own = found = computed = stored = 0
    for number, (keys, of_trace) in enumerate(prompts_with_new(prompts, new)):
        name, hits = str(number), cache.run(keys)
        if hits:
            admission.loaded(keys[:hits], name)
        kept = admission.offered(keys[hits:], name)
        admission.ended(name)
        cache.use(keys[: hits + kept])
        own += len(keys) * of_trace
        found += hits * of_trace
        computed += len(keys) - hits
        stored += kept
    return Shares(100 * found / own, 100 * stored / computed, 100 * admission.computed_again / computed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--shares", default="2,10,50")
    parser.add_argument("--new", default="0,90")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = [prompt for prompt in read(arguments.trace) if prompt.keys]
    distinct = len({key for prompt in prompts for key in prompt.keys})
    table: list[list[str]] = []
    for share in map(int, arguments.shares.split(",")):
        for new in map(int, arguments.new.split(",")):
            print(f"{share} % of the blocks, {new} % never come back", flush=True)
            table.append([f"{share} %", f"{new} %"])
            for pays in (None, *PAYS):
                shares = replay(prompts, new, distinct * share // 100, pays)
                name = "all" if pays is None else f"pays {pays}"
                print(
                    f"    {name:>9}: {shares.hits:5.1f} % hits, {shares.stored:5.1f} % stored, "
                    f"{shares.again:5.1f} % computed again",
                    flush=True,
                )
                table[-1].append("; ".join(f"{each:.1f}" for each in shares))
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
