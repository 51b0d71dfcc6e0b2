"""Gauges of an idle engine: what it publishes shows at every scrape of its parent, or of all API servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("vllm")


from tests.support.file_tier import file_tier
from tests.support.waiting import until
from tests.vllm.test_live import Page, manager_of

PARENT = """
    import multiprocessing, os, sys
    from prometheus_client import CollectorRegistry, Gauge, REGISTRY, generate_latest, multiprocess
    from nixl_tiers.vllm import live

    def engine(number, values, pipe):
        gauges = live.LiveGauges("m", number)
        for value in values:
            levels = [("nixl_tiers:unknown", "", (), 1.0), ("nixl_tiers:up", "Text.", (("tier", "file"),), value)]
            gauges.publish(lambda: levels)
        pipe.send("idle")
        pipe.recv()

    def scrape():
        if not live._directory():
            return generate_latest(REGISTRY).decode()
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return generate_latest(registry).decode()

    if __name__ == "__main__":
        live.show()
        Gauge("nixl_tiers:up", "Text.", ["model_name", "engine", "tier"])
        spawn = multiprocessing.get_context("spawn")
        pipes = []
        for number, values in ((0, [1.0, 0.0]), (1, [1.0])):
            here, there = spawn.Pipe()
            spawn.Process(target=engine, args=(number, values, there)).start()
            assert here.recv() == "idle"
            pipes.append(here)
        for _ in range(2):
            print("\\n".join(line for line in scrape().splitlines() if "nixl_tiers:up" in line))
        for pipe in pipes:
            pipe.send("exit")
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
    assert sorted({line for line in shown.stdout.split("\n") if line}) == [
        "# HELP nixl_tiers:up Text.",
        "# TYPE nixl_tiers:up gauge",
        'nixl_tiers:up{engine="0",model_name="m",tier="file"} 0.0',
        'nixl_tiers:up{engine="1",model_name="m",tier="file"} 1.0',
    ]


def test_tier_that_fails_in_an_idle_engine_shows(page: Page, tmp_path: Path) -> None:
    """The engine takes no step: its file tier's mover dies, and cannot open the tier again."""
    manager = manager_of(tmp_path, file_tier(tmp_path / "kv", "1MiB"))
    until(lambda: page().get("nixl_tiers:up file") == 1, "the tier to be up", timeout_s=120)
    shown = page()
    assert (shown["nixl_tiers:info"], shown["nixl_tiers:breaker file"], shown["nixl_tiers:denials file"]) == (1, 0, 0)
    (tmp_path / "kv").rename(tmp_path / "gone")
    (tmp_path / "kv").write_text("no directory")
    for pid in manager._coordinator.mover_pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    until(lambda: page()["nixl_tiers:up file"] == 0, "the failure", timeout_s=120)
    until(lambda: page()["nixl_tiers:breaker file"] == 2, "an open circuit", timeout_s=120)
    assert manager._coordinator.problems()["file"]
    manager.shutdown()
