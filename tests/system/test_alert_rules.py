"""When alerts fire, and when they do not: their rules on made-up series, evaluated by promtool."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
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


def firing(folder: Path, given: Sequence[Mapping[str, str]], at: str) -> list[str]:
    """The alerts that fire for these series at that time."""
    tool = program("promtool")
    if tool is None:
        pytest.skip("needs promtool (Debian's package prometheus)")
    none = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": []}
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": given,
        "promql_expr_test": [none],
    }
    file = folder / "test.json"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    found = sorted(re.findall(r'alertname="(\w+)"', done.stdout + done.stderr))
    assert found or done.returncode == 0, done.stderr
    return found


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
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_alerts_that_fire(case: tuple[list[dict[str, str]], str, list[str]], tmp_path: Path) -> None:
    given, at, alerts = case
    assert firing(tmp_path, given, at) == alerts
