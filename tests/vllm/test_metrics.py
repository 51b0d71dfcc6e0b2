from __future__ import annotations

from dataclasses import fields

import pytest

pytest.importorskip("vllm")

from nixl_tiers.cascade.counters import Counters
from nixl_tiers.vllm.metrics import COUNTERS, GAUGES, PREFIX, Reporter, definitions


def values(stats: object) -> dict[str, dict[tuple[str, ...], float]]:
    return stats.data["data"]  # type: ignore[attr-defined]


def test_counters_are_reported_as_differences_and_gauges_as_levels() -> None:
    reporter = Reporter()
    first = reporter.report({"file": {"hits": 3, "used_bytes": 100}, "cpu": {"hits": 1}})
    assert values(first) == {
        "nixl_tiers:hits": {("file",): 3, ("cpu",): 1},
        "nixl_tiers:used_bytes": {("file",): 100},
    }
    second = reporter.report({"file": {"hits": 5, "used_bytes": 60}, "cpu": {"hits": 1}})
    assert values(second) == {"nixl_tiers:hits": {("file",): 2}, "nixl_tiers:used_bytes": {("file",): 60}}
    assert reporter.report({"file": {"hits": 5, "used_bytes": 60}, "cpu": {"hits": 1}}) is None


def test_a_series_exists_from_the_start_at_zero() -> None:
    assert values(Reporter().report({"s3": {"corrupt": 0, "up": 0}})) == {
        "nixl_tiers:corrupt": {("s3",): 0},
        "nixl_tiers:up": {("s3",): 0},
    }


def test_every_counter_of_a_tier_is_declared() -> None:
    assert set(COUNTERS) == {field.name for field in fields(Counters)}


def test_undeclared_counters_are_not_reported() -> None:
    assert Reporter().report({"file": {"surprise": 1}}) is None


def test_vllm_accepts_and_exports_every_metric() -> None:
    """Through vLLM's own code: an undeclared name or a wrong label fails an assertion there."""
    import prometheus_client
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics

    class Config:
        kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"spec_name": "NixlTiersSpec", "spec_module_path": "nixl_tiers.vllm.spec"},
        )

    types = {kind: kind for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)}
    before = set(prometheus_client.REGISTRY._collector_to_names)
    try:
        metrics = OffloadPromMetrics(Config(), types, ["engine"], {0: ["0"]})
        totals = dict.fromkeys((*COUNTERS, *GAUGES), 2.0)
        metrics.observe(Reporter().report({"file": totals, "s3": totals}).data, 0)
        shown = prometheus_client.generate_latest().decode()
    finally:
        for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
            prometheus_client.REGISTRY.unregister(collector)
    for name in COUNTERS:
        assert f'{PREFIX}{name}_total{{engine="0",tier="file"}} 2.0' in shown
    for name in GAUGES:
        assert f'{PREFIX}{name}{{engine="0",tier="s3"}} 2.0' in shown
    assert set(definitions()) == {PREFIX + name for name in (*COUNTERS, *GAUGES)}
