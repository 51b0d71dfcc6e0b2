"""The coordinator's counters and gauges as vLLM publishes them at /metrics: one label, the tier's name."""

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
    "bytes_read": "Bytes read from this tier to go up: from storage to the host, from the host to the GPU.",
    "bytes_written": "Bytes written to this tier from above: from the GPU to the host, from the host to storage.",
    # A tier's `rows` are stored + promoted + found, less these: evictions, corrupt, missing, unreadable, removed,
    # relisted, reset.
    "stored": "Chunks stored to this tier from above: from the GPU, or from the host.",
    "promoted": "Chunks promoted to this tier from below: only the host gets such.",
    "found": "Chunks found on this tier's medium: from before it was opened, or stored by other engines.",
    "evictions": "Chunks evicted from this tier to make room.",
    "corrupt": "Chunks read back corrupt from this tier: their seal did not match, and they became misses.",
    "missing": "Chunks requested from this tier that it no longer had.",
    "unreadable": "Chunks dropped from the host because a worker could not copy them.",
    "removed": "Chunks that this tier's medium no longer holds: expired, deleted by others, or over a lowered limit.",
    "relisted": "Chunks listed again by this tier's medium since it was reopened: `found` counts them again.",
    "reset": "Chunks dropped by a reset, because the weights may have changed.",
    "failed": "Moves to or from this tier that ended in an error or timed out.",
    "incomplete": "Chunks that vLLM stored without all of their blocks, so that they could not be hits.",
    "probes": "Existence checks on this tier's medium for chunks that another engine may have stored a moment ago.",
    "dropped": "Chunks that were not written to this tier because it could not keep up or had no room.",
    "late": "Chunks whose load from this tier timed out.",
    "kills": "Mover processes of this tier that had to be killed.",
    "deaths": "Mover processes of this tier that ended, killed or not, while they were needed.",
}
GAUGES: Final = {
    "used_bytes": "Bytes that this tier uses on its medium now.",
    "capacity_bytes": "Bytes that this tier may use.",
    "huge_page_bytes": "Bytes of the host tier's memory that lie in pages of 2 MiB.",
    "rows": "Chunks that this tier holds, as far as is known: what a look-up can hit.",
    "listed_rows": "Chunks listed by the tier's medium since it was opened: the progress of a long listing.",
    "up": "1 while the tier's medium is open, 0 while it is not.",
    "breaker": "The tier's circuit: 0 closed (in use), 1 half-open (being probed), 2 open (not used).",
    "denials": "Kinds of requests that the tier's medium denies now, while it is up: the log has the reasons.",
    "quarantined": "Rows of the host that are not reused until a mover of this tier has certainly finished with them.",
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics to declare to vLLM, which appends `_total` to counters and refuses undeclared names."""
    declared: dict[str, OffloadingMetricMetadata] = {}
    for name, text in COUNTERS.items():
        declared[PREFIX + name] = OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
    for name, text in GAUGES.items():
        declared[PREFIX + name] = OffloadingGaugeMetadata(documentation=text, labelnames=("tier",))
    return declared


class Reporter:
    """Turns running totals into differences since the last report."""

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
