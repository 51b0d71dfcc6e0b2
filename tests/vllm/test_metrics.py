from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from nixl_tiers.base.metrics import METRICS, PREFIX, Kind, number_of_quota, published
from nixl_tiers.base.tier_traits import TierTraits
from nixl_tiers.config import schema
from nixl_tiers.config.here import Here
from nixl_tiers.vllm.connector import NixlTiersConnector
from nixl_tiers.vllm.metrics import MAX_PROBLEMS, Reporter, traits

CPU = TierTraits("cpu")
FILE = TierTraits("file", disk=True, place="p")
S3 = TierTraits("s3", checked=True)
INFO = ("1", "2", "3", "4", "5")


def values(stats: object) -> dict[str, dict[tuple[str, ...], object]]:
    """Without histograms that only say that they exist."""
    found: dict[str, dict[tuple[str, ...], object]] = stats.data["data"]  # type: ignore[attr-defined]
    return {name: series for name, series in found.items() if any(value != [] for value in series.values())}


def test_counters_are_reported_as_differences_gauges_as_levels_and_samples_once() -> None:
    reporter, live = Reporter([CPU, FILE], INFO), Reporter([CPU, FILE], INFO, gauges=False)
    before = {"file": {"hits": 3, "used_bytes": 100, "corrupt": 0, "surprise": 1}, "cpu": {"hits": 1}}
    counted = {"nixl_tiers:hits": {("file",): 3, ("cpu",): 1}, "nixl_tiers:removed_chunks": {("file", "corrupt"): 0}}
    waits = {("file", "load_seconds"): [0.5, 2.0], ("file", "wait_vain"): [1.0]}
    kinds: dict[tuple[str, ...], object] = {("file", "loaded"): [], ("file", "partial"): [], ("file", "vain"): [1.0]}
    samples = {"nixl_tiers:load_seconds": {("file",): [0.5, 2.0]}, "nixl_tiers:wait_seconds": kinds}
    levels = {"nixl_tiers:used_bytes": {("file", "p"): 100}, "nixl_tiers:info": {INFO: 1}}
    assert values(reporter.report(before, waits)) == counted | samples | levels
    assert values(live.report(before, waits)) == counted | samples, "gauges are published live"
    after = {"file": {"hits": 5, "used_bytes": 60, "corrupt": 0, "dropped_slow": 2}, "cpu": {"hits": 1}}
    changed = {"nixl_tiers:hits": {("file",): 2}, "nixl_tiers:used_bytes": {("file", "p"): 60}}
    assert values(reporter.report(after)) == changed | {"nixl_tiers:drops": {("file", "slow"): 2}}
    assert reporter.report(after, {}) is None


def test_a_histogram_exists_before_its_first_sample(clean_registry: None) -> None:
    """Else Prometheus, which sees no increase in a series that begins with a sample, never shows the first one."""
    reporter = Reporter([FILE])
    metrics = vllms_metrics()
    metrics.observe(reporter.report({"file": {"hits": 0}}).data, 0)
    assert (
        'wait_seconds_count{engine="0",outcome="vain",tier="file"} 0.0' in prometheus_client.generate_latest().decode()
    )
    assert reporter.report({"file": {"hits": 0}}) is None
    metrics.observe(reporter.report({}, {("file", "wait_vain"): [1.0]}).data, 0)
    assert (
        'wait_seconds_count{engine="0",outcome="vain",tier="file"} 1.0' in prometheus_client.generate_latest().decode()
    )


def test_what_is_wrong_with_a_tier_is_a_gauge_while_it_is() -> None:
    reporter, levels = Reporter([FILE]), Reporter([FILE], INFO)

    def shown(**problems: str) -> dict[tuple[str, ...], object]:
        own = {(tier, text): value for name, _, ((_, tier), (_, text), *_), value in levels.levels({}, problems)
               if name == "nixl_tiers:problem"}  # fmt: skip
        stats = reporter.report({}, {}, problems)
        changed = {} if stats is None else values(stats)["nixl_tiers:problem"]
        assert changed.items() <= own.items(), "live, or by vLLM's reports"
        return changed

    assert shown(cpu="", file="") == {}
    assert shown(cpu="", file="is not mounted") == {("file", "is not mounted"): 1}
    assert shown(cpu="", file="is not mounted") == {}
    assert shown(cpu="", file="other") == {("file", "is not mounted"): 0, ("file", "other"): 1}
    assert shown(cpu="", file="") == {("file", "other"): 0}


def test_sentences_that_always_differ_make_few_series() -> None:
    reporter = Reporter([FILE])
    shown = {labels for number in range(1000) for labels in reporter._told({"file": f"after {number} s"})}
    assert len(shown) <= MAX_PROBLEMS + 1


CPU_TIER = {"type": "cpu", "capacity": "1GiB"}


def places(*tiers: dict[str, object]) -> list[str]:
    """Of the cpu tier and of these, as one more engine has them."""
    config = schema.load({"tiers": [CPU_TIER, *tiers]})
    return [tier.place for tier in traits(config)]


def test_engines_of_one_bucket_and_prefix_have_one_place_and_host_memory_of_their_own() -> None:
    objects = {"type": "s3", "bucket": "kv-cache", "prefix": "a", "endpoint": "http://s:1", "capacity": "1TiB"}
    found = [places({**objects}) for _ in range(8)]
    assert len({objects for _, objects in found}) == 1
    assert len({host for host, _ in found}) == 8
    others = [{"bucket": "kv-cache-2"}, {"prefix": "b"}, {"endpoint": "http://s:2"}]
    assert len({places({**objects, **other})[1] for other in ({}, *others)}) == 4
    assert all(re.fullmatch("[0-9a-f]{12}", place) for place in found[0]), "it says nothing of the bucket"


def test_engines_of_one_directory_have_one_place(tmp_path: Path) -> None:
    def place(*names: str, **more: object) -> str:
        path = [str(tmp_path / name) for name in names]
        return places({"type": "file", "path": path, "capacity": "1GiB", "min_free": 0, **more})[1]

    (tmp_path / "link").symlink_to("a")
    assert place("a") == place("link") == place("a", layout="files")
    disk = {"type": "file", "path": str(tmp_path / "a"), "capacity": "1GiB", "min_free": 0}
    config = schema.load({"tiers": [CPU_TIER, disk]})
    for here in (Here(silent={"file": "it does not answer"}), Here()):
        assert traits(config, here)[1].place != place("a"), "it is not asked"
    assert place("a", "b") == place("b", "a")
    assert len({place("a"), place("b"), place("a", "b")}) == 3


@pytest.mark.parametrize(
    ("tier", "number", "shown"),
    [
        (CPU, "bytes_read", False),  # vLLM measures that itself
        (CPU, "up", False),
        (CPU, "promoted", True),
        (TierTraits("cpu", only=True), "promoted", False),
        (FILE, "promoted", False),
        (FILE, "stored", True),
        (TierTraits("file", written=False), "stored", False),
        (TierTraits("file", written=False), "store_seconds", False),
        (FILE, "probes", False),
        (FILE, "loads_staged", True),
        (S3, "loads_staged", False),
        (S3, "probes", True),
    ],
)
def test_a_series_that_could_only_be_zero_is_not_published(tier: TierTraits, number: str, shown: bool) -> None:
    assert ((tier.name, number) in published([tier])) is shown


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = set(prometheus_client.REGISTRY._collector_to_names)
    yield
    for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
        prometheus_client.REGISTRY.unregister(collector)


def vllms_metrics() -> Any:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics

    class Config:
        kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"spec_name": "NixlTiersSpec", "spec_module_path": "nixl_tiers.vllm.spec"},
        )

    types = {kind: kind for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)}
    return OffloadPromMetrics(Config(), types, ["engine"], {0: ["0"]})


def test_vllm_accepts_and_exports_every_metric(clean_registry: None) -> None:
    """Through vLLM's own code: an undeclared name or a wrong label fails an assertion there."""
    metrics = vllms_metrics()
    tiers = [CPU, FILE, S3]
    numbers = dict.fromkeys((number for metric in METRICS.values() for number in metric.series), 2.0)
    samples = {place: [2.0, 3.0] for place, (_, metric, _) in published(tiers).items() if metric.kind is Kind.HISTOGRAM}
    totals = {tier.name: numbers for tier in tiers}
    reporter = Reporter(tiers, INFO)
    metrics.observe(reporter.report(totals, samples, {"cpu": "", "file": "is not mounted"}).data, 0)
    shown = prometheus_client.generate_latest().decode()
    for (tier, _), (name, metric, labels) in published(tiers).items():
        texts = dict(zip(metric.labels, labels, strict=True)) | {"engine": "0"}
        inside = ",".join(f'{label}="{text}"' for label, text in sorted(texts.items()))
        end = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}[metric.kind]
        assert f"{PREFIX}{name}{end}{{{inside}}} 2.0" in shown, tier
    info = 'nixl_tiers:info{chunk_bytes="3",chunk_tokens="4",engine="0",kv_namespace="2",places="5",version="1"} 1.0'
    assert info in shown
    assert 'nixl_tiers:problem{engine="0",problem="is not mounted",tier="file"} 1.0' in shown


def test_levels_are_all_gauges_of_the_tiers_and_what_runs() -> None:
    numbers = dict.fromkeys((number for metric in METRICS.values() for number in metric.series), 2)
    numbers[number_of_quota("a")] = 2
    file = replace(FILE, quotas=("a", "b"))
    levels = [*Reporter([CPU, file], INFO).levels({"cpu": numbers, "file": numbers})]
    names = {(name, dict(labels).get("tier")) for name, _, labels, _ in levels}
    gauges = {name for name, metric in METRICS.items() if metric.kind is Kind.GAUGE}
    assert {name for name, _ in names} == {PREFIX + name for name in (*gauges, "info")}
    assert ("nixl_tiers:up", "file") in names
    assert ("nixl_tiers:up", "cpu") not in names
    of_quotas = {labels: value for name, _, labels, value in levels if name == "nixl_tiers:quota_chunks"}
    assert of_quotas == {(("tier", "file"), ("quota", "a")): 2.0}, "of the cpu tier without quotas none"
    assert all(text and isinstance(value, float) for _, text, _, value in levels)


def lines(*reports: dict[str, Any]) -> list[str]:
    """What vLLM logs after it has got these reports from another process."""
    reporter = Reporter([CPU, FILE])
    made = KVConnectorLogging(None)
    made.connector_cls = NixlTiersConnector
    for totals, samples in ((report, report.pop("samples", None)) for report in reports):
        stats = reporter.report(totals, samples)
        if stats is not None:
            made.observe(MsgpackDecoder().decode(MsgpackEncoder().encode(stats.to_dict())))
    said: list[str] = []
    made.log(lambda text, *values: said.append(text % values))
    return said


def test_ten_seconds_are_one_sentence() -> None:
    before = {"cpu": {"hit_tokens": 0, "stored": 0, "missed_never_stored": 0}, "file": {"hit_tokens": 640}}
    after = {
        "cpu": {"hit_tokens": 64, "stored": 13, "missed_never_stored": 25, "used_bytes": 1 << 30},
        "file": {"hit_tokens": 1664 + 640, "missed_slower": 1, "failed_loads": 2, "corrupt": 1, "dropped_slow": 1},
        "samples": {("file", "wait_loaded"): [0.04, 0.06]},
    }
    (line,) = lines(before, after)
    assert line == (
        "KV Transfer metrics: loaded=64 tokens from cpu, 2,304 tokens from file, stored=13 chunks, missed=26 chunks, "
        "not written=1 chunk, failed=2 chunks, corrupt=1 chunk, waited=0.1 s"
    )


def test_seconds_in_which_nothing_happened_are_not_logged() -> None:
    assert lines({"cpu": {"hit_tokens": 0, "stored": 0, "used_bytes": 5}}) == []
    assert lines() == []
