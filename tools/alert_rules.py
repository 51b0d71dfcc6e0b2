"""Writes the alerts as a PrometheusRule, below the kustomization that uses it: `make format`, or
`python -m tools.alert_rules`.

`--docs URL` makes their runbooks links first, in both files: the address at which you serve docs/_build of `make docs`.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

DOCKER = Path(__file__).parents[1] / "docker"
RULES = DOCKER / "prometheus/nixl-tiers.rules.yml"
FILE = DOCKER / "kubernetes/overlays/monitoring/rules.yaml"
HEAD = """# Generated from docker/prometheus/nixl-tiers.rules.yml by tools/alert_rules.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: nixl-tiers
spec:
"""


def linked(rules: str, docs: str) -> str:
    """The rules with runbooks at this address, whether or not they had another one."""
    return re.sub(r"runbook(?:_url)?: \S+(#\w+)", rf"runbook_url: {docs.rstrip('/')}/guide/alerts.html\1", rules)


def text() -> str:
    return HEAD + textwrap.indent(RULES.read_text().partition("\n")[2], "  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", metavar="URL", help="where you serve these documents")
    if docs := parser.parse_args().docs:
        RULES.write_text(linked(RULES.read_text(), docs))
    FILE.write_text(text())
