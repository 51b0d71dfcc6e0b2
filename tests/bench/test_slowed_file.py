"""The file tier of a bench that loads no faster than it is told."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import nixl_tiers
from tests.support.file_tier import file_tier

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 1 << 20


def test_loads_take_as_long_as_their_bytes_at_that_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    speed = tmp_path / "speed"
    speed.write_text("0")
    kind = "bench.slowed_file:SlowedFileConfig"
    slowed = file_tier(tmp_path / "files", "64MiB", type=kind, speed=str(speed))
    tiers = [{"type": "cpu", "capacity": "8MiB"}, slowed]
    keys = [b"%d" % number for number in range(20)]
    rows = np.random.default_rng(1).integers(0, 256, (20, CHUNK), np.uint8)
    with nixl_tiers.open({"tiers": tiers}, chunk_bytes=CHUNK, namespace="slowed") as store:
        assert store.wait_ready(300)
        for first in (0, 4, 8, 12, 16):  # the host holds six
            assert store.put(keys[first : first + 4], rows[first : first + 4]) == 4
            assert store.flush(300)
        assert store.locate(keys[:4]) == ["file"] * 4
        speed.write_text("50")
        out = np.empty((4, CHUNK), np.uint8)
        began_s = time.monotonic()
        assert store.get(keys[:4], out) == [True] * 4
        assert time.monotonic() - began_s >= 4 * CHUNK / 50e6
        assert (out == rows[:4]).all()
