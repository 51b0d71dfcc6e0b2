"""How many threads a native worker has: its part of a quarter of the cores."""

from __future__ import annotations

import os

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.slab import worker
from tests.support.file_tier import file_config


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(2, 1, 2), (8, 1, 2), (12, 1, 3), (16, 1, 4), (32, 1, 8), (64, 1, 8), (64, 4, 4), (64, 8, 2), (128, 16, 2)],
)
def test_threads_follow_from_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert worker.threads_of(workers) == threads


@pytest.mark.parametrize(("movers", "replicas", "threads"), [(1, None, 8), (2, None, 8), (4, 1, 4), (2, 4, 2)])
def test_directories_and_replicas_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str], movers: int, replicas: int | None, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    made: list[int] = []
    monkeypatch.setattr(worker, "Worker", lambda region, geometry, threads: made.append(threads))
    geometry = Geometry(1, 4096)
    region = HostRegion.create(geometry, 1)
    worker.open_worker(file_config(tmp_path, "1GiB", replicas=replicas), region, geometry, movers)
    assert made == [threads]
    region.close()
