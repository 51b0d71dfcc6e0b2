"""The soak itself: some seconds of it find nothing, and a store that errs is found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_tiers.store import TieredStore
from tests.soak import Round, Soak
from tests.support.proxy import FaultProxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture
def soak(proxy: FaultProxy, bucket: str, tmp_path: Path) -> Soak:
    return Soak(tmp_path, proxy, bucket, seed=3, round_s=8.0)


def test_some_seconds_without_a_finding(soak: Soak) -> None:
    rounds: list[Round] = []
    soak.run(15.0, rounds.append)
    assert soak.findings == []
    assert len(rounds) >= 2
    assert all(each.answers and each.faults for each in rounds)
    assert sum(each.hits for each in rounds) > 0


def test_a_wrong_byte_is_a_finding(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TieredStore.get

    def lies(self: TieredStore, keys: list[bytes], out: Any) -> list[bool]:
        hits = honest(self, keys, out)
        for place in np.flatnonzero(hits)[:1]:
            out[place, 7] ^= 1
        return hits

    monkeypatch.setattr(TieredStore, "get", lies)
    soak.run(5.0, lambda _: None)
    assert any("wrong bytes" in finding for finding in soak.findings)


def test_a_row_that_leaks_is_a_finding(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.HEAL_S", 30.0)
    honest = TieredStore._put_part

    leaked: set[int] = set()

    def leaks(self: TieredStore, keys: list[bytes], chunks: Any) -> int:
        epoch = self.coordinator.namespace.epoch  # a reset brings back what was leaked before it
        if epoch not in leaked and self.coordinator.prepare_store([b"leaked"], "leaks").rows:
            leaked.add(epoch)
        return honest(self, keys, chunks)

    monkeypatch.setattr(TieredStore, "_put_part", leaks)
    soak.run(5.0, lambda _: None)
    assert any("rows that do not come back" in finding for finding in soak.findings)
