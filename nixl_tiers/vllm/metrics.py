"""The coordinator's numbers as vLLM publishes them at /metrics; `base/metrics.py` says which, and their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import nixl_tiers
from nixl_tiers.base.metrics import CPU, INFO, INFO_LABELS, INFO_TEXT, METRICS, PREFIX, Kind, TierTraits, published
from nixl_tiers.config.schema import TiersConfig, Write
from nixl_tiers.vllm.compat import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    declare_histogram,
)
from nixl_tiers.vllm.live import Level

MAX_LABEL: Final = 1024  # characters


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics to declare to vLLM, which appends `_total` to counters and refuses undeclared names."""
    declared: dict[str, OffloadingMetricMetadata] = {
        PREFIX + INFO: OffloadingGaugeMetadata(documentation=INFO_TEXT, labelnames=INFO_LABELS)
    }
    for name, metric in METRICS.items():
        match metric.kind:
            case Kind.COUNTER:
                made = OffloadingCounterMetadata(documentation=metric.text, labelnames=metric.labels)
            case Kind.GAUGE:
                made = OffloadingGaugeMetadata(documentation=metric.text, labelnames=metric.labels)
            case Kind.HISTOGRAM:
                made = OffloadingHistogramMetadata(
                    documentation=metric.text, labelnames=metric.labels, buckets=metric.buckets
                )
        declared[PREFIX + name] = made
    return declared


def traits(config: TiersConfig) -> list[TierTraits]:
    """Of the host and of each storage tier."""
    storage = [
        TierTraits(name, written=tier.write is not Write.OFF, checked=tier.existence_checks, disk=tier.on_disk)
        for name, tier in zip(config.names, config.storage, strict=True)
    ]
    return [TierTraits(CPU, only=not storage), *storage]


def info_labels(config: TiersConfig, namespace: str, chunk_bytes: int, chunk_tokens: int) -> tuple[str, ...]:
    """The label values of the gauge INFO."""
    places = "; ".join(f"{name}: {tier.place}" for name, tier in zip(config.names, config.storage, strict=True))
    return (nixl_tiers.__version__, namespace, str(chunk_bytes), str(chunk_tokens), places[:MAX_LABEL])


class Levels:
    """All gauges at once, with their values now."""

    def __init__(self, tiers: Sequence[TierTraits], info: tuple[str, ...]) -> None:
        self._info: Level = (PREFIX + INFO, dict(zip(INFO_LABELS, info, strict=True)), 1.0)
        self._series = [
            (tier, number, PREFIX + name, dict(zip(metric.labels, labels, strict=True)))
            for (tier, number), (name, metric, labels) in published(list(tiers)).items()
            if metric.kind is Kind.GAUGE
        ]

    def of(self, totals: Mapping[str, Mapping[str, float]]) -> list[Level]:
        """`totals`: as in Reporter."""
        return [
            self._info,
            *(
                (name, labels, float(totals[tier][number]))
                for tier, number, name, labels in self._series
                if number in totals.get(tier, ())
            ),
        ]


class Reporter:
    """Turns running totals into differences since the last report; without `gauges` if vLLM does not get them."""

    def __init__(
        self, tiers: Sequence[TierTraits], info: tuple[str, ...] | None = None, *, gauges: bool = True
    ) -> None:
        self._series = {
            place: series
            for place, series in published(list(tiers)).items()
            if gauges or series[1].kind is not Kind.GAUGE
        }
        self._last: dict[str, Mapping[str, float]] = {}  # by tier
        self._info = info if gauges else None

    def report(
        self,
        totals: Mapping[str, Mapping[str, float]],
        samples: Mapping[tuple[str, str], Sequence[float]] | None = None,
    ) -> OffloadingConnectorStats | None:
        """`totals`: tier -> number -> running total or level; `samples`: those since the last report. None if nothing
        has changed. Numbers that are no series of the tier are left out."""
        stats = OffloadingConnectorStats()
        if self._info is not None:
            stats.set_gauge(PREFIX + INFO, 1, self._info)
            self._info = None
        for tier, numbers in totals.items():
            if tier not in self._last:
                self._declare_histograms(stats, tier)
            last = self._last.get(tier, {})
            if numbers != last:
                self._report_tier(stats, tier, numbers, last)
                self._last[tier] = numbers
        for place, observed in (samples or {}).items():
            if (series := self._series.get(place)) is not None:
                name, _, labels = series
                for sample in observed:
                    stats.observe_histogram(PREFIX + name, sample, labels)
        return None if stats.is_empty() else stats

    def _declare_histograms(self, stats: OffloadingConnectorStats, tier: str) -> None:
        """Prometheus sees no increase in a series that begins with its first sample: so they all begin without one."""
        for (its, _), (name, metric, labels) in self._series.items():
            if its == tier and metric.kind is Kind.HISTOGRAM:
                declare_histogram(stats, PREFIX + name, labels)

    def _report_tier(
        self, stats: OffloadingConnectorStats, tier: str, numbers: Mapping[str, float], last: Mapping[str, float]
    ) -> None:
        for number, value in numbers.items():
            before = last.get(number)
            # A counter's first report may be zero: the series then exists at /metrics before its first event.
            if value == before or (series := self._series.get((tier, number))) is None:
                continue
            name, metric, labels = series
            if metric.kind is Kind.GAUGE:
                stats.set_gauge(PREFIX + name, value, labels)
            elif metric.kind is Kind.COUNTER:
                stats.increase_counter(PREFIX + name, max(value - (before or 0), 0), labels)
