"""Ranks that hold the same KV bytes share a cell, and others never do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers import linear

from nixl_tiers.memory.rendezvous import OtherSizes
from nixl_tiers.vllm.replicated import Copies, confirmed, copies_by_configuration
from nixl_tiers.vllm.spec import NixlTiersSpec

HEADS = "heads"  # whose number the configuration says
LATENT = "latent"
STATE = "state"


def specs(*kinds: str, ranks: int, heads: int) -> list[Any]:
    of = {
        HEADS: SimpleNamespace(num_kv_heads=max(1, heads // ranks), max_tp_shards=None),
        LATENT: SimpleNamespace(num_kv_heads=1, max_tp_shards=1),
        STATE: SimpleNamespace(),
    }
    return [of[kind] for kind in kinds]


def engine(layer_specs: list[Any], ranks: int, heads: int, replicas: int = 1) -> tuple[Any, Any]:
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )
    first, *others = layer_specs
    uniform = SimpleNamespace(kv_cache_specs={str(number): spec for number, spec in enumerate(others)})
    groups = [SimpleNamespace(kv_cache_spec=first), *([SimpleNamespace(kv_cache_spec=uniform)] if others else [])]
    return vllm_config, SimpleNamespace(kv_cache_groups=groups, kv_tp_replicas=replicas)


@pytest.mark.parametrize(
    ("kinds", "ranks", "heads", "replicas", "copies"),
    [
        ((HEADS,), 8, 4, 1, Copies(2, declared=False)),
        ((HEADS, HEADS), 8, 1, 1, Copies(8, declared=False)),
        ((HEADS,), 8, 8, 1, Copies(1, declared=True)),
        ((HEADS,), 2, 8, 1, Copies(1, declared=True)),
        ((HEADS,), 1, 8, 1, Copies(1, declared=True)),
        ((HEADS,), 8, 3, 1, Copies(1, declared=True)),
        ((HEADS, STATE), 8, 4, 1, Copies(1, declared=True)),
        ((LATENT,), 8, 1, 8, Copies(8, declared=True)),
        ((LATENT, HEADS), 8, 4, 1, Copies(2, declared=False)),
        ((HEADS,), 8, 4, 2, Copies(2, declared=True)),
    ],
)
def test_the_configuration_says_how_many_ranks_hold_a_head(
    kinds: tuple[str, ...], ranks: int, heads: int, replicas: int, copies: Copies
) -> None:
    layer_specs = specs(*kinds, ranks=ranks, heads=heads)
    assert copies_by_configuration(*engine(layer_specs, ranks, heads, replicas)) == copies


def test_a_layer_with_more_heads_on_a_rank_than_the_configuration_says_has_no_copies() -> None:
    of_another = SimpleNamespace(num_kv_heads=2, max_tp_shards=None)
    several = [*specs(HEADS, ranks=8, heads=4), of_another]
    assert copies_by_configuration(*engine(several, 8, 4)) == Copies(1, declared=True)


class Projection(torch.nn.Module):
    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.num_kv_head_replicas = replicas


class Attention(torch.nn.Module):
    def __init__(self, *projections: torch.nn.Module) -> None:
        super().__init__()
        self.attn = torch.nn.Identity()
        self.projections = list(projections)
        for number, projection in enumerate(projections):
            self.add_module(f"projection{number}", projection)


def worker_of(*layers: Attention, draft: Attention | None = None) -> tuple[Any, dict[str, torch.nn.Module]]:
    model = torch.nn.Sequential(*layers)
    runner = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: draft)
    named = {f"layers.{number}.attn": layer.attn for number, layer in enumerate((*layers, *([draft] if draft else [])))}
    return SimpleNamespace(model_runner=runner), named


@pytest.fixture(autouse=True)
def projection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "QKVParallelLinear", Projection)


@pytest.mark.parametrize(
    ("layers", "draft", "found"),
    [
        ([Attention(Projection(2))], None, True),
        ([Attention(Projection(2)), Attention(Projection(4))], Attention(Projection(2)), True),
        ([Attention(Projection(2)), Attention(Projection(1))], None, False),
        ([Attention(Projection(2))], Attention(Projection(1)), False),
        ([Attention(torch.nn.Identity())], None, False),
        ([Attention(Projection(2), Projection(2))], None, False),
    ],
)
def test_layers_confirm_that_their_heads_are_replicated(
    layers: list[Attention], draft: Attention | None, found: bool
) -> None:
    worker, named = worker_of(*layers, draft=draft)
    assert confirmed(worker, named, set(named), 2) is found
    assert not confirmed(worker, named, {*named, "layers.9.attn"}, 2), "a layer that is not there confirms nothing"
    assert not confirmed(None, named, set(named), 2)


def test_vllm_has_this_projection() -> None:
    from inspect import getsource

    import vllm.model_executor.layers.linear as real

    assert "self.num_kv_head_replicas" in getsource(real)


def test_a_region_of_other_sizes_is_refused_where_vllm_declares_the_copies(
    offloading_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(*_: object, **__: object) -> Any:
        raise OtherSizes("other sizes")

    monkeypatch.setattr("nixl_tiers.vllm.spec.rendezvous", meet)
    with pytest.raises(OtherSizes):
        NixlTiersSpec(offloading_config(world_size=8, replicated_layout=True)).get_manager()
