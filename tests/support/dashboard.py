"""The queries of the dashboard and of the alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

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
