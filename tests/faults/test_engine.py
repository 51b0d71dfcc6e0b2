"""Real vLLM: what storage does in the middle of a promotion costs a recompute, and changes no token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nixl_tiers.testing.servers import MotoServer

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of two layers with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("fault", ["black hole", "kill"])
def test_a_request_whose_promotion_is_struck_is_recomputed(
    model: Path, moto: MotoServer, bucket: str, fault: str
) -> None:
    runner = Path(__file__).with_name("run_engine.py")
    root = str(runner.parents[2])
    ended = subprocess.run(
        [sys.executable, str(runner), str(model), str(moto.port), bucket, fault],
        env={
            **os.environ,
            **moto.env,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    cold, struck, healed = result["cold"], result["struck"], result["healed"]
    assert len(set(cold["tokens"])) > 2, "a model that always says the same shows nothing"
    assert cold["tokens"] == struck["tokens"] == healed["tokens"]
    assert struck["cached"] == 0
    assert healed["cached"] == 1024
    assert result["stats"]["s3"]["corrupt"] == 0
    print(f"{fault}: cold {cold['seconds']:.2f} s, struck {struck['seconds']:.2f} s, healed {healed['seconds']:.2f} s")
