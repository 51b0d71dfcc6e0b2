"""What the tests of the vLLM face share. Where vLLM is not installed they are skipped as a whole."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.support import vllm_cpu
from tests.support.models import save_random
from tests.vllm.fork_server import ForkServer


@pytest.fixture(autouse=True)
def ordinary_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec hands our log lines to vLLM's logger. Here pytest is to see them, and other tests theirs afterwards."""
    monkeypatch.setattr(logging.getLogger("nixl_tiers"), "parent", logging.root)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


@pytest.fixture
def offloading_config() -> Callable[..., Any]:
    """Builds vLLM's OffloadingConfig: one group of 32-token blocks with 8 KiB each, by default."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    def build(
        extra: dict[str, Any] | None = None,
        *,
        world_size: int = 1,
        rank: int = 0,
        pp_size: int = 1,
        dcp_size: int = 1,
        replicas: int = 1,
        index: int = 0,
        groups: int = 1,
        blocks_per_chunk: int = 1,
        block_bytes: int = 8192,
        events: bool = False,
        engine_id: str = "engine",
        **other: Any,
    ) -> OffloadingConfig:
        return OffloadingConfig(
            groups=tuple(OffloadingGroupConfig(32, (f"layer.{group}",), group) for group in range(groups)),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=events,
            extra_config=extra if extra is not None else {"tiers": [{"type": "cpu", "capacity": "1MiB"}]},
            engine_id=engine_id,
            model=OffloadingModelConfig("model", "bfloat16"),
            cache=OffloadingCacheConfig(32, blocks_per_chunk),
            parallel=OffloadingParallelConfig(
                rank, world_size, world_size // pp_size, pp_size, 1, dcp_size, index, replicas, None, False
            ),
            **other,
        )

    return build


@pytest.fixture
def weights_folder(tmp_path: Path) -> Path:
    """A directory like a model's: config.json and two weight files."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    values = np.random.default_rng(1).integers(0, 256, (2, 3 << 20), dtype=np.uint8)
    for number, value in enumerate(values):
        save_file({"w": torch.from_numpy(value)}, folder / f"model-{number}.safetensors")
    return folder


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def run_script(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a script of this directory that takes two JSON files, PLAN and RESULT; returns the result.

    `new_process`: not in a fork of the fork server. Raises with the script's last words.
    """
    root = str(Path(__file__).parents[2])

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
    `env`, `new_process`: see run_script.
    """

    def run(
        tiers: dict[str, Any] | None,
        *steps: list[Any],
        env: dict[str, str] | None = None,
        path: Path | None = None,
        transfer: dict[str, Any] | None = None,
        new_process: bool = False,
        **settings: Any,
    ) -> list[Any]:
        model = path or vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
        plan = {
            "model": str(model),
            "tiers": tiers,
            "transfer": transfer or {},
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
