from __future__ import annotations

import json
from pathlib import Path

import pytest

from nixl_tiers.cli import doctor, main
from nixl_tiers.swap import kernels
from nixl_tiers.swap.autotune import Measured
from nixl_tiers.swap.driver import Driver, NoDriver


def no_driver() -> Driver:
    raise NoDriver("there is no CUDA driver here: it was hidden")


def test_missing_gpu_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "open_driver", no_driver)
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "copies in host memory: " in output
    assert "GPU: there is no CUDA driver here: it was hidden\n" in output


def test_cached_measurements_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "open_driver", no_driver)
    folder = kernels.cache_folder()
    assert folder
    measured = Measured(
        {"store": [{"16": {"copy_engine": 2e-6, "staged": 1e-6}}], "load": [{"16": {"copy_engine": 1e-6}}]}
    )
    folder.mkdir()
    about = {"gpu": "A GPU", "driver": 13000}
    (folder / "choice-1.json").write_text(json.dumps({"about": about, "seconds": measured.seconds}))
    (folder / "choice-2.json").write_text("{")
    (folder / "choice-3.json").write_text('{"seconds": 7}')
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "measured on A GPU, driver 13000 (choice-1.json):" in output
    assert "  store, group 0, 16 blocks: staged (staged 1 us, copy_engine 2 us)" in output
    assert "it cannot be read, and is measured again" in output
