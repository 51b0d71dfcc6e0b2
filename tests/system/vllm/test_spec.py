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
    options: dict[str, Any] = {
        "world_size": 2,
        "pp_size": stages,
        "engine_id": f"{request.node.name}-{id(request)}",
    }
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


class TestAgreement:
    tiers = tiers_config.load({"tiers": [CPU]})
    with_storage = tiers_config.load({"tiers": [CPU, {"type": "s3", "bucket": "bucket", "capacity": "1MiB"}]})

    @pytest.fixture
    def region(self) -> Any:
        with HostRegion.create(Geometry(2, 4096), 1) as region:
            yield region

    def test_stages_of_a_pipeline_are_a_namespace_in_their_order(self, region: HostRegion) -> None:
        def namespace(first: bytes, second: bytes, stages: int = 2) -> bytes:
            region.ranks.publish(0, first * 16)
            region.ranks.publish(1, second * 16)
            return agreed_namespace(region, self.with_storage, 5, stages=stages).digest

        both, turned, alike = namespace(b"a", b"b"), namespace(b"b", b"a"), namespace(b"a", b"a")
        assert len({both, turned, alike, namespace(b"a", b"a", stages=1), namespace(b"a", b"c")}) == 5
        assert namespace(b"a", b"b") == both

    def test_workers_of_a_stage_agree(self) -> None:
        with HostRegion.create(Geometry(4, 4096), 1) as region:
            for rank, digest in enumerate((b"a", b"a", b"b", b"c")):
                region.ranks.publish(rank, digest * 16)
            with pytest.raises(ValueError, match="do not run the same model"):
                agreed_namespace(region, self.tiers, 5, stages=2)
            region.ranks.publish(3, b"b" * 16)
            agreed_namespace(region, self.tiers, 5, stages=2)

    def test_ranks_whose_layers_differ_are_a_namespace_of_their_own(self) -> None:
        def namespace(*layers: bytes, stages: int = 1) -> bytes:
            with HostRegion.create(Geometry(len(layers), 4096), 1) as region:
                for rank, layer in enumerate(layers):
                    region.ranks.publish_layers(rank, layer * 16)
                    region.ranks.publish(rank, b"a" * 16)
                return agreed_namespace(region, self.with_storage, 5, stages=stages).digest

        alike = namespace(b"a")
        assert namespace(b"a", b"a") == namespace(b"a", b"a", b"a", b"a") == alike, "at every tensor-parallel size"
        others = [namespace(b"b"), namespace(b"a", b"b"), namespace(b"b", b"a"), namespace(b"a", b"b", stages=2)]
        others += [namespace(b"a", b"b", b"a"), namespace(b"a", b"b", b"b")]
        assert len({alike, *others}) == 7

    def test_a_missing_worker_is_named(self, region: HostRegion) -> None:
        region.ranks.publish(0, b"a" * 16)
        with pytest.raises(ValueError, match=r"workers \[1\] did not join"):
            agreed_namespace(region, self.tiers, 0.05)

    def test_a_note_refuses_storage_and_only_warns_without(
        self, region: HostRegion, caplog: pytest.LogCaptureFixture
    ) -> None:
        sentence = "storage tiers are refused unless model_id is set, because the weights are random"
        region.ranks.publish(0, b"a" * 16, sentence)
        region.ranks.publish(1, b"a" * 16, sentence)
        with pytest.raises(ValueError, match="storage tiers are refused unless model_id is set"):
            agreed_namespace(region, self.with_storage, 5)
        caplog.clear()
        agreed_namespace(region, self.tiers, 5)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert sentence in caplog.text
