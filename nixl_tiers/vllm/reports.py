"""When the numbers go to vLLM: at its steps, but not at each; and the gauges of an idle engine, which has none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.compat import OffloadingConnectorStats
from nixl_tiers.vllm.live import Level, LiveGauges
from nixl_tiers.vllm.metrics import Reporter, info_labels, traits

# Gathering the numbers takes longer than a look-up.
REPORT_S: Final = 0.25


class Reports:
    """`period_s`: between two reports while there are requests. `chunk_tokens`: of the longest chunk. `live`: shows the
    gauges of an idle engine. `own`: numbers beside the coordinator's, of the cpu tier."""

    def __init__(
        self,
        coordinator: Coordinator,
        config: TiersConfig,
        *,
        chunk_tokens: int,
        live: LiveGauges | None,
        period_s: float,
        own: Callable[[], Mapping[str, float]],
    ) -> None:
        self._coordinator = coordinator
        self._own = own
        row_bytes = coordinator.region.geometry.row_bytes
        info = info_labels(config, coordinator.namespace.digest.hex(), row_bytes, chunk_tokens)
        self._reporter = Reporter(
            traits(config, coordinator.here), info, gauges=live is None or not live.replaces_reports
        )
        self._period_s = period_s
        self._next_s = 0.0
        self._closed = False
        self._live = None if config.storage else live  # else the supervisor's thread publishes them
        if live is not None:
            coordinator.after_tick(partial(_publish, live, weakref.WeakMethod(self.gauges)))

    def take(self, now_s: float, *, soon: bool) -> OffloadingConnectorStats | None:
        """What has changed since the last report. None if nothing has, or it is not due and more follows `soon`. Called
        once a step."""
        if soon and now_s < self._next_s:
            return None
        self._next_s = now_s + self._period_s
        totals = self._coordinator.counters()
        totals["cpu"] |= self._own()
        problems = self._coordinator.problems()
        with self._coordinator.core() as core:
            samples = core.take_samples()
        if self._live is not None:  # no supervisor, and nothing changes between steps
            self._live.publish(lambda: self._reporter.levels(totals, problems))
        return self._reporter.report(totals, samples, problems)

    def gauges(self) -> Iterable[Level]:
        """All that there are, with their values now. On the supervisor's thread, which goes on in an idle engine."""
        if self._closed:
            return ()
        return self._reporter.levels(self._coordinator.counters(), self._coordinator.problems())

    def close(self) -> None:
        self._closed = True


def _publish(live: LiveGauges, gauges: weakref.WeakMethod[Callable[[], Iterable[Level]]]) -> None:
    if (levels := gauges()) is not None:
        live.tick(levels)
