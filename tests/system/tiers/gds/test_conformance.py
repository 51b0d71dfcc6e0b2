"""The file tier keeps the contract with `backend: gds_mt`: NVIDIA's cuFile and NIXL's plugin, the real ones.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nixl_tiers.testing.conformance import StorageTierTests
from tests.support.no_gpu import NoGpu

from .conftest import ROOT

METHODS = sum(name.startswith("test_") for name in vars(StorageTierTests))


def test_contract_is_kept_through_cufile(run: Callable[..., Any]) -> None:
    cases = run("conformance_cases.py::TestSlabsThroughCuFile")
    assert not cases.failed, cases.output
    assert not cases.skipped, cases.output
    assert cases.total >= METHODS
    assert min(cases.through_cufile) > 1 << 20


def test_fallback_to_posix_is_caught(run: Callable[..., Any]) -> None:
    """The canary is alive: without cuFile's own statistics these cases would pass."""
    cases = run("conformance_cases.py::TestSlabsThroughCuFile", "-k", "one_row_at_a_time", backend="posix")
    assert cases.failed
    assert "cuFile's own statistics have 0 bytes" in cases.output
    assert cases.through_cufile == (0, 0)


LEAVE = """import ctypes, os, sys
assert ctypes.CDLL(None).shmget(os.getpid(), 64, 0o1600) >= 0  # IPC_CREAT
os.execv(sys.executable, sys.argv[1:])"""
COUNT = """import ctypes
from nixl_tiers.tiers.nixl_agent import Agent
opened = Agent.gds_mt()
print(ctypes.CDLL("libcufile.so.0").cuFileGetStatsL1((ctypes.c_uint64 * 512)()))"""


def test_statistics_of_a_killed_process_are_not_in_the_way(no_gpu: NoGpu, cufile_place: Path) -> None:
    """cuFile keeps them under the pid, and pids come round within a run of all tests."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVE, sys.executable, "-c", COUNT],
        env=os.environ | no_gpu.environment(cufile_place),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split()[-1] == "0", ended
