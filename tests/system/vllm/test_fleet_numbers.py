"""Many engines in one real Prometheus, with a cluster's labels: bytes count once for each place, not for each pod."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from nixl_tiers.base import mounts
from nixl_tiers.base.metrics import INFO, INFO_LABELS, PREFIX
from nixl_tiers.config import schema
from nixl_tiers.vllm.metrics import Reporter, info_labels, traits
from tests.support.dashboard import chosen, panels
from tests.support.prometheus import Prometheus, program, prometheus
from tests.support.waiting import until

GIB: Final = 1 << 30
PODS: Final = range(8)
CPU: Final = {"type": "cpu", "capacity": "64GiB"}
FLEETS: Final[dict[str, dict[str, Any]]] = {
    "bucket": {
        "type": "s3", "bucket": "kv-cache", "prefix": "m", "endpoint": "http://s:1", "capacity": "20TiB"
    },
    "replicas": {"type": "file", "path": "/mnt/nvme/kv", "capacity": "800GiB"},
    "nodes": {"type": "file", "path": "/mnt/nvme/kv", "capacity": "100GiB"},
}  # fmt: skip
"""By namespace: what each of its eight pods is configured with beside host memory."""
MOUNTED: Final = "27 1 259:1 / / rw - ext4 /dev/nvme0n1p1 rw\n40 27 259:3 / /mnt/nvme rw - xfs /dev/nvme1n1 rw\n"


def page(namespace: str, pod: int) -> bytes:
    """What its engine shows: the tiers are full, as far as it knows."""
    config = schema.load({"tiers": [CPU, FLEETS[namespace]]})
    capacity = {"cpu": config.cpu.capacity, config.names[0]: config.storage[0].capacity}
    known = 0 if pod == 3 else 1  # one that has just started has listed nothing
    totals = {name: {"used_bytes": known * most, "capacity_bytes": most} for name, most in capacity.items()}
    registry = CollectorRegistry()
    made: dict[str, Gauge] = {}
    for name, text, labels, value in Reporter(traits(config), info_labels(config, "k" * 32, 1, 1)).levels(totals):
        known_labels = {"model_name": "m", "engine": "0", **dict(labels)}
        if name not in made:
            made[name] = Gauge(name, text, tuple(known_labels), registry=registry)
        made[name].labels(**known_labels).set(value)
    return generate_latest(registry)


class Pages(BaseHTTPRequestHandler):
    def __init__(self, pages: dict[str, bytes], *args: Any) -> None:
        self._pages = pages
        super().__init__(*args)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(self._pages[self.path])

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


class Fleets:
    """What a Prometheus had at a moment. A pod that answers a busy machine too late is absent until the next scrape."""

    def __init__(self, server: Prometheus) -> None:
        self._server = server
        self._moment = time.time() - 3.0  # scrapes that had begun by then have ended

    def values(self, query: str) -> dict[str, float]:
        """By labels."""
        found = self._server.series(query, self._moment, self._moment)
        return {labels: values[-1] for labels, values in found.items()}

    def shown(self, title: str, **variables: str) -> dict[str, float]:
        """By tier: what the panel showed."""
        (query,) = (target["expr"] for panel in panels() if panel["title"] == title for target in panel["targets"])
        found = self.values(chosen(query, model="m", **variables))
        return {json.loads(labels).get("tier", ""): value for labels, value in found.items()}


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    """Each fleet is a namespace. The pods of `nodes` are on nodes of their own, those of `replicas` on one."""
    found = program("prometheus")
    if found is None:
        pytest.skip("needs Prometheus (Debian's package prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "mountinfo").write_text(MOUNTED)
    pages, labelled = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mounts, "_MOUNTS", folder / "mountinfo")
        for namespace in FLEETS:
            for pod in PODS:
                node = folder / ("node" if namespace == "replicas" else f"node-{pod}")
                node.write_text(node.name)
                patch.setattr(mounts, "_BOOT", node)
                at = f"/{namespace}/{pod}"
                pages[at] = page(namespace, pod)
                labelled.append({"__metrics_path__": at, "namespace": namespace, "pod": f"vllm-{pod}", "instance": at})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, pages)) as http:
        thread = Thread(target=http.serve_forever, daemon=True)
        thread.start()
        with prometheus(found, folder, http.server_port, labelled) as it:
            looks: list[Fleets] = []

            def are_whole() -> bool:
                looks.append(Fleets(it))
                return len(looks[-1].values(f"{PREFIX}{INFO}")) == len(pages)

            until(are_whole, "all pods to be scraped")
            yield looks[-1]
        http.shutdown()
        thread.join()


def test_what_engines_share_counts_once_and_one_pod_can_be_chosen(fleets: Fleets) -> None:
    for namespace, storage in (
        ("bucket", {"s3": 20 * 1024 * GIB}),
        ("replicas", {"file": 800 * GIB}),
        ("nodes", {"file": 7 * 100 * GIB}),  # one of eight has listed nothing
    ):
        assert fleets.shown("Used", namespace=namespace) == {"cpu": 7 * 64 * GIB, **storage}
        of_all = {name: size * (8 / 7 if namespace == "nodes" else 1) for name, size in storage.items()}
        assert fleets.shown("May be used", namespace=namespace) == {"cpu": 8 * 64 * GIB, **of_all}
        in_use = fleets.shown("Budget in use", namespace=namespace)
        assert in_use == {"": pytest.approx(7 / 8 if namespace == "nodes" else 1.0)}, "of storage, not of host memory"
    # The two paths of one name are places of their own: on one node, and on eight others.
    assert fleets.shown("Used") == {"cpu": 21 * 64 * GIB, "s3": 20 * 1024 * GIB, "file": 1500 * GIB}
    assert fleets.shown("Used", namespace="nodes", pod="vllm-2") == {"cpu": 64 * GIB, "file": 100 * GIB}
    assert fleets.shown("Used", namespace="nodes", pod="vllm-3") == {"cpu": 0, "file": 0}


def test_no_label_of_ours_is_renamed(fleets: Fleets) -> None:
    """A label that the cluster gives, too, comes as exported_..."""
    found = [json.loads(labels) for labels in fleets.values(f'{{__name__=~"{PREFIX}.*"}}')]
    assert not [label for labels in found for label in labels if label.startswith("exported_")]
    assert {labels["namespace"] for labels in found} == set(FLEETS)
    assert all(set(INFO_LABELS) <= set(labels) for labels in found if labels["__name__"] == "nixl_tiers:info")
