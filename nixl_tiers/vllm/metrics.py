"""The coordinator's numbers as vLLM publishes them at /metrics; `base/metrics.py` says which, and their names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import nixl_tiers
from nixl_tiers.base.metrics import (
    INFO,
    INFO_LABELS,
    INFO_TEXT,
    METRICS,
    PREFIX,
    PROBLEM,
    PROBLEM_LABELS,
    PROBLEM_TEXT,
    Kind,
    published,
)
from nixl_tiers.base.tier_traits import CPU, TierTraits
from nixl_tiers.config.here import Here
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
MAX_PROBLEMS: Final = 32  # series of an engine: sentences may name what changes


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics to declare to vLLM, which appends `_total` to counters and refuses undeclared names."""
    declared: dict[str, OffloadingMetricMetadata] = {
        PREFIX + INFO: OffloadingGaugeMetadata(documentation=INFO_TEXT, labelnames=INFO_LABELS),
        PREFIX + PROBLEM: OffloadingGaugeMetadata(documentation=PROBLEM_TEXT, labelnames=PROBLEM_LABELS),
    }
    for name, metric in METRICS.items():
        make: Callable[..., OffloadingMetricMetadata] = {
            Kind.COUNTER: OffloadingCounterMetadata,
            Kind.GAUGE: OffloadingGaugeMetadata,
            Kind.HISTOGRAM: partial(OffloadingHistogramMetadata, buckets=metric.buckets),
        }[metric.kind]
        declared[PREFIX + name] = make(documentation=metric.text, labelnames=metric.labels)
    return declared


def traits(config: TiersConfig, here: Here | None = None) -> list[TierTraits]:
    """Of the host and of each storage tier. `here`: what was found at the start: a disk that did not answer then may
    hang whoever asks it again."""
    disks = None if here is None else here.identities
    quotas = tuple(config.quotas)
    storage = [
        TierTraits(
            name,
            written=tier.write is not Write.OFF,
            checked=tier.asked,
            disk=tier.on_disk,
            quotas=quotas if tier.own and tier.write is not Write.OFF else (),
            place=place_label(tier.identity if disks is None or not tier.on_disk else disks.get(name, "")),
        )
        for name, tier in zip(config.names, config.storage, strict=True)
    ]
    return [TierTraits(CPU, only=not storage, quotas=quotas, place=place_label("")), *storage]


def place_label(identity: str) -> str:
    """A digest of what identifies a medium; of one that only this engine uses ("") another one at each start."""
    return hashlib.blake2b(identity.encode(errors="surrogateescape") or os.urandom(16), digest_size=6).hexdigest()


def info_labels(config: TiersConfig, namespace: str, chunk_bytes: int, chunk_tokens: int) -> tuple[str, ...]:
    """The label values of the gauge INFO."""
    places = "; ".join(f"{name}: {tier.place}" for name, tier in zip(config.names, config.storage, strict=True))
    return (nixl_tiers.__version__, namespace, str(chunk_bytes), str(chunk_tokens), places[:MAX_LABEL])


class Reporter:
    """Turns running totals into differences since the last report, and gauges into levels. `info`: the label values of
    the gauge INFO. `gauges`: whether vLLM gets them."""

    def __init__(self, tiers: Sequence[TierTraits], info: tuple[str, ...] = (), *, gauges: bool = True) -> None:
        self._series = published(list(tiers))
        self._last: dict[str, Mapping[str, float]] = {}  # by tier
        self._info = info
        self._gauges = gauges
        self._info_is_due = gauges and bool(info)
        self._problems: dict[tuple[str, ...], float] = {}

    def levels(
        self, totals: Mapping[str, Mapping[str, float]], problems: Mapping[str, str] | None = None
    ) -> Iterator[Level]:
        """All gauges at once. `totals`, `problems`: as in `report`."""
        yield PREFIX + INFO, INFO_TEXT, tuple(zip(INFO_LABELS, self._info, strict=True)), 1.0
        for labels, value in self._told(problems or {}).items():
            yield PREFIX + PROBLEM, PROBLEM_TEXT, tuple(zip(PROBLEM_LABELS, labels, strict=True)), value
        for (tier, number), (name, metric, labels) in self._series.items():
            if metric.kind is Kind.GAUGE and number in totals.get(tier, ()):
                own = tuple(zip(metric.labels, labels, strict=True))
                yield PREFIX + name, metric.text, own, float(totals[tier][number])

    def report(
        self,
        totals: Mapping[str, Mapping[str, float]],
        samples: Mapping[tuple[str, str], Sequence[float]] | None = None,
        problems: Mapping[str, str] | None = None,
    ) -> OffloadingConnectorStats | None:
        """`totals`: tier -> number -> running total or level; `samples`: those since the last report; `problems`: tier
        -> what is wrong, in words, or "". None if nothing has changed. Numbers that are no series of the tier are left
        out."""
        stats = OffloadingConnectorStats()
        if self._info_is_due:
            stats.set_gauge(PREFIX + INFO, 1, self._info)
            self._info_is_due = False
        before = self._problems
        for labels, value in self._told(problems or {}).items() if self._gauges else ():
            if value != before.get(labels):
                stats.set_gauge(PREFIX + PROBLEM, value, labels)
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

    def _told(self, problems: Mapping[str, str]) -> dict[tuple[str, ...], float]:
        """By label values: 1 for what is wrong, 0 for what was."""
        told = dict.fromkeys(self._problems, 0.0)
        for tier, text in problems.items():
            if text:
                labels = tier, text[:MAX_LABEL]
                told[labels if labels in told or len(told) < MAX_PROBLEMS else (tier, "the log has it")] = 1.0
        self._problems = told
        return told

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
            if metric.kind is Kind.GAUGE and self._gauges:
                stats.set_gauge(PREFIX + name, value, labels)
            elif metric.kind is Kind.COUNTER:
                stats.increase_counter(PREFIX + name, max(value - (before or 0), 0), labels)
