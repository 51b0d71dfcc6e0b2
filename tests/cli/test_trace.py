"""What a trace says of capacities, and what is no trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nixl_tiers.cli.output import InputError
from nixl_tiers.cli.trace import read, replay


def trace(folder: Path, *prompts: list[int]) -> Path:
    path = folder / "trace.jsonl"
    lines = ({"timestamp": 1000 * number, "hash_ids": prompt} for number, prompt in enumerate(prompts))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_hits_are_the_leading_run_and_only_what_is_missing_is_stored(tmp_path: Path) -> None:
    prompts = read(trace(tmp_path, [1, 2, 3], [1, 2, 4], [5, 2, 3]))
    assert [prompt.now_s for prompt in prompts] == [0, 1, 2]
    found = replay(prompts, 16)
    assert (found.hits, found.stored) == (2 / 9, 5)


def test_too_small_a_tier_forgets(tmp_path: Path) -> None:
    prompts = read(trace(tmp_path, [1, 2], [3, 4], [1, 2], [3, 4]))
    assert replay(prompts, 4).hits == 0.5
    found = replay(prompts, 2)
    assert (found.hits, found.stored) == (0, 8)


@pytest.mark.parametrize(
    "line",
    [
        "", "7", "[]", "{}", "nonsense", '{"timestamp": "noon", "hash_ids": [1]}', '{"timestamp": 1, "hash_ids": 5}',
        '{"timestamp": 1, "hash_ids": ["a"]}', '{"timestamp": 1, "hash_ids": [-1]}',
    ],
)  # fmt: skip
def test_what_is_no_trace_is_named_by_its_line(line: str, tmp_path: Path) -> None:
    path = trace(tmp_path, [1])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputError, match=r"--trace: line 2 of .*trace.jsonl has no timestamp and hash_ids"):
        read(path)


def test_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.jsonl cannot be read \(No such file or directory\)"):
        read(tmp_path / "none.jsonl")
