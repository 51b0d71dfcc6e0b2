from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    make_offload_key,
)

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config import schema as tiers_config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import RegionError
from nixl_tiers.vllm import compat, fingerprint, replicated
from nixl_tiers.vllm.spec import NixlTiersSpec, agreed_namespace
from tests.vllm.test_layers import LONG, Attention, model, rotary
from tests.vllm.test_spec import CPU, Build


def caches(block_bytes: int = 8192) -> CanonicalKVCaches:
    tensor = torch.arange(4 * block_bytes).to(torch.int8).view(4, block_bytes)
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, block_bytes)], [[CanonicalKVCacheRef(0, block_bytes)]])


@pytest.mark.parametrize("stages", [1, 2])
def test_two_workers_and_a_scheduler_in_one_process(
    stages: int, offloading_config: Build, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Workers first and in any order, as vLLM does it; a chunk goes out through all of them and comes back. Stages of a
    pipeline have other layers."""
    readings: list[int] = []

    def read(*_: object) -> fingerprint.Fingerprint:
        readings.append(1)
        return fingerprint.Fingerprint(b"w" * 16, "")

    monkeypatch.setattr(fingerprint, "model_facts", lambda *_: {"dtype": "bfloat16"})
    monkeypatch.setattr(fingerprint, "weights_of", read)
    monkeypatch.setattr(fingerprint, "refusal", lambda *_: "")
    engine = SimpleNamespace(model_config=SimpleNamespace(served_model_name="served"))
    monkeypatch.setattr(fingerprint, "current_vllm_config", lambda: engine)
    options: dict[str, Any] = {"world_size": 2, "pp_size": stages, "engine_id": f"{request.node.name}-{id(request)}"}
    memory = [caches(), caches()]

    def worker(rank: int) -> Any:
        config = offloading_config(rank=rank, **options)
        (group,) = config.groups
        layers = ("layer.0",) if rank < 2 // stages else ("layer.1",)
        return NixlTiersSpec(replace(config, groups=(replace(group, layer_names=layers),))).get_worker(memory[rank])

    workers = [worker(rank) for rank in (1, 0)][::-1]
    assert len(readings) == 1  # by one of them for all
    with replicated.told(replicated.NONE):
        spec = NixlTiersSpec(offloading_config(**options))
    manager = spec.get_manager()
    assert spec.get_manager() is manager
    assert manager._reports._live._labels == {"model_name": "served", "engine": "0"}, "as in vLLM's own metrics"
    kept = manager._coordinator.prefill.cache
    assert kept.device == compat.device_name(), "the next start knows the speed of prefill"
    key = make_offload_key(b"k" * 32, 0)
    context = ReqContext("r")
    context.set_offload_key_position(key, 32)
    output = manager.prepare_store([key], context)
    for worker in workers:
        worker.submit_store(0, GPULoadStoreSpec([2], [1], [0]), output.store_spec)
        worker.wait({0})
    manager.complete_store({key}, context)
    assert manager.lookup(key, context) is LookupResult.HIT
    loaded = manager.prepare_load([key], context)
    for worker, cache in zip(workers, memory, strict=True):
        before = cache.tensors[0].tensor[2].clone()
        worker.submit_load(1, loaded, GPULoadStoreSpec([0], [1], [0]))
        worker.wait({1})
        assert torch.equal(cache.tensors[0].tensor[0], before)
    manager.shutdown()
    for worker in workers:
        worker.shutdown()


def test_what_the_layers_were_made_with_is_in_the_namespace(
    offloading_config: Build, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """vLLM makes them, and may then shorten the longest context: the configuration is as if they were made for it."""
    parallel = SimpleNamespace(nnodes_within_dp=1, world_size=1)
    engine = SimpleNamespace(
        parallel_config=parallel, compilation_config=SimpleNamespace(static_forward_context={}), model_config=None
    )
    monkeypatch.setattr(fingerprint, "model_facts", lambda *_: {"dtype": "bfloat16"})
    monkeypatch.setattr(fingerprint, "weights_of", lambda *_: fingerprint.Fingerprint(b"w" * 16, ""))
    monkeypatch.setattr(fingerprint, "refusal", lambda *_: "")
    monkeypatch.setattr(fingerprint, "current_vllm_config", lambda: engine)
    config = offloading_config({"tiers": [CPU, {"type": "s3", "bucket": "bucket", "capacity": "1MiB"}]})

    def namespace(number: int, layers: Any) -> bytes:
        named = replace(config, engine_id=f"{request.node.name}-{id(request)}-{number}")
        runner = SimpleNamespace(get_model=lambda: layers, get_draft_model=lambda: None)
        worker = None if layers is None else SimpleNamespace(model_runner=runner)
        monkeypatch.setattr(compat, "calling_worker", lambda: worker)
        spec = NixlTiersSpec(named)
        made = spec.get_worker(caches())
        try:
            with spec._rendezvous() as region:
                return agreed_namespace(region, spec.tiers, 5).digest
        finally:
            made.shutdown()

    long, short, again = (namespace(number, model(Attention(rotary(512 >> number % 2, **LONG)))) for number in range(3))
    assert long != short
    assert again == long
    with pytest.raises(ValueError, match="does not show its worker's layers"):
        namespace(3, None)


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_of_unequal_size_are_refused_in_one_sentence(
    stages: int, offloading_config: Build, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {"world_size": 2, "pp_size": stages, "engine_id": f"{request.node.name}-{id(request)}"}
    region = NixlTiersSpec(offloading_config(**options))._rendezvous()
    with region, pytest.raises(RegionError, match=r"cell_payload is 16384 here and 8192 there") as raised:
        NixlTiersSpec(offloading_config(rank=1, block_bytes=16384, **options))._rendezvous()
    assert ("equally many bytes of KV a block" in str(raised.value)) == (stages > 1)
    assert "\n" not in str(raised.value)


WITH_STORAGE = tiers_config.load({"tiers": [CPU, {"type": "s3", "bucket": "bucket", "capacity": "1MiB"}]})


def agreed(weights: str, layers: str = "", *, stages: int = 1) -> bytes:
    """The namespace of workers with these weights, and with these layers, a letter each."""
    with HostRegion.create(Geometry(len(weights), 4096), 1) as region:
        for rank, letter in enumerate(layers):
            region.ranks.publish_layers(rank, letter.encode() * 16)
        for rank, letter in enumerate(weights):
            region.ranks.publish(rank, letter.encode() * 16)
        return agreed_namespace(region, WITH_STORAGE, 5, stages=stages).digest


def test_stages_are_a_namespace_in_their_order_and_workers_of_one_agree() -> None:
    assert agreed("ab", stages=2) == agreed("ab", stages=2)
    stages = [agreed(weights, stages=2) for weights in ("ab", "ba", "aa", "ac")]
    assert len({*stages, agreed("aa")}) == 5
    with pytest.raises(ValueError, match="do not run the same model"):
        agreed("aabc", stages=2)
    agreed("aabb", stages=2)


def test_ranks_whose_layers_differ_are_a_namespace_of_their_own() -> None:
    alike = agreed("a", "a")
    assert agreed("aa", "aa") == agreed("aaaa", "aaaa") == alike, "at every tensor-parallel size"
    others = [agreed("a", "b"), agreed("aa", "ab"), agreed("aa", "ba"), agreed("aa", "ab", stages=2)]
    others += [agreed("aaa", "aba"), agreed("aaa", "abb")]
    assert len({alike, *others}) == 7


def test_a_missing_worker_is_named_and_a_note_refuses_storage(caplog: pytest.LogCaptureFixture) -> None:
    """And only warns without."""
    sentence = "storage tiers are refused unless model_id is set, because the weights are random"
    with HostRegion.create(Geometry(2, 4096), 1) as region:
        region.ranks.publish(0, b"a" * 16, sentence)
        with pytest.raises(ValueError, match=r"workers \[1\] did not join"):
            agreed_namespace(region, WITH_STORAGE, 0.05)
        region.ranks.publish(1, b"a" * 16, sentence)
        with pytest.raises(ValueError, match=sentence):
            agreed_namespace(region, WITH_STORAGE, 5)
        caplog.clear()
        agreed_namespace(region, tiers_config.load({"tiers": [CPU]}), 5)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert sentence in caplog.text
