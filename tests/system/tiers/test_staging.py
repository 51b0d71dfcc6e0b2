"""Staging of slabs, whatever moves them: what arrives, and that buffers come back after failures."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers import staging as module
from nixl_tiers.tiers.nixl_agent import Transfer, TransferState
from nixl_tiers.tiers.slab.tier import SlabTier
from nixl_tiers.tiers.slab.transfers import NixlTransfers
from tests.mover.harness import NAMESPACE, key_of, wait_until
from tests.system.tiers.file_tiers import GEOMETRY, ROWS, load, make_tier, store

OK = {Outcome.OK}
WAYS = pytest.mark.parametrize("layout", ["slabs", "slabs by NIXL"])


def opened(layout: str, path: Path, region: HostRegion, *, staged: bool) -> SlabTier:
    tier = make_tier(layout, path, region, staged=staged)
    assert isinstance(tier, SlabTier)
    tier.open(NAMESPACE, 0)
    for _ in tier.list_rows():
        pass
    return tier


def in_use(tier: SlabTier) -> int:
    """Places of both buffers that are taken."""
    buffers = [direction._buffer for direction in (tier._staging.loads, tier._staging.stores)]
    return sum(len(buffer.rows) - len(buffer._free) for buffer in buffers if buffer is not None)


@WAYS
def test_rows_are_the_same_as_without(layout: str, tmp_path: Path, region: HostRegion) -> None:
    tier = opened(layout, tmp_path / "kv", region, staged=True)
    assert tier.staged == (True, True)
    assert set(store(tier, region, range(ROWS))) == set(load(tier, region, range(ROWS))) == OK
    assert not in_use(tier)
    staged = region.rows_view.copy()
    sealer = Sealer(GEOMETRY, NAMESPACE, 0)
    assert all(sealer.verify(staged[row], key_of(row)) is Verdict.OK for row in range(ROWS))
    tier.close()
    direct = opened(layout, tmp_path / "kv", region, staged=False)
    assert direct.staged == (False, False)
    assert set(load(direct, region, range(ROWS))) == OK
    assert np.array_equal(region.rows_view, staged)
    direct.close()


def test_failed_transfers_are_tried_alone_and_give_their_places_back(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened("slabs by NIXL", tmp_path / "kv", region, staged=True)
    assert isinstance(tier._transfers, NixlTransfers)
    assert set(store(tier, region, range(ROWS))) == OK
    for name, action in (("read", load), ("write", store)):
        with monkeypatch.context() as patch:
            patch.setattr(tier._transfers.agent, name, lambda _: Transfer(None, None, TransferState.FAILED))
            assert set(action(tier, region, range(ROWS))) == {Outcome.FAILED}
        assert not in_use(tier)
    assert wait_until(lambda: set(store(tier, region, range(ROWS))) == OK)
    assert set(load(tier, region, range(ROWS))) == OK
    tier.close()


def test_without_memory_for_the_buffer_rows_are_moved_directly(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(module, "Buffer", refuse)
    tier = opened("slabs", tmp_path / "kv", region, staged=True)
    assert tier.staged == (False, False)
    assert set(store(tier, region, range(ROWS))) == set(load(tier, region, range(ROWS))) == OK
    tier.close()
