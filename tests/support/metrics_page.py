"""A store's numbers at /metrics without vLLM: the series of `base/metrics.py`, by prometheus_client as there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from nixl_tiers.base.metrics import INFO, INFO_LABELS, METRICS, PREFIX, Kind, published
from nixl_tiers.base.tier_traits import TierTraits

ENGINE = {"model_name": "a model", "engine": "0"}
"""vLLM's own labels."""

Totals = Mapping[str, Mapping[str, float]]
Samples = Mapping[tuple[str, str], Sequence[float]]


class StorePage(CollectorRegistry):
    """Reads the numbers at each scrape. `planted`: (tier, number) -> what is added to it; `lost`: vLLM goes on without
    showing that nixl_tiers is there."""

    def __init__(self, tiers: list[TierTraits], totals: Callable[[], Totals], samples: Callable[[], Samples]) -> None:
        super().__init__()
        self.planted: dict[tuple[str, str], float] = {}
        self.planted_samples: dict[tuple[str, str], list[float]] = {}
        self.lost = False
        self._totals, self._samples = totals, samples
        self._series = published(tiers)
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            labels = (*ENGINE, *metric.labels)
            if metric.kind is Kind.HISTOGRAM:
                made: Any = Histogram(PREFIX + name, metric.text, labels, registry=self, buckets=metric.buckets or ())
            else:
                made = (Counter if metric.kind is Kind.COUNTER else Gauge)(
                    PREFIX + name, metric.text, labels, registry=self
                )
            self._metrics[name] = made
        info = Gauge(PREFIX + INFO, "", (*ENGINE, *INFO_LABELS), registry=self)
        info.labels(*ENGINE.values(), "1.0", "0" * 32, "65536", "16", "file: /kv").set(1)
        Gauge("vllm:num_requests_running", "", tuple(ENGINE), registry=self).labels(*ENGINE.values()).set(1)

    def collect(self) -> Iterable[Metric]:
        totals, samples = self._totals(), self._samples()
        for (tier, number), (name, metric, labels) in self._series.items():
            series = self._metrics[name].labels(*ENGINE.values(), *labels)
            if metric.kind is Kind.HISTOGRAM:
                for value in (*samples.get((tier, number), ()), *self.planted_samples.get((tier, number), ())):
                    series.observe(value)
            else:
                value = totals[tier].get(number, 0.0) + self.planted.get((tier, number), 0.0)
                series._value.set(value)
        return (metric for metric in super().collect() if not (self.lost and metric.name == PREFIX + INFO))


@contextmanager
def served(page: StorePage) -> Iterator[int]:
    """Its port on the loopback interface. Always text, since prometheus_client writes `:` as `_` in OpenMetrics for a
    Prometheus before 3.0, as a test may have (docs/guide/alerts.md)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = generate_latest(page)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()
