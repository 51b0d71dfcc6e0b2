"""What `backend: gds_mt` registers with cuFile: a region may have terabytes, and a registration lasts as long as the
tier."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registrar, Registration, Span, Transfer, TransferState
from tests.support.fake_movers import Clock
from tests.tiers.slab.stepped import ROWS, SteppedSlabs, Threads


class FakeAgent(Registrar):
    """Moves at once, and like NIXL only between memory and files that are registered."""

    backend = "GDS_MT"

    def __init__(self) -> None:
        self.memory: list[tuple[int, int]] = []
        self.most_bytes = 0
        self.takes_memory = True
        self._files: dict[int, int] = {}
        self._devices = itertools.count(1)

    def register_dram(self, address: int, nbytes: int) -> Registration:
        if not self.takes_memory:
            raise AgentError("NIXL backend GDS_MT cannot register DRAM (NIXL_ERR_BACKEND)")
        self.memory.append((address, nbytes))
        self.most_bytes = max(self.most_bytes, sum(nbytes for _, nbytes in self.memory))
        return Registration((address, nbytes), (0,))

    def register_region(self, region: HostRegion) -> Registration:
        return self.register_dram(region.address, region.nbytes)

    def register_file(self, path: str, nbytes: int, *, direct: bool) -> Registration:
        device = next(self._devices)
        self._files[device] = os.open(path, os.O_RDWR)
        return Registration(device, (device,))

    def deregister(self, registration: Registration) -> None:
        if isinstance(registration.descriptors, tuple):
            self.memory.remove(registration.descriptors)
        else:
            os.close(self._files.pop(registration.descriptors))

    def write(self, spans: Sequence[Span]) -> Transfer:
        return self._moved(spans, os.pwrite)

    def read(self, spans: Sequence[Span]) -> Transfer:
        return self._moved(spans, lambda file, view, offset: os.preadv(file, [view], offset))

    def _moved(self, spans: Sequence[Span], move: Callable[[int, memoryview, int], int]) -> Transfer:
        for address, nbytes, offset, device in spans:
            if not any(at <= address and address + nbytes <= at + size for at, size in self.memory):
                return Transfer(None, None, TransferState.FAILED)
            view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            assert move(self._files[device], view, offset) == nbytes
        return Transfer(None, None, TransferState.DONE)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    agent = FakeAgent()
    monkeypatch.setattr(Agent, "gds_mt", lambda: agent)
    return agent


@pytest.fixture
def tier(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SteppedSlabs:
    clock = Clock()
    Threads(monkeypatch, clock)
    return SteppedSlabs(tmp_path / "kv", clock, backend="gds_mt")


def test_cufile_registers_bounded_buffers_and_nothing_of_the_region(agent: FakeAgent, tier: SteppedSlabs) -> None:
    tier.open()
    assert tier.store(range(ROWS)) == [Outcome.OK] * ROWS
    assert tier.load(range(ROWS)) == [Outcome.OK] * ROWS
    begin, end = tier.region.address, tier.region.address + tier.region.nbytes
    assert [at for at, size in agent.memory if at < end and begin < at + size] == []
    assert agent.most_bytes <= 112 << 20
    assert tier.tier.staged == (True, True)
    tier.close()
    assert agent.memory == []


def test_tier_is_down_while_cufile_takes_no_memory(agent: FakeAgent, tier: SteppedSlabs) -> None:
    """It moves none that it has not registered."""
    agent.takes_memory = False
    with pytest.raises(TierDown, match=r"cannot register DRAM"):
        tier.open()
    agent.takes_memory = True
    tier.open()
    assert tier.store(range(ROWS)) == [Outcome.OK] * ROWS
    tier.close()
