from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from nixl_tiers.base import native
from nixl_tiers.swap import host

ROOT = Path(__file__).parents[2]


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
