"""What the core does depends on what happened to it, and not on the order in which a set of keys gives them.

That order is another in each process (PYTHONHASHSEED), so that no run could be repeated, and no failure either.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import walk

STEPS = 2000
HASH_SEEDS = ("1", "2")


def traces(seed: int) -> list[list[str]]:
    """Of the same walk under several hash seeds."""
    command = [sys.executable, "-m", walk.__name__, str(seed), str(STEPS)]
    root = Path(__file__).parents[3]
    walks = [
        subprocess.Popen(
            command, env={**os.environ, "PYTHONHASHSEED": each}, stdout=subprocess.PIPE, text=True, cwd=root
        )
        for each in HASH_SEEDS
    ]
    outputs = [each.communicate()[0] for each in walks]
    assert [each.returncode for each in walks] == [0] * len(walks)
    return [output.splitlines() for output in outputs]


@pytest.mark.parametrize("seed", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_walk_is_the_same_under_every_hash_seed(seed: int) -> None:
    first, *others = traces(seed)
    assert sum(" STORE " in line for line in first) > 100
    assert sum(" LOAD " in line for line in first) > 100
    for other in others:
        differs = [place for place, lines in enumerate(zip(first, other, strict=False)) if lines[0] != lines[1]]
        assert not differs, "\n".join(["-", *first[: differs[0] + 1][-3:], "+", *other[: differs[0] + 1][-3:]])
        assert len(first) == len(other)
