"""Gauges of an idle engine: what it publishes shows at every scrape of its parent, or of all API servers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm.live import LiveGauges

PARENT = """
    import multiprocessing, os, sys
    from prometheus_client import CollectorRegistry, Gauge, REGISTRY, generate_latest, multiprocess
    from nixl_tiers.vllm import live

    def engine(number, values):
        gauges = live.LiveGauges(number)
        for value in values:
            levels = [("nixl_tiers:up", {"tier": "file"}, value), ("nixl_tiers:unknown", {}, 1.0)]
            gauges.publish(levels)

    def scrape():
        if not live._directory():
            return generate_latest(REGISTRY).decode()
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return generate_latest(registry).decode()

    if __name__ == "__main__":
        live.show()
        known = Gauge("vllm:num_requests_running", "", ["model_name", "engine"], multiprocess_mode="mostrecent")
        for number in "01":
            known.labels("m", number).set(0)
        Gauge("nixl_tiers:up", "1 while the tier's medium is open, else 0.", ["model_name", "engine", "tier"])
        for number, values in ((0, [1.0, 0.0]), (1, [1.0])):
            child = multiprocessing.get_context("spawn").Process(target=engine, args=(number, values))
            child.start()
            child.join()
            assert child.exitcode == 0
        for _ in range(2):
            print("\\n".join(line for line in scrape().splitlines() if "nixl_tiers:up" in line))
"""


@pytest.mark.parametrize("servers", ["one", "several"])
def test_what_an_engine_has_published_shows_as_one_series_each(servers: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    environment = {"PYTHONPATH": ":".join(sys.path)}
    if servers == "several":
        (tmp_path / "metrics").mkdir()
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path / "metrics")
    shown = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert shown.returncode == 0, shown.stderr
    lines = {line for line in shown.stdout.split("\n") if line and not line.startswith("# HELP")}
    assert sorted(lines) == [
        "# TYPE nixl_tiers:up gauge",
        'nixl_tiers:up{engine="0",model_name="m",tier="file"} 0.0',
        'nixl_tiers:up{engine="1",model_name="m",tier="file"} 1.0',
    ]


def test_an_engine_that_nobody_reads_looks_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    live, now = LiveGauges(0), [1000.0]
    monkeypatch.setattr("nixl_tiers.vllm.live.time.monotonic", lambda: now[0])
    monkeypatch.setattr("nixl_tiers.vllm.live._memfd_of", lambda _: None)
    tries = 0
    for _ in range(3600):
        if live.due():
            tries += 1
            live.publish([])
        now[0] += 1.0
    assert tries < 70
    assert not live.replaces_reports
