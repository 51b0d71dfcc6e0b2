"""An unexpected error of what a thread does for the tier reaches the mover's loop, and so ends the mover."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.rowfile.contents import Contents
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from tests.mover.harness import NAMESPACE, key_of
from tests.system.tiers.file_tiers import make_tier, store


def fail(*_: object) -> None:
    raise ZeroDivisionError


def opened(path: Path, region: HostRegion) -> RowFileTier:
    tier = make_tier("files", path, region)
    assert isinstance(tier, RowFileTier)
    tier.open(NAMESPACE, 0)
    return tier


def poll_until_it_raises(tier: RowFileTier) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        tier.poll()
        time.sleep(0.001)


def test_error_after_a_load_is_raised(region: HostRegion, tmp_path: Path) -> None:
    tier = opened(tmp_path, region)
    store(tier, region, range(1))
    (row,) = tmp_path.rglob("*.row")
    os.truncate(row, 4096)
    tier.directory.delete_unless_replaced = fail  # type: ignore[method-assign]
    tier.load([Move(0, 0, key_of(0), seal=False)])
    with pytest.raises(ZeroDivisionError):
        poll_until_it_raises(tier)
    tier.close()


def test_error_of_a_sweep_is_raised(region: HostRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contents, "sweep", fail)
    tier = opened(tmp_path, region)
    with pytest.raises(ZeroDivisionError):
        poll_until_it_raises(tier)
    tier.close()
