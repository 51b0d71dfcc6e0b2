"""Chunks of about 64 tokens, where they were not configured and a model allows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1 import kv_cache_interface as interface

from nixl_tiers.vllm.chunk_size import default_blocks, with_chunks

HEAD = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}


def full(block: int) -> Any:
    return interface.FullAttentionSpec(block_size=block, **HEAD)


def latent(block: int) -> Any:
    return interface.MLAAttentionSpec(block_size=block, **HEAD)


def windowed(block: int) -> Any:
    return interface.SlidingWindowSpec(block_size=block, sliding_window=128, **HEAD)


def state(block: int) -> Any:
    return interface.MambaSpec(block_size=block, shapes=((16,),), dtypes=(torch.float32,))


def uniform(*specs: Any) -> Any:
    """As a worker has a group whose layers differ; the scheduler has the spec of one of them."""
    by_layer = {f"layer.{number}": spec for number, spec in enumerate(specs)}
    return interface.UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=by_layer)


def caches(*specs: Any) -> Any:
    groups = [interface.KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return interface.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def engine(extra: dict[str, Any] | None = None, *, interval: int | None = 0, **parallel: int) -> Any:
    sizes = {"decode_context": 1, "prefill_context": 1, **parallel}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {}),
        cache_config=SimpleNamespace(prefix_cache_retention_interval=interval),
        parallel_config=SimpleNamespace(**{f"{name}_parallel_size": size for name, size in sizes.items()}),
    )


WIDER = interface.FullAttentionSpec(block_size=16, **HEAD | {"head_size": 128})


@pytest.mark.parametrize(
    ("specs", "blocks"),
    [
        *([[kind(block)], blocks] for kind in (full, latent) for block, blocks in ((8, 8), (16, 4), (48, 1), (128, 1))),
        ([uniform(full(16), WIDER)], 4),  # a worker has the specs of all layers, the scheduler that of one
        ([windowed(16)], 1),
        ([state(16)], 1),
        ([full(16), windowed(16)], 1),
        ([full(16), full(16)], 1),
        ([uniform(windowed(16), windowed(16))], 1),
        ([uniform(full(16), windowed(16))], 1),
        ([], 1),
    ],
)
def test_a_chunk_of_one_group_of_full_attention_has_as_many_blocks_as_fit_into_64_tokens(
    specs: list[Any], blocks: int
) -> None:
    assert default_blocks(engine(), caches(*specs)) == blocks


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"decode_context": 2}, 1),
        ({"prefill_context": 2}, 1),
        *(({"interval": interval}, blocks) for interval, blocks in ((None, 4), (0, 4), (640, 4), (96, 1), (48, 1))),
    ],
)
def test_ranks_that_share_the_context_and_a_retention_interval_want_whole_chunks(
    options: dict[str, Any], blocks: int
) -> None:
    assert default_blocks(engine(**options), caches(full(16))) == blocks


@pytest.mark.parametrize("extra", [{}, {"blocks_per_chunk": 1}, {"blocks_per_chunk": 3}, {"block_size": 16}])
def test_what_is_configured_wins_and_stays_as_it_is_written(extra: dict[str, Any]) -> None:
    written = engine(dict(extra))
    mine = with_chunks(written, caches(full(16)))
    assert mine.kv_transfer_config.kv_connector_extra_config == (extra or {"blocks_per_chunk": 4})
    assert written.kv_transfer_config.kv_connector_extra_config == extra
    assert (mine is written) is bool(extra)
