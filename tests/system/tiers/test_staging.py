"""Staging of slabs, whatever moves them: what arrives, what waits, and that buffers come back after failures."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers import staging as module
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.move_queue import Steps
from nixl_tiers.tiers.nixl_agent import Agent, Transfer, TransferState
from nixl_tiers.tiers.slab.tier import SlabTier
from nixl_tiers.tiers.slab.transfers import NixlTransfers, WorkerTransfers
from nixl_tiers.tiers.slab.worker import Moved, Worker
from tests.mover.harness import NAMESPACE, key_of, wait_until
from tests.system.tiers.file_tiers import GEOMETRY, ROWS, load, make_tier, store


@pytest.fixture(params=["slabs", "slabs by NIXL"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tier(layout: str, tmp_path: Path, region: HostRegion) -> Iterator[SlabTier]:
    tier = slab_tier(layout, tmp_path / "kv", region, staged=True)
    serve(tier)
    yield tier
    tier.close()


def slab_tier(layout: str, path: Path, region: HostRegion, *, staged: bool | None = None) -> SlabTier:
    tier = make_tier(layout, path, region, staged=staged)
    assert isinstance(tier, SlabTier)
    return tier


def serve(tier: SlabTier) -> None:
    tier.open(NAMESPACE, 0)
    for _ in tier.list_rows():
        pass


def in_use(tier: SlabTier) -> int:
    """Places of both buffers that are taken."""
    buffers = [direction._buffer for direction in (tier._staging.loads, tier._staging.stores)]
    return sum(len(buffer.rows) - len(buffer._free) for buffer in buffers if buffer is not None)


def worker_of(tier: SlabTier) -> Worker | None:
    return tier._transfers.worker if isinstance(tier._transfers, WorkerTransfers) else None


def agent_of(tier: SlabTier) -> Agent:
    """Of a tier whose rows NIXL moves."""
    assert isinstance(tier._transfers, NixlTransfers)
    return tier._transfers.agent


def fail_transfers(tier: SlabTier, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (worker := worker_of(tier)) is not None:

        def failed(moves: Sequence[Move], *_: Any, **__: Any) -> Steps[Sequence[Moved]]:
            yield lambda: True
            return [(None, 0, 0)] * len(moves)

        monkeypatch.setattr(worker, "move", failed)
    else:
        monkeypatch.setattr(agent_of(tier), name, lambda _: Transfer(None, None, TransferState.FAILED))


def test_rows_are_the_same_as_without(tier: SlabTier, layout: str, tmp_path: Path, region: HostRegion) -> None:
    assert tier.staged == (True, True)
    assert set(store(tier, region, range(ROWS))) == {Outcome.OK}
    assert set(load(tier, region, range(ROWS))) == {Outcome.OK}
    assert not in_use(tier)
    staged = region.rows_view.copy()
    sealer = Sealer(GEOMETRY, NAMESPACE, 0)
    assert all(sealer.verify(staged[row], key_of(row)) is Verdict.OK for row in range(ROWS))
    tier.close()
    direct = slab_tier(layout, tmp_path / "kv", region, staged=False)
    serve(direct)
    assert direct.staged == (False, False)
    assert set(load(direct, region, range(ROWS))) == {Outcome.OK}
    assert np.array_equal(region.rows_view, staged)
    direct.close()


def test_failed_transfers_are_tried_alone_and_give_their_places_back(
    tier: SlabTier, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(store(tier, region, range(ROWS))) == {Outcome.OK}
    for name, action in (("read", load), ("write", store)):
        with monkeypatch.context() as patch:
            fail_transfers(tier, name, patch)
            assert set(action(tier, region, range(ROWS))) == {Outcome.FAILED}
        assert not in_use(tier)
    assert wait_until(lambda: set(store(tier, region, range(ROWS))) == {Outcome.OK})
    assert set(load(tier, region, range(ROWS))) == {Outcome.OK}


def test_without_memory_for_the_buffer_rows_are_moved_directly(
    layout: str,
    tmp_path: Path,
    region: HostRegion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(module, "Buffer", refuse)
    tier = slab_tier(layout, tmp_path / "kv", region, staged=True)
    serve(tier)
    assert tier.staged == (False, False)
    assert caplog.text.count("no buffer for staging") == 2
    assert set(store(tier, region, range(ROWS))) == {Outcome.OK}
    assert set(load(tier, region, range(ROWS))) == {Outcome.OK}
    tier.close()
