"""Writes the alerts as a PrometheusRule, below the kustomization that uses it: `make format`."""

from __future__ import annotations

import textwrap
from pathlib import Path

HERE = Path(__file__).parent
RULES = HERE.parent / "prometheus/nixl-tiers.rules.yml"
FILE = HERE / "overlays/monitoring/rules.yaml"
HEAD = """# Generated from docker/prometheus/nixl-tiers.rules.yml by docker/kubernetes/rules.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: nixl-tiers
spec:
"""


def text() -> str:
    return HEAD + textwrap.indent(RULES.read_text().partition("\n")[2], "  ")


if __name__ == "__main__":
    FILE.write_text(text())
