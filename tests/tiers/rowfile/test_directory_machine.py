"""The bound of a shared directory, and what expires, in any order of what engines and servers do."""

from __future__ import annotations

import pytest

from nixl_tiers.tiers.rowfile import budget as budget_module
from nixl_tiers.tiers.rowfile import evict as evict_module
from nixl_tiers.tiers.rowfile.evict import FANOUTS
from tests.tiers.rowfile.directory_machine import (
    DIRECTORIES,
    LEAST_ROWS,
    SAMPLE,
    SHARE,
    explore,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, windows and directories, so that engines meet."""
    monkeypatch.setattr(budget_module, "WINDOW_SHARE", SHARE)
    monkeypatch.setattr(budget_module, "WINDOW_ROWS", LEAST_ROWS)
    monkeypatch.setattr(evict_module, "FANOUTS", FANOUTS[:DIRECTORIES])
    monkeypatch.setattr(evict_module, "SAMPLE_ROWS", SAMPLE)


@pytest.mark.parametrize("engines", [1, 2, 8])
def test_bound_holds_in_any_order_of_events(engines: int) -> None:
    assert explore(range(100, 120), engines=engines) > 1500


def test_rows_expire_and_engines_go_on_storing() -> None:
    explore(range(200, 224), 400, settle=True)
