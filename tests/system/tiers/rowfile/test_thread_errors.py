"""An unexpected error of what a thread does for the tier reaches the mover's loop, and so ends the mover."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.rowfile.namespace import NamespaceRows
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from tests.mover.harness import NAMESPACE, key_of
from tests.system.tiers.file_tiers import make_tier, store


def fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.fixture
def open_tier(tmp_path: Path, region: HostRegion) -> Callable[[], RowFileTier]:
    def opened() -> RowFileTier:
        tier = make_tier("files", tmp_path, region)
        assert isinstance(tier, RowFileTier)
        tier.open(NAMESPACE, 0)
        for _ in tier.list_rows():
            time.sleep(0.001)
        return tier

    return opened


def poll_until_it_raises(tier: RowFileTier) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        tier.poll()
        time.sleep(0.001)


def test_error_of_a_delete_is_raised(open_tier: Callable[[], RowFileTier], region: HostRegion) -> None:
    tier = open_tier()
    store(tier, region, range(1))
    tier._directory.delete_unless_used = fail  # type: ignore[method-assign]
    tier.delete([(0, key_of(0))])
    with pytest.raises(ZeroDivisionError):
        poll_until_it_raises(tier)


def test_error_after_a_load_is_raised(open_tier: Callable[[], RowFileTier], region: HostRegion, tmp_path: Path) -> None:
    tier = open_tier()
    store(tier, region, range(1))
    (row,) = tmp_path.rglob("*.row")
    os.truncate(row, 4096)
    tier._directory.delete_unless_replaced = fail  # type: ignore[method-assign]
    tier.load([Move(0, 0, key_of(0), seal=False)])
    with pytest.raises(ZeroDivisionError):
        poll_until_it_raises(tier)


def test_error_while_rows_are_left_out_of_a_listing_is_raised(
    open_tier: Callable[[], RowFileTier], region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(open_tier(), region, range(1))
    rooms = iter([5])
    monkeypatch.setattr(NamespaceRows, "room", property(lambda _: next(rooms, -1)))
    monkeypatch.setattr(NamespaceRows, "unlist", lambda _, rows: 1 // (len(rows) == 0))
    with pytest.raises(ZeroDivisionError):
        open_tier()
