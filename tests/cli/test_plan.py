"""`nixl-tiers plan MODEL [CONFIG]`: sizes, what tiers hold, verdicts, unknown models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.kv_bytes import Kv, kv_of
from nixl_tiers.cli import BAD_INPUT, OK, main
from nixl_tiers.cli.checks import tiers
from nixl_tiers.cli.checks.finding import ok
from nixl_tiers.cli.checks.trial import NAME
from nixl_tiers.cli.plan import Plan
from tests.support.file_tier import file_tier

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 512,
}  # fmt: skip
LATENT = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def saved(folder: Path, config: dict[str, Any], name: str = "model") -> str:
    place = folder / name
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


@pytest.fixture
def answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """What the command says of this model, as JSON."""

    def ask(config: dict[str, Any], *options: str) -> dict[str, Any]:
        assert main(["plan", saved(tmp_path, config), *options, "--json"]) == OK
        answered: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answered

    return ask


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_guides_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/guide/sizing.md"""
    assert main(["plan", saved(tmp_path, LLAMA_8B), "--prefill", "39000"]) == OK
    lines = capsys.readouterr().out.splitlines()
    rest = "GB/s for very long ones; a slower tier is not loaded from"
    assert lines[:3] == [
        "131,072 bytes of KV cache a token, in 32 layers",
        "a chunk of 64 tokens: a row of 8.004 MiB",
        f"break-even at 39,000 tokens/s: 6.6 GB/s for prompts of 7,000 tokens, 5.1 {rest}",
    ]
    assert [line.split() for line in lines if line.startswith("1 TiB")] == [["1", "TiB", "8,384,512"]]


@pytest.mark.parametrize(
    ("config", "options", "sizes"),
    [
        (LLAMA_8B, ["--tp", "4"], (131_072, 32_768, 4 * 2_097_152 + 4096)),
        (LLAMA_8B, ["--tp", "16"], (131_072, 16_384, 8 * 1_048_576 + 4096)),
        (LLAMA_8B, ["--kv-dtype", "fp8"], (65_536, 65_536, 4_194_304 + 4096)),
        (LLAMA_8B, ["--chunk", "256"], (131_072, 131_072, 33_554_432 + 4096)),
        (LATENT, ["--tp", "8"], (70_272, 70_272, 4_497_408 + 4096)),
    ],
)
def test_ranks_and_types(
    config: dict[str, Any], options: list[str], sizes: tuple[int, ...], answer: Callable[..., dict[str, Any]]
) -> None:
    found = answer(config, *options)
    assert (found["bytes_per_token"], found["rank_bytes_per_token"], found["row_bytes"]) == sizes


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        (
            {"model_type": "mamba", "num_hidden_layers": 4},
            [],
            "the KV cache of a model of type mamba is not known here",
        ),
        ({**LLAMA_8B, "layer_types": ["linear_attention", "full_attention"]}, [], "with layers of linear_attention is"),
        (LLAMA_8B, ["--kv-dtype", "nvfp4"], "--kv-dtype: the bytes of nvfp4 are not known here"),
    ],
)
def test_what_is_not_known_is_one_sentence_and_no_number(
    config: dict[str, Any], options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", saved(tmp_path, config), *options]) == BAD_INPUT
    output = capsys.readouterr()
    assert output.out == ""
    assert why in output.err
    assert "take it from the log" in output.err
    assert output.err.count("\n") == 1


# --- tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "prefill", "rate", "verdict"),
    [
        (kv_of(LLAMA_8B), 39_000, 1.1e9, "1.1 GB/s is below 5.1: this disk will not be loaded from"),
        (kv_of(LLAMA_8B), 39_000, 6.7e9, "6.7 GB/s is above 6.6: hits are loaded"),
        # 131072 * n / 5.5e9 bytes/s + 0.04 s, the step that a hit still takes, = n / 39000 tokens/s for n = 22102
        (kv_of(LLAMA_8B), 39_000, 5.5e9, "5.5 GB/s is above 5.1: prompts of more than 22,102 tokens are loaded"),
        (kv_of(LLAMA_8B), 0, 1.3e9, "1.3 GB/s: pays while the engine computes fewer than 9,918 tokens/s"),
        # (1 * 256 * n + 5 * 256 * 512) / 8e8 bytes/s + 0.04 s = n / 1e6 tokens/s for n = 60028
        (kv_of(GEMMA), 1e6, 8e8, "0.8 GB/s is above 0.26: prompts of more than 60,028 tokens are loaded"),
        (kv_of(GEMMA), 1e6, 2e8, "0.2 GB/s is below 0.26: this disk will not be loaded from"),
        (
            kv_of({**GEMMA, "layer_types": ["sliding_attention"] * 6}),
            1e6,
            1e6,
            "0.001 GB/s is above 0: prompts",
        ),
    ],
)
def test_verdict(kv: Kv, prefill: float, rate: float, verdict: str) -> None:
    assert Plan(kv, 1, 64, prefill).verdict([rate], "this disk").startswith(verdict)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ([4.0, 4.4, 4.8, 4.2, 5.0], "4.4 GB/s is below 5.1: this disk will not be loaded from"),
        ([4.0, 4.4, 5.2, 4.2, 5.0], "4.4 GB/s (4.0 to 5.2 in 5 measurements) beside 5.1: too close to call"),
        ([7.0, 6.4, 6.7, 7.1, 6.9], "6.9 GB/s (6.4 to 7.1 in 5 measurements) beside 6.6: too close to call"),
        ([7.0, 6.7, 6.8, 7.1, 6.9], "6.9 GB/s is above 6.6: hits are loaded"),
    ],
)
def test_break_even_within_the_spread_of_the_measurements_is_too_close_to_call(
    measured: list[float], verdict: str
) -> None:
    made = Plan(kv_of(LLAMA_8B), 1, 64, 39_000)
    assert made.verdict([each * 1e9 for each in measured], "this disk") == verdict


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., str]:
    def write(**fields: Any) -> str:
        disk = file_tier(tmp_path / "kv", "1GiB") | fields
        file = tmp_path / "tiers.json"
        file.write_text(json.dumps({"tiers": [{"type": "cpu", "capacity": "1GiB"}, disk]}))
        return str(file)

    return write


def test_replicas_share_a_disk(
    answer: Callable[..., dict[str, Any]], configured: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight L40S on one drive of 2.1 GB/s: it was said to pay, at 1.9, where eight times that is needed."""
    trial = ok(NAME, "", read_bytes_per_s=2_100_000_000, reads_bytes_per_s=[2_100_000_000] * 5)
    monkeypatch.setattr(tiers, "examine", lambda *given, **_: iter([trial]))
    file = Path(configured())
    file.write_text(json.dumps({**json.loads(file.read_text()), "replicas": 8}))
    _, disk = answer(LLAMA_8B, str(file), "--prefill", "14300")["tiers"]
    assert disk["verdict"] == "for each of 8 replicas 0.26 GB/s is below 1.9: this disk will not be loaded from"
    assert disk["read_bytes_per_s"] == 2_100_000_000
