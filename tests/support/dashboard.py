"""The queries of the dashboard and of the alerts, and which of them a real Prometheus has seen change."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from nixl_tiers.base.metrics import INFO, PREFIX
from tests.support.prometheus import Prometheus

ROOT: Final = Path(__file__).parents[2]
DASHBOARD: Final = ROOT / "docker/grafana/dashboards/nixl-tiers.json"
RULES: Final = ROOT / "docker/prometheus/nixl-tiers.rules.yml"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Whose it is, and the query."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def within(query: str, window_s: int = 8) -> str:
    """A query of the dashboard or of an alert, with windows of seconds instead of minutes."""
    window = f"{window_s}s"
    return re.sub(r"\[\d+[smhd]\]", f"[{window}]", chosen(query).replace("$__rate_interval", window))


def chosen(query: str, **values: str) -> str:
    """With these values of the dashboard's variables, and of the others all."""
    return re.sub(r"\$(model|namespace|pod)\b", lambda found: values.get(found[1], ".*"), query)


def firing(server: Prometheus, start: float, window_s: int = 8) -> list[str]:
    """Alerts that have fired since `start`, however short."""
    now = time.time()
    return [rule["alert"] for rule in rules() if server.series(within(rule["expr"], window_s), start, now)]


def shows_change(values: list[float], *, fixed: bool) -> bool:
    """`fixed`: one value is enough."""
    numbers = [value for value in values if not math.isnan(value)]
    return bool(numbers) and (fixed or min(numbers) != max(numbers))


def still_unchanged(server: Prometheus, start: float, window_s: int = 8) -> list[str]:
    """Queries of panels that show the same all the time, and alerts that never fired."""
    alerts = {rule["alert"] for rule in rules()}
    found = []
    for whose, query in queries():
        answer = server.series(within(query, window_s), start, time.time())
        if whose in alerts:
            changed = bool(answer)
        else:
            # A quotient has no value before there is anything to divide by, and a quantile of a rate none without an
            # increase; what runs does not change.
            fixed = "/" in query or "histogram_quantile(" in query or f"{PREFIX}{INFO}" in query
            changed = any(shows_change(values, fixed=fixed) for values in answer.values())
        if not changed:
            found.append(f"{whose}: {query}")
    return found
