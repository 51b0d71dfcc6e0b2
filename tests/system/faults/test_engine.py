"""Real vLLM: a storage fault during a promotion costs a recompute, and changes no token."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import save_random
from tests.support.servers import MotoServer
from tests.system.faults.run_engine import FAULTS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.timeout(1200),
    # Not imported here: every worker of `make test` collects this file, and runs nothing of it.
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of two layers with random weights."""
    return save_random("LlamaForCausalLM", tmp_path / "model")


def test_requests_are_recomputed_when_a_promotion_fails(model: Path, moto: MotoServer, bucket: str) -> None:
    """One engine survives all faults, and after each of them loads the whole prompt from storage again."""
    runner = Path(__file__).with_name("run_engine.py")
    root = str(runner.parents[3])
    ended = subprocess.run(
        [sys.executable, str(runner), str(model), str(moto.port), bucket, *FAULTS],
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
    assert len(set(cold["tokens"])) > 2, "a model that repeats one token would hide wrong bytes"
    assert set(result["faults"]) == set(FAULTS)
    for fault, answers in result["faults"].items():
        assert answers["during"]["tokens"] == answers["after"]["tokens"] == cold["tokens"], fault
        assert answers["during"]["cached"] == 0, fault
        print(
            f"{fault}: cold {cold['seconds']:.2f} s, during {answers['during']['seconds']:.2f} s, from storage "
            f"{answers['after']['seconds']:.2f} s, healed after {answers['healed_s']:.1f} s"
        )
    stats = result["stats"]["s3"]
    assert stats["corrupt"] == 0
    assert stats["deaths"] >= 2
