from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
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

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.base.policies import HugePages
from nixl_tiers.config import schema as tiers_config
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import RegionError
from nixl_tiers.vllm import compat, fingerprint
from nixl_tiers.vllm.replicated import Copies, told
from nixl_tiers.vllm.spec import NixlTiersSpec, agreed_namespace, description_of, refuse_nodes
from tests.support.file_tier import file_tier
from tests.support.times import PATIENT

CPU = {"type": "cpu", "capacity": "1MiB"}
Build = Callable[..., Any]


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({}, "tiers: this field is missing"),
        ({"tiers": []}, 'tiers: the first tier must be the "cpu" tier'),
        ({"tiers": [{"type": "cpu", "capacity": "1MiB", "capasity": 1}]}, r"tiers\[0\].capasity: unknown field"),
        ({"tiers": [CPU], "cpu_bytes_to_use": 1 << 30}, "cpu_bytes_to_use: unknown field"),
        ({"tiers": [{"type": "cpu", "capacity": "1KiB"}]}, r"tiers\[0\].capacity: 1 KiB does not hold one chunk"),
        (
            {"tiers": [CPU, file_tier("/proc/no/such", "1MiB")]},
            r"tiers\[1\].path: cannot write to /proc/no/such",
        ),
        (
            {"tiers": [CPU, {"type": "s3", "bucket": "bucket", "capacity": "4KiB"}]},
            r"tiers\[1\].capacity: 4 KiB does not hold one chunk",
        ),
        (
            {"tiers": [CPU, {"type": "s3", "bucket": "bucket", "capacity": "1MiB", "secret_key": "hunter2"}]},
            "a secret must not be in the configuration",
        ),
    ],
)
def test_a_bad_configuration_is_one_sentence(offloading_config: Build, extra: dict[str, Any], sentence: str) -> None:
    threads = threading.active_count()
    with pytest.raises(ValueError, match=sentence) as raised:
        NixlTiersSpec(offloading_config(extra))
    assert "\n" not in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert threading.active_count() <= threads  # one of another test's may just have ended


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"canonical_layout": True}, "remove canonical_layout"),
        ({"block_bytes": 0}, "does not report how many KV bytes"),
        ({"replicas": 256}, "shared by 256 data-parallel replicas does not hold one chunk each"),
    ],
)
def test_unsupported_parallelism_and_layouts_are_refused(
    offloading_config: Build, other: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        NixlTiersSpec(offloading_config(**other))


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        ({"nnodes_within_dp": 2}, "needs all workers of an engine on one node, and this engine has 2 nodes"),
        ({"world_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher and 2 ranks, bec"),
        ({"world_size": 1, "distributed_executor_backend": "external_launcher"}, None),
        ({"world_size": 2, "distributed_executor_backend": "mp"}, None),
    ],
)
def test_workers_that_cannot_share_a_region_are_refused(parallel: dict[str, Any], sentence: str | None) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel))
    with nullcontext() if sentence is None else pytest.raises(ValueError, match=sentence):
        refuse_nodes(config)


def test_the_cpu_tiers_capacity_is_divided_by_the_replicas_of_the_node(
    offloading_config: Build, caplog: pytest.LogCaptureFixture
) -> None:
    whole = NixlTiersSpec(offloading_config()).rows
    assert NixlTiersSpec(offloading_config(replicas=4)).rows == whole // 4
    # vLLM counts the replicas of all nodes, and those of a model without experts not at all.
    shared = {"tiers": [CPU], "replicas": 2}
    assert NixlTiersSpec(offloading_config(shared, replicas=4)).rows == whole // 2
    assert not caplog.records
    assert NixlTiersSpec(offloading_config(index=3)).rows == whole
    assert "data-parallel replica 3, and vLLM does not say how many share this node: set replicas" in caplog.text
    caplog.clear()
    assert NixlTiersSpec(offloading_config(shared, index=3)).rows == whole // 2
    assert not caplog.records


@pytest.mark.parametrize("pages", HugePages)
def test_region_is_made_with_the_pages_that_are_configured(
    pages: HugePages, offloading_config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[HugePages] = []
    monkeypatch.setattr(
        "nixl_tiers.vllm.spec.rendezvous", lambda *_, huge_pages, copies, answer_s: asked.append(huge_pages)
    )
    NixlTiersSpec(offloading_config({"tiers": [{**CPU, "huge_pages": pages}]}))._rendezvous()
    NixlTiersSpec(offloading_config({"tiers": [CPU]}))._rendezvous()
    assert asked == [pages, HugePages.AUTO]


@pytest.mark.parametrize(
    ("other", "replicas", "cells"),
    [
        ({"world_size": 8}, 1, 8),
        ({"world_size": 8, "replicated_layout": True}, 1, 1),
        ({"world_size": 8}, 8, 1),
        ({"world_size": 8}, 2, 4),
        ({"world_size": 8, "replicated_layout": True}, 8, 1),
        ({"world_size": 8}, 3, 8),
        ({"world_size": 8, "dcp_size": 2}, 4, 8),
        ({"world_size": 1}, 1, 1),
    ],
)
def test_ranks_that_hold_the_same_bytes_share_a_cell(
    offloading_config: Build, other: dict[str, Any], replicas: int, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would have rank 0 do all stores if the spec said that its layout is replicated."""
    asked: list[int] = []
    monkeypatch.setattr(
        "nixl_tiers.vllm.spec.rendezvous", lambda *_, huge_pages, copies, answer_s: asked.append(copies)
    )
    with told(Copies(replicas, declared=True)):
        spec = NixlTiersSpec(offloading_config(**other))
    spec._rendezvous()
    assert (spec.geometry.cells, spec.replicated_layout) == (cells, False)
    assert asked == [other["world_size"] // cells]
    assert NixlTiersSpec(offloading_config(world_size=8)).geometry.cells == 8, "known to no other spec"


def test_file_tiers_are_divided_by_the_replicas_of_the_node(
    offloading_config: Build, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tiers = [CPU, file_tier(tmp_path / "kv", "1GiB")]

    def parts(config: Any) -> object:
        return getattr(NixlTiersSpec(config).tiers.storage[0], "replicas", None)

    assert parts(offloading_config({"tiers": tiers})) == 1
    assert parts(offloading_config({"tiers": tiers}, replicas=4)) == 4
    assert parts(offloading_config({"tiers": tiers, "replicas": 2}, index=1)) == 2
    assert not caplog.records
    assert parts(offloading_config({"tiers": tiers}, index=1)) == 1
    assert "set replicas, or each of them takes the cpu tier's whole capacity" in caplog.text
    assert "and only one of them can use tiers[1].path" in caplog.text


def s3_places(spec: NixlTiersSpec) -> list[tuple[str, int]]:
    return [(tier.prefix, tier.capacity) for tier in spec.tiers.storage if isinstance(tier, S3Config)]


def test_data_parallel_engines_have_prefixes_of_their_own(
    offloading_config: Build, caplog: pytest.LogCaptureFixture
) -> None:
    private = {"type": "s3", "bucket": "kv-cache", "prefix": "kv", "capacity": "80MiB"}
    others = [private | {"prefix": "all", "shared": True}, private | {"prefix": "seen", "write": "off"}]
    tiers = {"tiers": [CPU, private, *others]}
    kept = [("all", 80 << 20), ("seen", 80 << 20)]
    assert s3_places(NixlTiersSpec(offloading_config(tiers))) == [("kv", 80 << 20), *kept]
    assert s3_places(NixlTiersSpec(offloading_config(tiers, replicas=4, index=3))) == [("kv/3", 20 << 20), *kept]
    known = tiers | {"replicas": 2}
    assert s3_places(NixlTiersSpec(offloading_config(known))) == [("kv/0", 40 << 20), *kept]
    assert s3_places(NixlTiersSpec(offloading_config(known, index=1))) == [("kv/1", 40 << 20), *kept]
    assert s3_places(NixlTiersSpec(offloading_config(known, index=3))) == [("kv/1", 40 << 20), *kept]  # of node 2
    assert "only one of them stores" not in caplog.text
    assert s3_places(NixlTiersSpec(offloading_config(tiers, index=1))) == [("kv", 80 << 20), *kept]
    assert "set replicas, or shared: true, or only one of them stores below s3://kv-cache/kv at AWS" in caplog.text


def test_vllms_own_fields_are_ignored(offloading_config: Build) -> None:
    extra = {
        "spec_name": "NixlTiersSpec",
        "spec_module_path": "nixl_tiers.vllm.spec",
        "blocks_per_chunk": 2,
        "offload_prompt_only": False,
        "self_describing_kv_events": True,
        "tiers": [CPU],
    }
    spec = NixlTiersSpec(offloading_config(extra, blocks_per_chunk=2, world_size=2, groups=2))
    assert spec.geometry == Geometry(cells=2, cell_payload=16384, sub_blocks=2)
    assert spec.rows == (1 << 20) // spec.geometry.row_bytes
    assert spec.offload_prompt_only is False


def test_the_configuration_may_be_a_file(offloading_config: Build, tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text("tiers: [{type: cpu, capacity: 2MiB}]\n")
    spec = NixlTiersSpec(offloading_config({"config": str(file), "spec_name": "NixlTiersSpec"}))
    assert spec.tiers.cpu.capacity == 2 << 20


def test_log_lines_go_where_vllms_go(offloading_config: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where vLLM configures its logger only later."""
    ours, theirs = logging.getLogger("nixl_tiers.runtime.coordinator"), logging.getLogger("vllm")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("theirs: %(levelname)s %(message)s"))
    monkeypatch.setattr(theirs, "handlers", [handler])
    before = theirs.level
    try:
        theirs.setLevel(logging.INFO)
        ours.info("before there is a spec")
        NixlTiersSpec(offloading_config({"tiers": [CPU]}))
        ours.info("shown")
        theirs.setLevel(logging.WARNING)
        ours.info("not wanted")
    finally:
        theirs.setLevel(before)
    assert stream.getvalue() == "theirs: INFO shown\n"


def test_a_logger_configured_by_the_user_is_left_alone(
    offloading_config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = logging.getLogger("nixl_tiers")
    monkeypatch.setattr(ours, "handlers", [logging.NullHandler()])
    NixlTiersSpec(offloading_config({"tiers": [CPU]}))
    assert ours.parent is logging.root


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
    spec = NixlTiersSpec(offloading_config(**options))
    manager = spec.get_manager()
    assert spec.get_manager() is manager
    assert manager._reports._live._labels == {"model_name": "served", "engine": "0"}, "as in vLLM's own metrics"
    kept = manager._coordinator.prefill.cache
    assert kept.device == compat.device_name(), "the next start knows the speed of prefill"
    key = make_offload_key(b"k" * 32, 0)
    context = ReqContext("r")
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


@pytest.mark.parametrize(("replicas", "pauses"), [(1, True), (2, False)])
def test_an_engine_that_steps_with_others_never_waits_in_a_step(
    replicas: int, pauses: bool, offloading_config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = HostRegion.create(Geometry(cells=1, cell_payload=8192), 4)
    monkeypatch.setattr(NixlTiersSpec, "_rendezvous", lambda _: region)
    monkeypatch.setattr("nixl_tiers.vllm.spec.agreed_namespace", lambda *_, stages: Namespace.of({"test": 1}))
    monkeypatch.setattr(NixlTiersSpec, "times", PATIENT)
    manager = NixlTiersSpec(offloading_config(replicas=replicas)).get_manager()
    assert bool(manager._pause.pause_s) is pauses
    assert manager._coordinator.times == PATIENT
    manager.shutdown()


class TestAgreement:
    tiers = tiers_config.load({"tiers": [CPU]})
    with_storage = tiers_config.load({"tiers": [CPU, {"type": "s3", "bucket": "bucket", "capacity": "1MiB"}]})

    @pytest.fixture
    def region(self) -> Any:
        with HostRegion.create(Geometry(2, 4096), 1) as region:
            yield region

    def test_equal_fingerprints_are_a_namespace(self, region: HostRegion) -> None:
        region.ranks.publish(0, b"a" * 16)
        region.ranks.publish(1, b"a" * 16)
        namespace = agreed_namespace(region, self.with_storage, 5)
        region.ranks.publish(0, b"b" * 16)
        region.ranks.publish(1, b"b" * 16)
        assert agreed_namespace(region, self.with_storage, 5).digest != namespace.digest

    def test_different_fingerprints_are_refused(self, region: HostRegion) -> None:
        region.ranks.publish(0, b"a" * 16)
        region.ranks.publish(1, b"b" * 16)
        with pytest.raises(ValueError, match="do not run the same model"):
            agreed_namespace(region, self.tiers, 5)

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


def test_manifests_describe_the_model_and_its_chunks(offloading_config: Build) -> None:
    config = offloading_config(blocks_per_chunk=4)
    described = description_of(config, "0123abcd")
    assert (described.model, described.revision) == (config.model.name, "0123abcd")
    assert (described.dtype, described.chunk_tokens) == (config.model.dtype, 128)
    assert described.vllm


def test_revision_for_people_is_the_commit_else_what_was_asked_for() -> None:
    model = SimpleNamespace(
        served_model_name="served", revision="main", hf_config=SimpleNamespace(_commit_hash="0123abcd")
    )
    assert fingerprint.names_of(SimpleNamespace(model_config=model)) == ("served", "0123abcd")
    model.hf_config._commit_hash = None
    assert fingerprint.names_of(SimpleNamespace(model_config=model)) == ("served", "main")
    assert fingerprint.names_of(None) == ("", "")
