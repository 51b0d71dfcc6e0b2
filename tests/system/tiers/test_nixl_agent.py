"""The NIXL agent as movers use it: a failure is a state of one transfer, and the agent works on."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.nixl_agent import Agent, TransferState
from tests.support.transfers import end
from tests.tiers.test_nixl_agent import ROW, agent, path, region

__all__ = ["agent", "path", "region"]  # fixtures


def test_failure_is_a_state_and_the_next_transfer_works(agent: Agent, region: HostRegion, path: Path) -> None:
    file = agent.register_file(str(path), 1 << 30, direct=True)
    (device,) = file.devices
    beyond = [(region.address, ROW, 64 * ROW, device)]
    unaligned = [(region.address, ROW, 100, device)]
    unknown_memory = [(region.address + region.nbytes, ROW, 0, device)]
    unknown_file = [(region.address, ROW, 0, device + 1000)]
    good = [(region.address, ROW, 0, device)]
    for bad in (beyond, unaligned, unknown_memory, unknown_file):
        assert end(agent.read(bad)) is TransferState.FAILED
        assert end(agent.read(good)) is TransferState.DONE
    agent.deregister(file)


def test_pending_transfer_cannot_be_released(agent: Agent, region: HostRegion, path: Path) -> None:
    file = agent.register_file(str(path), 64 * ROW, direct=True)
    transfer = agent.read([(region.address + row * ROW, ROW, row * ROW, file.devices[0]) for row in range(64)])
    # File transfers make progress only when they are polled, so this one is certainly pending.
    with pytest.raises(RuntimeError, match="pending"):
        transfer.release()
    assert end(transfer) is TransferState.DONE
    agent.deregister(file)
