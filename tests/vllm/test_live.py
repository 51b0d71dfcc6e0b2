"""Gauges of an idle engine: what it publishes shows at every scrape of its parent, or of all API servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, multiprocess

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm import live
from nixl_tiers.vllm.compat import OffloadingGaugeMetadata
from nixl_tiers.vllm.live import PERIOD_S, LiveGauges, Shown
from nixl_tiers.vllm.manager import NixlTiersManager
from nixl_tiers.vllm.metrics import definitions

LABELS = ["model_name", "engine"]
GEOMETRY = Geometry(cells=1, cell_payload=4096)


Page = Callable[[], dict[str, float]]


@pytest.fixture(params=["one", "several"])
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Scrapes one API server, which shows its own registry, or several, which show a directory: the gauges of the model
    `tmp_path`, by name and tier."""
    registry = CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    if request.param == "one":
        monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
        registry.register(Shown())  # type: ignore[arg-type]
        for name, made in definitions().items():
            if isinstance(made, OffloadingGaugeMetadata):
                Gauge(name, made.documentation, [*LABELS, *made.labelnames], registry=registry)
    else:
        (tmp_path / "metrics").mkdir()
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "metrics"))
        multiprocess.MultiProcessCollector(registry)

    def scrape() -> dict[str, float]:
        samples = [sample for metric in registry.collect() for sample in metric.samples]
        mine = [sample for sample in samples if sample.labels["model_name"] == str(tmp_path)]
        return {f"{sample.name} {sample.labels.get('tier', '')}".strip(): sample.value for sample in mine}

    return scrape


def manager_of(tmp_path: Path, *storage: dict[str, object]) -> NixlTiersManager:
    config = schema.load({"tiers": [{"type": "cpu", "capacity": 8 * GEOMETRY.row_bytes}, *storage]})
    coordinator = Coordinator.open(config, Namespace.of({"test": 1}), HostRegion.create(GEOMETRY, 8))
    return NixlTiersManager(coordinator, config, (0,), None, live=LiveGauges(str(tmp_path), 0))


def test_engine_without_storage_shows_what_its_last_step_left(page: Page, tmp_path: Path) -> None:
    """It has no thread that could publish, and no need of one."""
    manager = manager_of(tmp_path)
    reported = manager.get_stats().data["types"]
    assert ("gauge" in reported.values()) is (live._directory() is None), "several API servers would keep old values"
    shown = page()
    assert shown["nixl_tiers:info"] == 1
    assert shown["nixl_tiers:capacity_bytes cpu"] == 8 * GEOMETRY.row_bytes
    manager.shutdown()


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveGauges]:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    return LiveGauges("m", 0)


def test_gauges_are_read_once_a_second(gauges: LiveGauges, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the supervisor turns."""
    now, reads = [1000.0], []
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    for _ in range(100):
        gauges.tick(lambda: reads.append(now[0]) or ())
        now[0] += PERIOD_S / 10
    assert len(reads) == 10


def test_error_of_gauges_ends_no_thread_and_is_not_the_last_word(
    gauges: LiveGauges, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> list[live.Level]:
        raise RuntimeError("torn file")

    for _ in range(2):
        gauges.publish(fails)
    assert len([record for record in caplog.records if "gauges" in record.message]) == 1
    gauges.publish(lambda: [("nixl_tiers:up", "Text.", (("tier", "file"),), 0.0)])
    assert [value for _, value, *_ in gauges.values()] == [0.0], "else it would be the old value for ever"


def test_files_of_a_child_are_searched_once(gauges: LiveGauges, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have thousands, and an API server answers requests on the thread that answers a scrape."""
    monkeypatch.setattr(live, "MEMFD", "gauges-of-this-test")  # those of other tests are in this process too
    shown, levels = Shown(), [("nixl_tiers:up", "Text.", (("tier", "file"),), 1.0)]
    assert [*shown._values_of(os.getpid())] == [], "it is searched again, until there is one"
    gauges.publish(lambda: levels)
    assert [value for _, value, *_ in shown._values_of(os.getpid())] == [1.0]
    monkeypatch.setattr(Path, "iterdir", lambda _: pytest.fail("a search"))
    levels[0] = (*levels[0][:3], 0.0)
    gauges.publish(lambda: levels)
    assert [value for _, value, *_ in shown._values_of(os.getpid())] == [0.0]
