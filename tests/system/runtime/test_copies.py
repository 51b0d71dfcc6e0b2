"""Movers start no store while the engine copies rows out of the host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import moves as moves_module
from nixl_tiers.tiers.base import Move
from tests.mover.harness import key_of, payload
from tests.runtime.test_copies import KEYS
from tests.support.times import changed
from tests.system.tiers import file_tiers


def test_get_holds_stores_while_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []

    class Out(np.ndarray[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            held.append(store.coordinator.region.stores_held_until_s)
            super().__setitem__(key, value)

    monkeypatch.setattr("nixl_tiers.store._out_of", lambda out, *_: out)
    with nixl_tiers.open({"tiers": [{"type": "cpu", "capacity": "1MiB"}]}, 1000, "test") as store:
        store.put(KEYS, np.ones((2, 1000), np.uint8))
        assert store.get(KEYS, np.zeros((2, 1000), np.uint8).view(Out)) == [True, True]
        assert len(held) == 2
        assert all(held)
        assert store.coordinator.region.stores_held_until_s == 0


@pytest.mark.parametrize("layout", ["slabs", "files"])
def test_file_tier_starts_no_store_while_they_are_held(layout: str, tmp_path: Path) -> None:
    with HostRegion.create(file_tiers.GEOMETRY, 2) as region:
        tier = file_tiers.make_tier(layout, tmp_path, region, times=changed(stores_held_s=3600.0))
        tier.open(bytes(16), 0)
        list(tier.list_rows())
        assert file_tiers.store(tier, region, range(1)) == [Outcome.OK]
        region.stores_held_until_s = time.monotonic() + 3600.0
        region.rows_view[0] = payload(1, file_tiers.GEOMETRY)
        batch = tier.store([Move(0, 1, key_of(1), seal=True)])
        for _ in range(50):
            assert tier.poll() == []
            assert tier.poll_s == moves_module.HELD_POLL_S, "a mover need not look more often"
            time.sleep(0.002)
        region.stores_held_until_s = 0.0
        assert file_tiers.outcomes(tier, batch) == [[Outcome.OK]]
        tier.close()
