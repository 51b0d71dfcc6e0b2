"""The demo's picture says where it was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.demo.plot import caption, plot

REPORT = {
    "model": "SmolLM2-135M", "prompt_tokens": 6032, "kv_bytes_per_token": 46080, "s3": "seaweedfs",
    "runs": [{"source": source, "ttft_s": seconds} for source, seconds in (("cold", 15.8), ("gpu", 0.2), ("s3", 1.3))],
    "machine": {
        "cpu": "Some CPU", "cores": 2, "memory_gib": 15.6, "system": "Linux", "python": "3.11.7",
        "nixl_tiers": "0.1.0", "vllm": "0.32.0", "torch": None, "nixl": "1.5.1",
    },
}  # fmt: skip


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
    plot(REPORT, tmp_path / "ttft.png")
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes  # type: ignore[attr-defined]
    assert axes.get_xscale() == "log"
    assert "Some CPU" in drawn[0].texts[0].get_text()  # type: ignore[attr-defined]
