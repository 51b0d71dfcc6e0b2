"""When alerts fire, and when they do not: their rules on made-up series, evaluated by promtool."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.dashboard import RULES
from tests.support.prometheus import program

ENGINE: Final = {"namespace": "serving", "model_name": "m", "instance": "node:8000", "engine": "0", "tier": "file"}
GIB: Final = 1 << 30


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """`values`: one a minute, in promtool's notation: "0x5" is six zeros, "_" none."""
    shown = ",".join(f'{label}="{value}"' for label, value in {**ENGINE, **labels}.items())
    return {"series": f"{name if ':' in name else f'nixl_tiers:{name}'}{{{shown}}}", "values": values}


RUNS: Final = series("info", "1x60", pod="another")


def firing(folder: Path, *given: Mapping[str, str], at: str, runs: Mapping[str, str] | None = RUNS) -> list[str]:
    """The alerts that fire for these series at that time, while another engine `runs`."""
    tool = program("promtool")
    if tool is None:
        pytest.skip("needs promtool (Debian's package prometheus)")
    none = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": []}
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [*given, *([runs] if runs else [])],
        "promql_expr_test": [none],
    }
    file = folder / "test.json"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    found = sorted(re.findall(r'alertname="(\w+)"', done.stdout + done.stderr))
    assert found or done.returncode == 0, done.stderr
    return found


def test_tier_that_is_down_raises_one_alert(tmp_path: Path) -> None:
    """Its circuit is open too."""
    down = series("up", "1x10 0x20"), series("breaker", "0x10 2x20")
    assert firing(tmp_path, *down, at="10m") == []
    assert firing(tmp_path, *down, at="17m") == ["NixlTiersTierDown"]
    assert firing(tmp_path, *down, at="25m") == ["NixlTiersTierDown"]


def test_open_circuit_of_a_tier_that_is_up_raises_its_own_alert(tmp_path: Path) -> None:
    kept_away = series("up", "1x30"), series("breaker", "0x10 2x20")
    assert firing(tmp_path, *kept_away, at="20m") == ["NixlTiersCircuitOpen"]


def test_tier_that_goes_down_again_and_again_is_no_secret(tmp_path: Path) -> None:
    """Never down for as long as the alert waits, and never usable."""
    flapping = series("up", "0 0 1 0 0 1 0 0 1 0 0 1 0 0 1 0 0 1"), series("breaker", "2x17")
    assert firing(tmp_path, *flapping, at="15m") == ["NixlTiersCircuitOpen"]


@pytest.mark.parametrize("reason", ["full", "failed"])
def test_medium_without_room_is_no_failing_one(reason: str, tmp_path: Path) -> None:
    """A shared prefix's upload window that is used up, or a new pod that must not upload yet."""
    drops = series("drops_total", "0+60x40", reason=reason), series("added_chunks_total", "0+60x40", reason="stored")
    full = firing(tmp_path, *drops, at="35m")
    assert full == (["NixlTiersNotWritten"] if reason == "full" else [])
    failures = series("failures_total", "0+60x40", reason="store")
    assert firing(tmp_path, *drops, failures, at="35m") == ["NixlTiersMovesFail", *full]


@pytest.mark.parametrize(
    ("engines", "used", "fires"), [(1, 1.01, False), (1, 1.05, True), (8, 1.12, False), (8, 1.2, True)]
)
def test_budget_has_an_upload_window_for_each_engine(engines: int, used: float, fires: bool, tmp_path: Path) -> None:
    """1/64 of the capacity, which each writer of a shared prefix or directory may exceed it by."""
    pages = [
        sample
        for engine in range(engines)
        for sample in (
            series("used_bytes", f"{used * GIB:.0f}x30", instance=f"node-{engine}:8000", place="one"),
            series("capacity_bytes", f"{GIB}x30", instance=f"node-{engine}:8000", place="one"),
        )
    ]
    alone = series("used_bytes", f"{GIB}x30", place="two"), series("capacity_bytes", f"{GIB}x30", place="two")
    assert firing(tmp_path, *pages, *alone, at="20m") == ["NixlTiersOverBudget"] * fires


def test_other_engines_places_give_no_window(tmp_path: Path) -> None:
    """Eight nodes with one path: the tier has one name, and each has its own disk."""
    pages = [
        series(name, f"{share * GIB:.0f}x30", instance=f"node-{node}:8000", place=f"disk of {node}")
        for node in range(8)
        for name, share in (("used_bytes", 1.05 if node == 3 else 1.0), ("capacity_bytes", 1.0))
    ]
    assert firing(tmp_path, *pages, at="20m") == ["NixlTiersOverBudget"]


def test_absent_metrics_raise_an_alert(tmp_path: Path) -> None:
    assert firing(tmp_path, at="20m", runs=None) == ["NixlTiersAbsent"]
    assert firing(tmp_path, at="5m", runs=None) == []
    assert firing(tmp_path, at="20m") == []


@pytest.mark.parametrize(
    ("pod", "fires"),
    [
        ({}, True),  # it had them until the tenth minute
        ({"pod": "vllm-new"}, True),  # it never had
        ({"namespace": "elsewhere"}, False),  # others, who do not use them
        ({"model_name": "another"}, False),
        ({"pod": "another"}, False),  # the one that has them
    ],
)
def test_pod_without_tiers_is_missed_where_its_model_has_them(pod: dict[str, str], fires: bool, tmp_path: Path) -> None:
    vllm = series("vllm:num_requests_running", "0x60", **{"pod": "vllm-0", **pod})
    had = series("info", "1x10 _x50", pod="vllm-0")
    assert firing(tmp_path, vllm, had, at="40m") == ["NixlTiersLost"] * fires
    assert firing(tmp_path, vllm, had, at="9m") == []


def test_model_that_no_pod_has_with_tiers_any_more_is_missed(tmp_path: Path) -> None:
    vllm, had = series("vllm:num_requests_running", "0x60"), series("info", "1x10 _x50")
    assert firing(tmp_path, vllm, had, at="40m", runs=None) == ["NixlTiersAbsent", "NixlTiersLost"]
