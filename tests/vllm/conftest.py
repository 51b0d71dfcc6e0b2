"""What the tests of the vLLM face share. Where vLLM is not installed they are skipped as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.support.by_hand import HandPool


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
        dtype: str = "bfloat16",
        hash_tokens: int = 32,
        pcp_size: int = 1,
        **other: Any,
    ) -> OffloadingConfig:
        return OffloadingConfig(
            groups=tuple(OffloadingGroupConfig(32, (f"layer.{group}",), group) for group in range(groups)),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=events,
            extra_config=extra if extra is not None else {"tiers": [{"type": "cpu", "capacity": "1MiB"}]},
            engine_id=engine_id,
            model=OffloadingModelConfig("model", dtype),
            cache=OffloadingCacheConfig(hash_tokens, blocks_per_chunk),
            parallel=OffloadingParallelConfig(
                rank, world_size, world_size // pp_size, pp_size, pcp_size, dcp_size, index, replicas, None, False
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


@pytest.fixture(autouse=True)
def weights_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By no threads."""
    monkeypatch.setattr("nixl_tiers.vllm.weights.ThreadPoolExecutor", lambda **_: HandPool(at_once=True))
