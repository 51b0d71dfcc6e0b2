"""The doctor on NVIDIA's cuFile and NIXL's plugin, the real ones, and the fake CUDA driver.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.cli.gds.verdict import EXIT_CODES, Kind
from tests.support.no_gpu import NoGpu
from tests.swap.fake_gpu import as_cuda

ROOT = Path(__file__).parents[4]
TIMEOUT_S = 500.0
TRANSFERS = 13
# The command, whose steps may take as long as a busy machine takes.
PATIENT = """
import sys
from nixl_tiers.cli import main
from nixl_tiers.cli.gds import report
report.examine.__kwdefaults__["deadline_s"] = 100.0
sys.exit(main(sys.argv[1:]))
"""

Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def fake_cuda(fake_library: Path, tmp_path: Path) -> Path:
    """A folder with libcuda.so.1 and libcudart.so.12."""
    return as_cuda(fake_library, tmp_path)


@pytest.fixture
def doctor(no_gpu: NoGpu, cufile_place: Path) -> Doctor:
    """Its exit code and report, in a process of its own."""

    def run(*program: str, **options: Any) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, *(program or ("-c", PATIENT)), "doctor", "--gds", str(cufile_place), "--json"]
        environment = os.environ | no_gpu.environment(cufile_place, **options)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
        return done.returncode, json.loads(done.stdout)

    return run


def test_real_cufile_on_a_fake_gpu_is_compatibility(doctor: Doctor, fake_cuda: Path) -> None:
    code, found = doctor(cuda=fake_cuda)
    assert (code, found["verdict"]) == (EXIT_CODES[Kind.COMPATIBILITY], Kind.COMPATIBILITY), found
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["NIXL GDS_MT"]["status"] == "ok"
    for name in ("host memory", "GPU, cuMemAlloc", "GPU, cuMemCreate"):
        assert (checks[name]["details"]["registered"], len(checks[name]["details"]["sizes"])) == (True, TRANSFERS), name
    counted = checks["GPU, cuMemAlloc"]["details"]["after"]["cufile"]
    for direction in ("reads", "writes"):
        assert counted[direction] == counted[f"posix_{direction}"] >= TRANSFERS  # large ones are counted in parts
        assert (counted[f"nvfs_{direction}"], counted[f"p2p_{direction}"]) == (0, 0)


def test_real_cufile_that_spins_is_unavailable(doctor: Doctor) -> None:
    code, found = doctor("-m", "nixl_tiers.cli", modules=False)
    assert (code, found["verdict"]) == (EXIT_CODES[Kind.UNAVAILABLE], Kind.UNAVAILABLE)
    assert found["reason"] == "cuFileDriverOpen did not return within 10 s"
