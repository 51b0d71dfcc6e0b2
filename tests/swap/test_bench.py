"""bench/gpu_swap.py on the fake driver: that it runs and checks bytes. Its times mean nothing here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from nixl_tiers.swap import kernels, self_check
from nixl_tiers.swap.strategies import NAMES
from tests.swap.conftest import ROOT
from tests.swap.fake_gpu import FakeGpu, leftovers


def test_the_sweep_runs(fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "images", lambda *_: iter([("here", lambda: b"image\0")]))
    monkeypatch.setattr(self_check, "SAMPLE_BYTES", 1 << 19)
    spec = importlib.util.spec_from_file_location("gpu_swap", ROOT / "bench" / "gpu_swap.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    fake = FakeGpu(fake_library)
    how = {"ids": "random", "rounds": 1, "has_torch": False, "quick": True, "deadline_s": 1e9}
    found = bench.sweep(fake.driver, 8 << 20, [2048, 1 << 20], [16, 1 << 20], **how)
    (result,) = found["results"]
    assert (result["fragment_bytes"], result["blocks"]) == (2048, 16)
    assert "wrong" not in result
    assert set(result["speeds"]) == {*NAMES, "vLLM's batch"}
    assert result["chosen"] in NAMES
    assert json.loads(json.dumps(found))["ceiling_gb_per_s"].keys() == {"store", "load", "both"}
    fake.check()
    assert not [left for left in leftovers(fake) if left.endswith(("registrations", "events", "modules"))]
    pytest.importorskip("matplotlib")
    bench.plot(found["results"], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size
