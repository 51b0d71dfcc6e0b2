"""The store's numbers in the shape that vLLM publishes at /metrics: one label, the tier's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nixl_tiers.vllm.compat import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

PREFIX: Final = "nixl_tiers:"
COUNTERS: Final = {
    "hits": "Chunks that were found in this tier.",
    "misses": "Chunks that were looked for in this tier and not found.",
    "bytes_read": "Bytes read from this tier to go up: from storage to the host, from the host to the engine.",
    "bytes_written": "Bytes written to this tier from above: from the engine to the host, from the host to storage.",
    # A tier's `rows` are stored + promoted + found, less these: evictions, corrupt, missing, unreadable, removed,
    # relisted, reset.
    "stored": "Chunks that came to this tier from above: from the engine, or from the host.",
    "promoted": "Chunks that came to this tier from below: only the host gets such.",
    "found": "Chunks that stood on this tier's medium: from before it was opened, or stored by other engines.",
    "evictions": "Chunks that this tier forgot to make room.",
    "corrupt": "Chunks that this tier gave back wrong: their seal refused them, and they became misses.",
    "missing": "Chunks that this tier was asked for and no longer had.",
    "unreadable": "Chunks that the host forgot because a worker could not copy them.",
    "removed": "Chunks that this tier's medium no longer holds: too old, taken away by others, or beyond less room.",
    "relisted": "Chunks that this tier's medium tells of anew since it was opened again: `found` counts them again.",
    "reset": "Chunks that were forgotten because the weights may be others.",
    "failed": "Moves to or from this tier that ended in an error or too late.",
    "incomplete": "Chunks that the engine had not all blocks of when it stored them, so that they could not be hits.",
    "probes": "Questions to this tier's medium for chunks that another engine may have stored a moment ago.",
    "dropped": "Chunks that were not written to this tier because it could not keep up or had no room.",
    "late": "Chunks whose load from this tier was given up because it took too long.",
    "kills": "Mover processes of this tier that had to be killed.",
    "deaths": "Mover processes of this tier that ended, killed or not, while they were needed.",
}
GAUGES: Final = {
    "used_bytes": "Bytes that this tier takes on its medium now.",
    "capacity_bytes": "Bytes that this tier may take.",
    "rows": "Chunks that this tier holds, as far as the engine has heard: what a look-up can hit.",
    "listed_rows": "Chunks that the tier's medium has listed since it was opened: how far a long listing has come.",
    "up": "1 while the tier's medium is open, 0 while it is not.",
    "breaker": "The tier's circuit: 0 closed (it serves), 1 half-open (it is being tried), 2 open (it is left alone).",
    "denials": "Kinds of requests that the tier's medium denies now, while it is up: the log says which, and why.",
    "quarantined": "Rows of the host that nobody may use until a mover of this tier is surely done with them.",
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """What must be declared to vLLM, which appends `_total` to counters and refuses undeclared names."""
    declared: dict[str, OffloadingMetricMetadata] = {}
    for name, text in COUNTERS.items():
        declared[PREFIX + name] = OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
    for name, text in GAUGES.items():
        declared[PREFIX + name] = OffloadingGaugeMetadata(documentation=text, labelnames=("tier",))
    return declared


class Reporter:
    """Turns the store's running totals into what has changed since the last report."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}

    def report(self, totals: Mapping[str, Mapping[str, float]]) -> OffloadingConnectorStats | None:
        """`totals`: tier -> name -> running total or level. None if nothing changed. Unknown names are left out."""
        stats: OffloadingConnectorStats | None = None
        for tier, numbers in totals.items():
            for name, value in numbers.items():
                last = self._last.get((tier, name))
                # A counter's first report may be zero: the series then exists at /metrics before its first event.
                if value == last or (name not in COUNTERS and name not in GAUGES):
                    continue
                stats = OffloadingConnectorStats() if stats is None else stats
                if name in GAUGES:
                    stats.set_gauge(PREFIX + name, value, (tier,))
                else:
                    stats.increase_counter(PREFIX + name, max(value - (last or 0), 0), (tier,))
                self._last[tier, name] = value
        return stats
