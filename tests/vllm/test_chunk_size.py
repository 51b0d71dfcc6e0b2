"""Chunks of about 64 tokens, where they were not configured and a model allows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1 import kv_cache_interface as interface

from nixl_tiers.vllm.chunk_size import default_blocks, with_chunks
from nixl_tiers.vllm.connector import NixlTiersConnector
from nixl_tiers.vllm.replicated import copies_of
from nixl_tiers.vllm.spec import geometry_of

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
    sizes = dict.fromkeys(("decode_context", "prefill_context", "tensor", "pipeline", "data"), 1) | parallel
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"spec_name": "NixlTiersSpec", **(extra or {})},
            engine_id="engine",
            kv_load_failure_policy="recompute",
        ),
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=interval,
            block_size=16,
            mamba_cache_mode="none",
            enable_prefix_caching=True,
            cache_dtype="auto",
            kv_cache_layout=None,
            prefix_match_unit=None,
        ),
        parallel_config=SimpleNamespace(
            **{f"{name}_parallel_size": size for name, size in sizes.items()},
            world_size=sizes["tensor"],
            rank=0,
            distributed_executor_backend="mp",
            nnodes_within_dp=1,
            data_parallel_index=0,
            data_parallel_rank_local=None,
        ),
        model_config=SimpleNamespace(
            model="m",
            dtype=torch.bfloat16,
            max_model_len=1024,
            use_mla=sizes["tensor"] > 1,
            get_total_num_kv_heads=lambda: 1,
        ),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        kv_events_config=None,
        use_v2_model_runner=False,
    )


@pytest.mark.parametrize(("block", "blocks"), [(8, 8), (16, 4), (32, 2), (48, 1), (64, 1), (128, 1)])
@pytest.mark.parametrize("kind", [full, latent])
def test_a_chunk_has_as_many_blocks_as_fit_into_64_tokens(kind: Any, block: int, blocks: int) -> None:
    assert default_blocks(engine(), caches(kind(block))) == blocks


@pytest.mark.parametrize(
    "specs",
    [
        [windowed(16)],
        [state(16)],
        [full(16), windowed(16)],
        [full(16), full(16)],
        [full(16), state(16)],
        [uniform(windowed(16), windowed(16))],
        [uniform(full(16), windowed(16))],
        [],
    ],
    ids=["window", "state", "full, window", "two", "full, state", "windows", "mixed", "none"],
)
def test_models_with_windows_states_or_several_groups_have_chunks_of_a_block(specs: list[Any]) -> None:
    assert default_blocks(engine(), caches(*specs)) == 1


def test_workers_and_scheduler_come_to_the_same() -> None:
    """They have the specs of all layers of a group, or of one of them."""
    wider = interface.FullAttentionSpec(block_size=16, **HEAD | {"head_size": 128})
    assert default_blocks(engine(), caches(uniform(full(16), wider))) == default_blocks(engine(), caches(full(16))) == 4


@pytest.mark.parametrize("parallel", [{"decode_context": 2}, {"prefill_context": 2}])
def test_ranks_that_share_the_context_have_chunks_of_a_block(parallel: dict[str, int]) -> None:
    assert default_blocks(engine(**parallel), caches(full(16))) == 1


@pytest.mark.parametrize(("interval", "blocks"), [(None, 4), (0, 4), (64, 4), (640, 4), (96, 1), (48, 1)])
def test_a_retention_interval_has_whole_chunks(interval: int | None, blocks: int) -> None:
    assert default_blocks(engine(interval=interval), caches(full(16))) == blocks


@pytest.mark.parametrize(
    ("extra", "blocks"),
    [
        ({}, 4),
        ({"blocks_per_chunk": 1}, 1),
        ({"blocks_per_chunk": 3}, 3),
        ({"block_size": 128}, 8),
        ({"block_size": 16}, 1),
    ],
)
def test_what_is_configured_wins_and_stays_as_it_is_written(extra: dict[str, Any], blocks: int) -> None:
    written, layers = engine(extra), caches(full(16))
    mine = with_chunks(written, layers)
    assert build_offloading_config(mine, layers).cache.blocks_per_chunk == blocks
    assert written.kv_transfer_config.kv_connector_extra_config == {"spec_name": "NixlTiersSpec", **extra}
    assert (mine is written) is bool(extra)
    assert (mine.parallel_config, mine.kv_transfer_config.engine_id) == (written.parallel_config, "engine")


def test_ranks_with_the_same_latents_share_one_cell_of_larger_chunks() -> None:
    layers = caches(latent(16))
    layers.kv_tp_replicas = 2
    config = build_offloading_config(with_chunks(engine(tensor=2), layers), layers)
    assert config.replicated_layout
    block_bytes = config.worker_kv_bytes_per_block
    geometry = geometry_of(config, copies_of(config).ranks)
    assert (geometry.cells, geometry.cell_payload, geometry.sub_blocks) == (1, 4 * block_bytes, 4)


def test_the_connector_hands_it_to_vllm_before_the_configuration_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def init(self: Any, config: Any, role: Any, layers: Any) -> None:
        built.append(build_offloading_config(config, layers))
        vars(self).update(connector_scheduler=None, connector_worker=object(), _bounding_group_ids=())

    monkeypatch.setattr("nixl_tiers.vllm.connector.OffloadingConnector.__init__", init)
    NixlTiersConnector(engine(), None, caches(full(16)))  # type: ignore[arg-type]
    assert built[0].cache.blocks_per_chunk == 4
