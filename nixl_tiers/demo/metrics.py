"""Sums over the series of a /metrics page, which prometheus_client parses."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class MetricsPage:
    """All samples of one scrape."""

    def __init__(self, text: str) -> None:
        """`text`: a page in the Prometheus text format. Raises ValueError if it cannot be parsed."""
        self.samples: list[Sample] = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of this name with at least these labels; 0 if there is none."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())
