"""What the tests of real engines, and of the vLLM face with threads and processes, share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from nixl_tiers.base.times import PRODUCTION, Times
from tests.support import vllm_cpu
from tests.support.models import save_random
from tests.system.vllm.fork_server import ForkServer
from tests.vllm.conftest import offloading_config, ordinary_logging, weights_folder

__all__ = ["offloading_config", "ordinary_logging", "weights_folder"]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def run_script(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a script of this directory that takes two JSON files, PLAN and RESULT; returns the result.

    `new_process`: not in a fork of the fork server. Raises with the script's last words.
    """
    root = str(Path(__file__).parents[3])

    def run(
        name: str, plan: Any, env: dict[str, str] | None = None, timeout_s: float = 600.0, *, new_process: bool = False
    ) -> Any:
        script, place = Path(__file__).with_name(name), tmp_path_factory.mktemp("script")
        plan_file, result_file, log = place / "plan.json", place / "result.json", place / "stderr"
        plan_file.write_text(json.dumps(plan))
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, **(env or {})}
        arguments = [str(plan_file), str(result_file)]
        if new_process:
            command = [sys.executable, str(script), *arguments]
            with log.open("wb") as stderr:
                status = subprocess.run(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, timeout=timeout_s, check=False
                ).returncode
        else:
            status = fork_server.run(script, arguments, environment, log, timeout_s)
        assert status == 0, f"{status}: {log.read_text(errors='replace')[-4000:]}"
        return json.loads(result_file.read_text())

    return run


@pytest.fixture(scope="session")
def engine(run_script: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Runs an engine from its start to its end (see run_engine.py); returns what each step gave.

    `path`: the model, by default the one that vllm_cpu builds. `transfer`: fields of KVTransferConfig to replace.
    `times`: of the engine and its movers. `env`, `new_process`: see run_script.
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
        model = path or vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
        plan = {
            "model": str(model),
            "tiers": tiers,
            "transfer": transfer or {},
            "times": msgspec.to_builtins(times),
            "settings": {"max_model_len": 2048, **settings},
            "steps": steps,
        }
        result: list[Any] = run_script("run_engine.py", plan, env, new_process=new_process)
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
