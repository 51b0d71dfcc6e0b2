from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")


from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.vllm.replicated import Copies, told
from nixl_tiers.vllm.spec import NixlTiersSpec, refuse_nodes, refuse_spoiled_stores
from tests.support.file_tier import file_tier

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


@pytest.mark.parametrize(("v2", "zeroed"), [(True, True), (True, False), (False, True)])
def test_a_runner_that_may_zero_what_is_to_be_stored_needs_our_connector(v2: bool, zeroed: bool) -> None:
    config, cache = SimpleNamespace(use_v2_model_runner=v2), SimpleNamespace(needs_kv_cache_zeroing=zeroed)
    with pytest.raises(ValueError, match="use kv_connector NixlTiersConnector") if v2 and zeroed else nullcontext():
        refuse_spoiled_stores(config, cache)


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
    asked: list[tuple[int, HugePages]] = []
    monkeypatch.setattr(
        "nixl_tiers.vllm.spec.rendezvous", lambda *_, huge_pages, copies, answer_s: asked.append((copies, huge_pages))
    )
    with told(Copies(replicas, declared=True)):
        spec = NixlTiersSpec(offloading_config({"tiers": [{**CPU, "huge_pages": HugePages.OFF}]}, **other))
    spec._rendezvous()
    assert (spec.geometry.cells, spec.replicated_layout) == (cells, False)
    assert asked == [(other["world_size"] // cells, HugePages.OFF)]
    assert NixlTiersSpec(offloading_config(world_size=8)).geometry.cells == 8, "known to no other spec"


def test_file_tiers_are_divided_by_the_replicas_of_the_node(
    offloading_config: Build, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tiers = [CPU, file_tier(tmp_path / "kv", "1GiB")]

    def parts(config: Any) -> int | None:
        return NixlTiersSpec(config).tiers.replicas

    assert parts(offloading_config({"tiers": tiers})) == 1
    assert parts(offloading_config({"tiers": tiers}, replicas=4)) == 4
    assert parts(offloading_config({"tiers": tiers, "replicas": 2}, index=1)) == 2
    assert not caplog.records
    assert parts(offloading_config({"tiers": tiers}, index=1)) == 1
    assert "set replicas, or each of them takes the cpu tier's whole capacity" in caplog.text
    assert "and only one of them can use tiers[1].path" in caplog.text


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
