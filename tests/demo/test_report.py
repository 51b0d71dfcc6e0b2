"""The demo rejects every run whose hits came from the wrong tier, with a sentence. Its picture says where it ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.report import SOURCES, DemoFailure, Run, caption, draw, table, verify
from nixl_tiers.cli.completions import Answer

PROMPT, WHOLE, KV = 1023, 896, 100  # WHOLE: tokens in whole blocks, the only ones that are cached

REPORT = {
    "model": "SmolLM2-135M", "prompt_tokens": 6032, "kv_bytes_per_token": 46080, "s3": "seaweedfs",
    "runs": [{"source": source, "ttft_s": seconds} for source, seconds in (("cold", 15.8), ("gpu", 0.2), ("s3", 1.3))],
    "machine": {
        "cpu": "Some CPU", "cores": 2, "memory_gib": 15.6, "system": "Linux", "python": "3.11.7",
        "nixl_tiers": "0.1.0", "vllm": "0.32.0", "torch": None, "nixl": "1.5.1",
    },
}  # fmt: skip


def run(source: str, *, cached: int = WHOLE, loaded: int | None = None, **read: int) -> Run:
    """A correct run, except for the arguments."""
    tokens = dict.fromkeys(SOURCES.values(), 0)
    if source != "cold":
        tokens[SOURCES[source]] = cached
    moved = cached * KV if source in ("cpu", "file", "s3") else 0
    read_bytes = {"cpu": 0, "file": 0, "s3": 0, source: moved} | read
    answer = Answer(20.0 if source == "cold" else 0.5, 30.0, (1, 2), PROMPT, tokens.get(SOURCES.get(source, ""), 0))
    return Run(source, answer, tokens, moved if loaded is None else loaded, read_bytes)


@pytest.mark.parametrize("source", ["cold", *SOURCES])
def test_correct_run_is_accepted(source: str) -> None:
    verify(run(source), KV)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (run("cpu", cached=768), "the cpu run took only 768 of 896 tokens from cpu"),
        (run("file", file=89_599), "the file tier read 89599 bytes for hits of 89600 bytes"),
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
    assert " ".join(lines[2].split()) == "cold 20.00 s 0.00 s 1.0 x 0 of 1023 0.0 MB 0.0 MB"
    assert " ".join(lines[4].split()) == "s3 0.50 s 19.50 s 40.0 x 896 of 1023 0.1 MB 0.1 MB"
    assert len({len(line) for line in lines}) == 1


def test_record_has_the_bytes_of_its_own_tier() -> None:
    assert run("file", cpu=5).record() == {
        "source": "file",
        "ttft_s": 0.5,
        "cached_tokens": 896,
        "bytes_loaded": 89_600,
        "tier_bytes_read": 89_600,
    }


def test_caption_names_model_machine_and_versions() -> None:
    assert caption(REPORT) == [
        "SmolLM2-135M, 45 KiB of KV cache a token; S3: seaweedfs",
        "2 cores of Some CPU, 15.6 GiB, no GPU",
        "nixl_tiers 0.1.0, vLLM 0.32.0, NIXL 1.5.1, Python 3.11.7",
    ]


def test_picture_is_logarithmic_and_has_the_caption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[object] = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    draw(REPORT, tmp_path / "ttft.png")
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes  # type: ignore[attr-defined]
    assert axes.get_xscale() == "log"
    assert "Some CPU" in drawn[0].texts[0].get_text()  # type: ignore[attr-defined]
