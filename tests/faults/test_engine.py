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

from tests.faults.run_engine import STRIKES
from tests.support.models import save_random

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of two layers with random weights."""
    return save_random("LlamaForCausalLM", tmp_path / "model")


def test_requests_whose_promotions_are_struck_are_recomputed(model: Path, moto: MotoServer, bucket: str) -> None:
    """One engine lives through all of it, and afterwards has the whole prompt from storage again each time."""
    runner = Path(__file__).with_name("run_engine.py")
    root = str(runner.parents[2])
    ended = subprocess.run(
        [sys.executable, str(runner), str(model), str(moto.port), bucket, *STRIKES],
        env={
            **os.environ,
            **moto.env,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        },
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    cold = result["cold"]
    assert len(set(cold["tokens"])) > 2, "a model that always says the same shows nothing"
    assert set(result["struck"]) == set(STRIKES)
    for fault, seen in result["struck"].items():
        assert seen["during"]["tokens"] == seen["after"]["tokens"] == cold["tokens"], fault
        assert seen["during"]["cached"] == 0, fault
        print(
            f"{fault}: cold {cold['seconds']:.2f} s, struck {seen['during']['seconds']:.2f} s, from storage "
            f"{seen['after']['seconds']:.2f} s, healed after {seen['healed_s']:.1f} s"
        )
    stats = result["stats"]["s3"]
    assert stats["corrupt"] == 0
    assert stats["deaths"] >= 2
