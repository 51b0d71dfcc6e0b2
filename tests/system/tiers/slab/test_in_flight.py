"""How much a slab tier has in flight, by bytes and requests, and what follows from how fast it writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.nixl_agent import Agent, Span, Transfer
from nixl_tiers.tiers.slab import in_flight, transfers
from nixl_tiers.tiers.slab.in_flight import (
    StoreWindow,
    request_bytes,
)
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import NAMESPACE, key_of
from tests.system.tiers.file_tiers import GEOMETRY, load, make_tier, store


def test_rows_are_loaded_by_requests_of_that_size_up_to_so_many_rows_at_a_time(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "REQUEST_BYTES", 4 * 4096)
    monkeypatch.setattr(in_flight, "REQUEST_ROOM", 4096)
    monkeypatch.setattr(in_flight, "LOADS_BYTES", 5 * GEOMETRY.row_bytes)
    monkeypatch.setattr(transfers, "_UNIT_ROWS", 2)
    tier = make_tier("slabs by NIXL", tmp_path, region, staged=False)
    tier.open(NAMESPACE, 0)
    assert set(store(tier, region, range(8))) == {Outcome.OK}
    asked: list[Sequence[Span]] = []
    read = Agent.read

    def counted(agent: Agent, spans: Sequence[Span]) -> Transfer:
        asked.append(spans)
        return read(agent, spans)

    monkeypatch.setattr(Agent, "read", counted)
    tier.load([Move(row, row, key_of(row)) for row in range(8)])
    size, row_bytes = request_bytes(GEOMETRY.row_bytes), GEOMETRY.row_bytes
    requests = -(-row_bytes // size)
    assert requests == 3
    assert [len(spans) for spans in asked] == [2 * requests] * 2, "units of two rows, within five, before any poll"
    for row in (asked[0][:requests], asked[0][requests:]):
        ends = [(address + nbytes, offset + nbytes, device) for address, nbytes, offset, device in row]
        assert ends[:-1] == [(address, offset, device) for address, _, offset, device in row[1:]]
        assert sum(nbytes for _, nbytes, _, _ in row) == row_bytes
    while tier.busy:
        tier.poll()
    assert set(load(tier, region, range(8))) == {Outcome.OK}
    tier.close()


@pytest.mark.parametrize("layout", ["slabs by NIXL", "slabs"])
def test_stores_wait_for_each_other_by_what_the_medium_writes(
    layout: str, tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, written = {"slow": 2, "fast": 6}, StoreWindow.written
    monkeypatch.setattr(in_flight, "STORES_BYTES", tuple(each * GEOMETRY.row_bytes for each in rows.values()))
    monkeypatch.setattr(transfers, "_UNIT_ROWS", 1)
    monkeypatch.setattr(transfers, "_WORKER_UNIT_ROWS", 1)
    tier = make_tier(layout, tmp_path, region, staged=False)
    assert isinstance(tier, SlabTier)
    tier.open(NAMESPACE, 0)
    assert set(store(tier, region, range(8))) == {Outcome.OK}  # so that they need no room next
    stores = tier._moves.stores
    monkeypatch.setattr(StoreWindow, "written", lambda window, *_: written(window, 1, seconds))
    for medium, seconds in (("slow", 1e3), ("fast", 1e-6)):
        for _ in range(in_flight._SAMPLES):
            written(tier._transfers._window, 1, seconds)
        assert set(store(tier, region, range(1))) == {Outcome.OK}  # whose end applies it
        most = 0
        tier.store([Move(row, row, key_of(row), seal=True) for row in range(8)])
        while tier.busy:
            most = max(most, stores.rows_moving)
            tier.poll()
        assert most == rows[medium]
    tier.close()
