"""Dashboard and alerts: what they ask for exists, Grafana and Prometheus take them, and each shows something."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

import nixl_tiers
from nixl_tiers.base.metrics import INFO, INFO_LABELS, METRICS, PREFIX, Kind
from nixl_tiers.base.tier_traits import TierTraits
from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule, Way
from tests.support.dashboard import ROOT, firing, queries, rules, still_unchanged, within
from tests.support.file_tier import file_tier
from tests.support.load import LoadGenerator
from tests.support.metrics_page import ENGINE, StorePage, served
from tests.support.prometheus import Prometheus, program, prometheus
from tests.support.waiting import until, until_up

GRAFANA: Final = ROOT / "docker/grafana"
CLUSTER: Final = {"namespace": "serving", "pod": "vllm-0"}
GIVEN: Final = {*ENGINE, *CLUSTER, "instance", "job", "pid", "le"}
"""Labels that vLLM and Prometheus add."""
ABSENT: Final = "NixlTiersAbsent"
SIZE: Final = 64 << 10
TIER: Final = "file"

# What one engine over one faulty disk cannot bring about within seconds: added to the page (tier, number -> value).
PLANTED: Final = {
    ("cpu", "hit_tokens"): 1000.0,  # a store knows of no tokens
    ("cpu", "waiting_requests"): 2.0,  # of a moment, that a scrape may miss
    (TIER, "queued_loads"): 3.0,
    (TIER, "loading"): 4.0,
    ("cpu", "huge_page_bytes"): 1e6,
    ("cpu", "prefill_tokens_per_s"): 5000.0,
    (TIER, "saved_first_token_s"): 50.0,  # nor how long computing takes
    (TIER, "saved_prefill_s"): 70.0,
    (TIER, "lost_slower_s"): 100.0,
    ("cpu", "unused"): 5.0,
    (TIER, "denials"): 1.0,
    (TIER, "quarantined"): 3.0,
    (TIER, "loads_staged"): 1.0,
    (TIER, "probes"): 100.0,
    (TIER, "missed_evicted"): 1e6,
    (TIER, "dropped_slow"): 1e6,
    (TIER, "full"): 1.0,
    (TIER, "kills"): 1.0,
    (TIER, "deaths"): 5.0,  # besides the one that is killed
    (TIER, "used_bytes"): 1e12,
    (TIER, "capacity_bytes"): 1.0,
    (TIER, "listed_rows"): 7.0,
}
PLANTED_SAMPLES: Final = {(TIER, "wait_vain"): [30.0] * 5, (TIER, "wait_loaded"): [0.5]}


def known() -> dict[str, tuple[str, set[str]]]:
    """Name of a series at /metrics -> the metric's name, its labels."""
    found = {PREFIX + INFO: (INFO, set(INFO_LABELS))}
    for name, metric in METRICS.items():
        ends = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
        found |= {f"{PREFIX}{name}{end}": (name, set(metric.labels)) for end in ends[metric.kind]}
    return found


def values_of(metric: str, label: str) -> set[str]:
    """Values that a metric's label other than `tier` can have."""
    place = [each for each in METRICS[metric].labels if each not in {"tier", "place"}].index(label)
    return {series.values[place] for series in METRICS[metric].series.values()}


@pytest.mark.parametrize(("whose", "query"), list(queries()))
def test_metrics_and_labels_of_a_query_exist(whose: str, query: str) -> None:
    metrics = known()
    found = re.findall(rf"({PREFIX}\w+)(?:{{(.*?)}})?", query)
    assert found
    labels: set[str] = set()
    for name, matchers in found:
        assert name in metrics
        metric, its_labels = metrics[name]
        labels |= its_labels
        for label, operator, value in re.findall(r'(\w+)(=~|!=|=|!~)"(.*?)"', matchers):
            assert label in its_labels | GIVEN
            if label not in {"tier", *GIVEN}:
                assert set(value.split("|") if "~" in operator else [value]) <= values_of(metric, label)
    grouped = re.findall(r"\b(?:by|on|group_left|without) \((.*?)\)", query)
    assert {label.strip() for group in grouped for label in group.split(",") if label.strip()} <= labels | GIVEN


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_has_a_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"warning", "info"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    guide = ROOT / page
    assert anchor == rule["alert"].lower(), "of the section below"
    section = guide.read_text().partition(f"## {rule['alert']}\n")[2].partition("\n## ")[0]
    assert "**Do**" in section
    if rule["alert"] != ABSENT:  # of which there is nobody to name
        assert "$labels" in rule["annotations"]["summary"]


def kill_movers(store: nixl_tiers.TieredStore) -> None:
    for pid in store.coordinator.mover_pids:
        with suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)


def quiet_since(server: Prometheus) -> float:
    """The begin of three seconds, which are over, to compare with. What is scraped too late, on a busy machine, is
    absent: then others."""
    begins: list[float] = []

    def was_in_time() -> bool:
        begins.append(time.time())
        time.sleep(3)
        (up,) = server.series("up", begins[-1], time.time()).values()
        return all(up)

    until(was_in_time, "three seconds in which each scrape is in time")
    return begins[-1]


def test_every_query_shows_the_load_or_fault_that_it_is_for(tmp_path: Path) -> None:
    """On a real Prometheus: nothing at first, then load, faults of the medium, killed movers, and what is planted."""
    found = program("prometheus")
    if found is None:
        pytest.skip("needs Prometheus (Debian's package prometheus)")
    switch = tmp_path / "faults"
    plan = FaultPlan(
        (Rule(Fault.BIT_FLIP, Way.LOAD, chance=0.2), Rule(Fault.UNAVAILABLE, chance=0.5)), switch=str(switch)
    )
    file = file_tier(tmp_path / "kv", "8MiB")
    faulty = {"type": "nixl_tiers.testing.config:FaultyConfig", "inner": file, "plan": plan.to_dict()}
    config = {"tiers": [{"type": "cpu", "capacity": "4MiB"}, faulty], "wait_s": 5.0}
    tiers = [TierTraits("cpu"), TierTraits(TIER, checked=True, disk=True)]
    with nixl_tiers.open(config, SIZE, "n") as store:
        until_up(store)
        page = StorePage(tiers, store.coordinator.counters, store.coordinator._core.take_samples)
        with served(page) as port, prometheus(found, tmp_path, port, [CLUSTER]) as server:
            server.scrape()  # before there is anything, NixlTiersAbsent is right
            start = quiet_since(server)
            deadline = start + 240  # a slow machine needs many scrapes
            assert firing(server, start) == []
            with LoadGenerator(store, pause_s=0.02, prompts=40):
                time.sleep(3)
                switch.touch()
                time.sleep(3)
                page.planted |= PLANTED
                page.planted_samples |= PLANTED_SAMPLES
                page.lost = True
                kill_movers(store)
                left = still_unchanged(server, start)
                while left and time.time() < deadline:
                    time.sleep(1)
                    kill_movers(store)  # again: a tier that is up again at once is down between two scrapes
                    left = still_unchanged(server, start)
            assert left == []
            for rule in rules():
                raised = server.series(within(rule["expr"]), start, time.time())
                whose = CLUSTER | {"model_name": ENGINE["model_name"]} if rule["alert"] != ABSENT else {}
                assert all(whose.items() <= json.loads(labels).items() for labels in raised), rule["alert"]
