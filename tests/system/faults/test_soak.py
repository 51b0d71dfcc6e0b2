"""The soak test itself: a short run has no finding, and wrong bytes and leaked rows are findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_tiers.store import TieredStore
from tests.soak import RoundResult, Soak
from tests.support.proxy import FaultProxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture
def soak(proxy: FaultProxy, bucket: str, tmp_path: Path) -> Soak:
    return Soak(tmp_path, proxy, bucket, seed=3, round_s=8.0)


def test_short_run_has_no_finding(soak: Soak) -> None:
    rounds: list[RoundResult] = []
    soak.run(10.0, rounds.append)
    assert soak.findings == []
    assert len(rounds) >= 2
    assert all(each.requests and each.faults for each in rounds)
    assert sum(each.hits for each in rounds) > 0


def test_wrong_byte_is_a_finding(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TieredStore.get

    def flip_byte(self: TieredStore, keys: list[bytes], out: Any) -> list[bool]:
        hits = original(self, keys, out)
        for index in np.flatnonzero(hits)[:1]:
            out[index, 7] ^= 1
        return hits

    monkeypatch.setattr(TieredStore, "get", flip_byte)
    soak.run(5.0, lambda _: None)
    assert any("wrong bytes" in finding for finding in soak.findings)


def test_leaked_row_is_a_finding(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.RECOVERY_S", 30.0)
    original = TieredStore._put_part

    leaked: set[int] = set()

    def leak_row(self: TieredStore, *arguments: Any) -> Any:
        epoch = self.coordinator.namespace.epoch  # a reset frees the rows that were leaked before it
        if epoch not in leaked and self.coordinator.prepare_store("leak", [b"leaked"]).rows:
            leaked.add(epoch)
        return original(self, *arguments)

    monkeypatch.setattr(TieredStore, "_put_part", leak_row)
    soak.run(5.0, lambda _: None)
    assert any("rows leaked" in finding for finding in soak.findings)
