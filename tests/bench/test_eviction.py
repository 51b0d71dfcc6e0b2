"""bench/eviction.py: what a tier below host memory brings."""

from __future__ import annotations

from pathlib import Path

from bench.eviction import timed
from nixl_tiers.cli.trace import read
from nixl_tiers.core.rows import CPU
from tests.cli.test_trace import trace


def test_a_file_tier_below_has_what_the_host_forgot(tmp_path: Path) -> None:
    prompts = read(trace(tmp_path, [1, 2], [3, 4], [1, 2]))
    found = timed(prompts, 2, "lru", below=8)
    assert found.hits == {CPU: 0.0, "file": 100 / 3}
    assert found.us_per_block.keys() == {"lookup", "load", "store", "end", "plan", "finished"}
