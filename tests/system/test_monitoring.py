"""Dashboard and alerts: what they ask for exists, Prometheus takes them, and alerts fire when they should."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from nixl_tiers.base.metrics import INFO, INFO_LABELS, METRICS, PREFIX, Kind
from tests.support.dashboard import ROOT, RULES, panels, queries, rules, within
from tests.support.prometheus import program

ENGINE: Final = {"namespace": "serving", "model_name": "m", "instance": "node:8000", "engine": "0", "tier": "file"}
GIVEN: Final = {*ENGINE, "pod", "job", "pid", "le"} - {"tier"}
"""Labels that vLLM and Prometheus add."""
ABSENT: Final = "NixlTiersAbsent"
GIB: Final = 1 << 30


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """`values`: one a minute, in promtool's notation: "0x5" is six zeros, "_" none."""
    shown = ",".join(f'{label}="{value}"' for label, value in {**ENGINE, **labels}.items())
    return {"series": f"{name if ':' in name else f'nixl_tiers:{name}'}{{{shown}}}", "values": values}


RUNS: Final = series("info", "1x120", pod="another")


def promtool(folder: Path, *tests: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Evaluates the rules on made-up series."""
    tool = program("promtool")
    if tool is None:
        pytest.skip("needs promtool (Debian's package prometheus)")
    file = folder / "test.json"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    return subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True, check=False)


def over_budget(engines: int, used: float) -> list[dict[str, str]]:
    """So many engines with one place, and seven more, each with its own, which give no window."""
    pages = []
    for engine in range(engines + 7):
        place, share = ("one", used) if engine < engines else (f"disk {engine}", 1.0)
        for name, value in (("used_bytes", share * GIB), ("capacity_bytes", GIB)):
            pages.append(series(name, f"{value:.0f}x30", instance=f"node-{engine}:8000", place=place))
    return pages


DOWN: Final = [RUNS, series("up", "1x10 0x20"), series("breaker", "0x10 2x20")]
FLAPPING: Final = [RUNS, series("up", "0 0 1 0 0 1 0 0 1 0 0 1 0 0 1 0 0 1"), series("breaker", "2x17")]
FAILS: Final = series("failures_total", "0+60x40", reason="store")
FULL, FAILED = (
    [RUNS, series("drops_total", "0+60x40", reason=why), series("added_chunks_total", "0+60x40", reason="stored")]
    for why in ("full", "failed")
)
HAD: Final = series("info", "1x10 _x50", pod="vllm-0")
OVER, NOT_WRITTEN, LOST, OPEN = ("NixlTiersOverBudget", "NixlTiersNotWritten", "NixlTiersLost", "NixlTiersCircuitOpen")


def serves(**labels: str) -> list[dict[str, str]]:
    """A pod of vLLM, and one that had tiers until the tenth minute."""
    return [RUNS, HAD, series("vllm:num_requests_running", "0x60", **{"pod": "vllm-0", **labels})]


SAVED: Final = "saved_first_token_seconds_total"


def of(name: str, **rates: int) -> list[dict[str, str]]:
    """Of a counter, what is added in a minute by reason or outcome."""
    label = "outcome" if name.startswith("wait") else "reason"
    return [series(name, f"0+{rate}x120", **{label: value}) for value, rate in rates.items()]


CASES: Final = {
    "up": (DOWN, "10m", []),
    "down, and its circuit is open too": (DOWN, "17m", ["NixlTiersTierDown"]),
    "kept away": ([RUNS, series("up", "1x30"), series("breaker", "0x10 2x20")], "20m", [OPEN]),
    "down again and again, never for as long as the alert waits": (FLAPPING, "15m", [OPEN]),
    "an upload window that is used up": (FULL, "35m", [NOT_WRITTEN]),
    "and failures": ([*FULL, FAILS], "35m", ["NixlTiersMovesFail", NOT_WRITTEN]),
    "failures": ([*FAILED, FAILS], "35m", ["NixlTiersMovesFail"]),
    # 1/64 of the capacity is the upload window, which each writer of a place may exceed it by.
    "one within its window": ([RUNS, *over_budget(1, 1.01)], "20m", []),
    "one beyond its window": ([RUNS, *over_budget(1, 1.05)], "20m", [OVER]),
    "eight within their windows": ([RUNS, *over_budget(8, 1.12)], "20m", []),
    "eight beyond their windows": ([RUNS, *over_budget(8, 1.2)], "20m", [OVER]),
    "absent": ([], "20m", ["NixlTiersAbsent"]),
    "absent only now": ([], "5m", []),
    "not absent": ([RUNS], "20m", []),
    "not lost yet": (serves(), "9m", []),
    "lost": (serves(), "40m", [LOST]),
    "a pod that never had tiers, of a model that has them": (serves(pod="vllm-new"), "40m", [LOST]),
    "others, who do not use them": (serves(namespace="elsewhere"), "40m", []),
    "another model": (serves(model_name="another"), "40m", []),
    "no pod has tiers any more": (serves()[1:], "40m", ["NixlTiersAbsent", LOST]),
    "denied": ([RUNS, series("denials", "1x30")], "20m", ["NixlTiersDenied"]),
    "corrupt": (
        [RUNS, series("removed_chunks_total", "0x9 1x20", reason="corrupt")],
        "20m",
        ["NixlTiersCorruptChunks"],
    ),
    "movers die": ([RUNS, series("mover_exits_total", "0x9 4x20")], "20m", ["NixlTiersMoverRestarts"]),
    "quarantined": ([RUNS, series("quarantined_chunks", "3x30")], "25m", ["NixlTiersQuarantined"]),
    "too small": ([RUNS, *of("misses_total", evicted=60, never_stored=30)], "110m", ["NixlTiersTooSmall"]),
    "misses of what was never stored": ([RUNS, *of("misses_total", evicted=30, never_stored=60)], "110m", []),
    "waits in vain": ([RUNS, *of("wait_seconds_sum", vain=60, loaded=60)], "30m", ["NixlTiersWastedWaits"]),
    "slower": ([RUNS, *of("lost_seconds_total", _=60), *of(SAVED, _=30)], "70m", ["NixlTiersNetLoss"]),
    "faster": ([RUNS, *of("lost_seconds_total", _=30), *of(SAVED, _=60)], "70m", []),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_alerts_that_fire(case: tuple[list[dict[str, str]], str, list[str]], tmp_path: Path) -> None:
    given, at, alerts = case
    none = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": []}
    done = promtool(tmp_path, {"interval": "1m", "input_series": given, "promql_expr_test": [none]})
    found = sorted(re.findall(r'alertname="(\w+)"', done.stdout + done.stderr))
    assert found or done.returncode == 0, done.stderr
    assert found == alerts


def test_every_alert_fires_in_a_case() -> None:
    assert {alert for _, _, alerts in CASES.values() for alert in alerts} == {rule["alert"] for rule in rules()}


def test_prometheus_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    expressions = [within(target["expr"]) for panel in panels() for target in panel["targets"]]
    asked = [{"expr": each, "eval_time": "20m", "exp_samples": []} for each in expressions]
    done = promtool(tmp_path, {"interval": "1m", "input_series": [], "promql_expr_test": asked})
    assert done.returncode == 0, done.stderr


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
