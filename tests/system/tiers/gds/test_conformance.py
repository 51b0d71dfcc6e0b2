"""The file tier keeps the contract with `backend: gds_mt`: NVIDIA's cuFile and NIXL's plugin, the real ones.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nixl_tiers.testing.conformance import StorageTierTests

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
