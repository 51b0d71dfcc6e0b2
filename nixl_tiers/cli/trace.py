"""Replays a trace of prompts in Mooncake's format through the real core, in virtual time and without I/O.

One JSON object a line: `timestamp` in ms, `hash_ids`: the prompt's chain of blocks. Each request looks its chain
up until a miss, loads what it hit, and stores the rest; its hits are the leading run of its blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.cli.output import InputError
from nixl_tiers.core.key_lookup import Lookup
from nixl_tiers.core.manager import TierManager

BLOCK_TOKENS: Final = 512  # of a block in Mooncake's own traces
ROW_BYTES: Final = 4096  # nothing is moved


@dataclass(frozen=True)
class Prompt:
    name: str
    now_s: float
    keys: list[Key]


@dataclass(frozen=True)
class Replayed:
    """`hits`: the share of all look-ups. `stored`: blocks."""

    hits: float
    stored: int


def read(path: Path) -> list[Prompt]:
    """Raises InputError."""
    prompts = []
    try:
        with path.open() as lines:
            for number, line in enumerate(lines):
                entry = json.loads(line)
                # As long as vLLM's keys, and new objects each time, as in vLLM.
                keys = [block.to_bytes(32, "little") + bytes(4) for block in entry["hash_ids"]]
                prompts.append(Prompt(str(number), entry["timestamp"] / 1000, keys))
    except OSError as error:
        raise InputError(f"--trace: {path} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise InputError(
            f"--trace: line {len(prompts) + 1} of {path} has no timestamp and hash_ids, as Mooncake's traces have"
        ) from None
    return prompts


def replay(prompts: Sequence[Prompt], rows: int) -> Replayed:
    """All prompts through one tier of `rows` rows, the least recently used ones of which are evicted first."""
    core = TierManager(rows, ROW_BYTES, [], policy="lru")
    hits = stored = 0
    for prompt in prompts:
        found = _hits(core, prompt)
        hits += found
        core.copies.prepare_load(prompt.keys[:found], prompt.name)
        core.copies.complete_load(prompt.name)
        plan = core.copies.prepare_store(prompt.keys[found:], prompt.name)
        core.copies.complete_store(core.copies.rows_being_filled(plan.keys), ())
        core.finish_request(prompt.name)
        core.end_step()
        stored += len(plan.keys)
    return Replayed(hits / max(1, sum(len(prompt.keys) for prompt in prompts)), stored)


def _hits(core: TierManager, prompt: Prompt) -> int:
    """How many blocks the request finds until its first miss."""
    answers = (core.lookup(key, prompt.name, end, prompt.now_s) for end, key in enumerate(prompt.keys))
    return sum(1 for _ in takewhile(lambda answer: answer is Lookup.HIT, answers))
