from __future__ import annotations

import ctypes
import datetime as dt
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nixl_tiers.base import native
from nixl_tiers.swap import host
from tools import gpu_age

ROOT = Path(__file__).parents[2]
_passed_on_gpu: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and "gpu" in report.keywords:
        _passed_on_gpu.add(report.nodeid)


def pytest_sessionfinish(exitstatus: int) -> None:
    """Once all tests that need a GPU have passed on one: note which code, where and when."""
    commit = gpu_age.git("rev-parse", "HEAD") or os.environ.get("NIXL_TIERS_COMMIT")  # a copy of the tree has no git
    if exitstatus == 0 and commit and len(_passed_on_gpu) >= gpu_age.WHOLE:
        gpu_age.LAST_RUN.write_text(json.dumps(last_run(commit), indent=2) + "\n")


def last_run(commit: str) -> dict[str, object]:
    import torch

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "title": "The last run of the tests that need a GPU",
        "machine": f"{torch.cuda.get_device_name()}, driver {driver}",
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "commit": commit,
        "passed": len(_passed_on_gpu),
        "tables": [],
    }


@pytest.fixture(scope="session")
def compiler() -> str:
    """A C compiler, or the reason for skipping."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler here")
    return found


@pytest.fixture(scope="session")
def library_path(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("swap") / "swap_cpu.so"
    flags = ["-O3", "-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-shared", "-fPIC"]
    sources = [str(ROOT / "csrc" / name) for name in ("swap_cpu.c", "swap_step.c")]
    subprocess.run([compiler, *flags, "-o", str(path), *sources], check=True)
    return path


@pytest.fixture(scope="session")
def library(library_path: Path) -> ctypes.CDLL:
    """csrc/swap_cpu.c as it is now, whatever is installed."""
    return host._open(native.SWAP_CPU._replace(path=str(library_path)))


KERNELS = ["auto", "plain", "avx2", "avx512"]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every kernel that HostSwap has. One that this processor does not support runs as the best that it supports."""
    name: str = request.param
    monkeypatch.setattr(host, "_library", lambda: library)
    monkeypatch.setattr(host, "KERNEL_AUTO", KERNELS.index(name))
    return name
