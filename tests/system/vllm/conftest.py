"""What the tests of real engines, and of the vLLM face with threads and processes, share."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from demo import vllm_cpu
from nixl_tiers.base.times import PRODUCTION, Times
from tests.support.models import save_random
from tests.system.vllm import run_engine
from tests.vllm.conftest import offloading_config, ordinary_logging, weights_folder
from tools.torture.engine import forked

__all__ = ["offloading_config", "ordinary_logging", "weights_folder"]


@pytest.fixture(scope="session")
def run_apart(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Calls a function of a module in a process of its own, with JSON; returns what that returns, also JSON.

    `new_process`: not in a fork of the process that has imported vLLM, which takes seconds: forks share Python's hash
    seed. Raises with the process's last words.
    """

    def run(
        function: Callable[[Any], Any],
        plan: Any,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        *,
        new_process: bool = False,
    ) -> Any:
        place = tmp_path_factory.mktemp("process")
        arguments = (function, plan, place / "result", {**os.environ, **(env or {})}, place / "stderr")
        process: BaseProcess
        if new_process:
            process = multiprocessing.get_context("spawn").Process(target=run_engine.become, args=arguments)
            process.start()
        else:
            process = forked(run_engine.become, *arguments)
        try:
            process.join(timeout_s)
        finally:
            process.kill()
            process.join()
        words = (place / "stderr").read_text(errors="replace")
        assert process.exitcode == 0, f"{process.exitcode}: {words[-4000:]}"
        return json.loads((place / "result").read_text())

    return run


@pytest.fixture(scope="session")
def engine(run_apart: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Runs an engine from its start to its end (see run_engine.py); returns what each step gave.

    `path`: the model, by default the one that vllm_cpu builds; others are run in float32, and without a tokenizer.
    `transfer`: fields of KVTransferConfig to replace. `times`: of the engine and its movers. `env`, `new_process`: see
    run_apart.
    """

    def run(
        tiers: dict[str, Any] | None,
        *steps: list[Any],
        env: dict[str, str] | None = None,
        path: Path | None = None,
        transfer: dict[str, Any] | None = None,
        times: Times = PRODUCTION,
        new_process: bool = False,
        **settings: Any,
    ) -> list[Any]:
        if path is not None:
            settings = {"dtype": "float32", "skip_tokenizer_init": True, **settings}
        plan = {
            "model": str(path or vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")),
            "tiers": tiers,
            "transfer": transfer or {},
            "times": msgspec.to_builtins(times),
            "settings": {"max_model_len": 2048, **settings},
            "steps": steps,
        }
        result: list[Any] = run_apart(run_engine.main, plan, env, new_process=new_process)
        return result

    return run


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights whose heads can be split between two ranks."""
    return save_random(
        "LlamaForCausalLM",
        tmp_path_factory.mktemp("models") / "small",
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )


@pytest.fixture(scope="session")
def two_ranks() -> dict[str, Any]:
    """Settings of an engine."""
    cores = vllm_cpu.all_cores()
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    return {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}", "VLLM_CPU_KVCACHE_SPACE": "1"},
    }
