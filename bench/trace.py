"""Reads a trace of prompts in Mooncake's format, for `eviction` and `queueing`.

One JSON object a line: `timestamp` in ms, `hash_ids`: the prompt's chain of blocks, of 512 tokens each in
Mooncake's own traces: https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nixl_tiers.base.chunk import Key


@dataclass(frozen=True)
class Prompt:
    name: str
    now_s: float
    keys: list[Key]


def read(path: Path) -> list[Prompt]:
    prompts = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            entry = json.loads(line)
            # As long as vLLM's keys, and new objects each time, as in vLLM.
            keys = [block.to_bytes(32, "little") + bytes(4) for block in entry["hash_ids"]]
            prompts.append(Prompt(str(number), entry["timestamp"] / 1000, keys))
    return prompts
