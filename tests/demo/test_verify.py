"""The demo rejects every run whose hits came from the wrong tier, with a sentence."""

from __future__ import annotations

import pytest

from nixl_tiers.demo.server import Answer
from nixl_tiers.demo.verify import SOURCES, DemoFailure, Run, table, verify

PROMPT, KV = 1000, 100


def run(source: str, *, cached: int = 960, loaded: int | None = None, **read: int) -> Run:
    """A correct run, except for the arguments."""
    tokens = dict.fromkeys(SOURCES.values(), 0)
    if source != "cold":
        tokens[SOURCES[source]] = cached
    moved = cached * KV if source in ("cpu", "file", "s3") else 0
    read_bytes = {"cpu": 0, "file": 0, "s3": 0, source: moved} | read
    answer = Answer(20.0 if source == "cold" else 0.5, (1, 2), PROMPT, tokens.get(SOURCES.get(source, ""), 0))
    return Run(source, answer, tokens, moved if loaded is None else loaded, read_bytes)


@pytest.mark.parametrize("source", ["cold", *SOURCES])
def test_correct_run_is_accepted(source: str) -> None:
    verify(run(source), KV)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (run("cpu", cached=900), "the cpu run took only 900 of 1000 tokens from cpu"),
        (run("file", file=95_999), "the file tier read 95999 bytes for hits of 96000 bytes"),
        (run("s3", s3=0), "the s3 tier read 0 bytes"),
        (run("s3", file=1), "the file tier read 1 bytes during the s3 run"),
        (run("cpu", s3=1), "the s3 tier read 1 bytes during the cpu run"),
        (run("cpu", loaded=1), "the cpu run loaded 1 bytes for hits"),
        (run("gpu", loaded=1), "the gpu run loaded 1 bytes, but should load none"),
        (run("cold", file=4), "the file tier read 4 bytes during the cold run"),
    ],
)
def test_run_with_wrong_bytes_moved_is_rejected(wrong: Run, sentence: str) -> None:
    with pytest.raises(DemoFailure, match=sentence):
        verify(wrong, KV)


@pytest.mark.parametrize("source", ["cold", *SOURCES])
@pytest.mark.parametrize("other", [*SOURCES])
def test_tokens_from_another_source_are_rejected(source: str, other: str) -> None:
    if source != other:
        mixed = run(source)
        mixed.cached_tokens[SOURCES[other]] = 128
        with pytest.raises(DemoFailure, match=f"the {source} run took 128 tokens from {other}"):
            verify(mixed, KV)


def test_table_has_a_line_for_each_run() -> None:
    lines = table([run("cold"), run("gpu"), run("s3")], PROMPT).splitlines()
    assert len(lines) == 5
    assert " ".join(lines[2].split()) == "cold 20.00 s 0.00 s 1.0 x 0 of 1000 0.0 MB 0.0 MB"
    assert " ".join(lines[4].split()) == "s3 0.50 s 19.50 s 40.0 x 960 of 1000 0.1 MB 0.1 MB"
    assert len({len(line) for line in lines}) == 1


def test_record_has_the_bytes_of_its_own_tier() -> None:
    assert run("file", cpu=5).record() == {
        "source": "file",
        "ttft_s": 0.5,
        "cached_tokens": 960,
        "bytes_loaded": 96_000,
        "tier_bytes_read": 96_000,
    }
