"""A whole slab tier, step by step: no thread of Python runs, and time passes when the test says so. The native worker
moves the rows."""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import disk
from nixl_tiers.tiers.base import Entry, Move
from nixl_tiers.tiers.nixl_agent import AgentError, Registrar, Registration, Span, Transfer, TransferState
from nixl_tiers.tiers.slab import expiry, growth, journal, slabs
from nixl_tiers.tiers.slab import tier as tier_module
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import NAMESPACE, key_of, payload
from tests.support.by_hand import HandPool, HandThread
from tests.support.fake_movers import Clock
from tests.support.file_tier import file_config
from tests.support.staging import decide

GEOMETRY = Geometry(2, 30_000, 3)  # both cells and the seal have padding
ROWS = 16
CAPACITY = 16 << 20
DAY_S = 1_800_000_000.0
DONE_S = 60.0  # for the kernel to end what the worker has begun


class Threads:
    """Those of all tiers. `pools`: by the prefix of their threads' names, the newest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.pools: dict[str, HandPool] = {}
        for module in (disk, expiry, journal, slabs, tier_module):
            monkeypatch.setattr(module, "ThreadPoolExecutor", self._pool)
        named = {"Condition": threading.Condition, "Event": threading.Event}
        thread = partial(HandThread, at_once=True)
        monkeypatch.setattr(slabs, "threading", SimpleNamespace(Thread=thread, **named))
        time = SimpleNamespace(monotonic=clock, monotonic_ns=lambda: int(clock.now * 1e9), time=lambda: DAY_S)
        for each in (disk, growth, journal, tier_module):
            monkeypatch.setattr(each, "time", time)

    def _pool(self, _: int, *, thread_name_prefix: str = "") -> HandPool:
        self.pools[thread_name_prefix] = HandPool(at_once=True)
        return self.pools[thread_name_prefix]


class FakeAgent(Registrar):
    """Moves at once, and like NIXL only between memory and files that are registered. `on_write`: what happens before
    a write; `fails`: each transfer does."""

    backend = "GDS_MT"

    def __init__(self, on_write: Callable[[], object] = lambda: None) -> None:
        self.on_write = on_write
        self.memory: list[tuple[int, int]] = []
        self.most_bytes = 0
        self.takes_memory = True
        self.fails = False
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
        self.on_write()
        return self._moved(spans, os.pwrite)

    def read(self, spans: Sequence[Span]) -> Transfer:
        return self._moved(spans, lambda file, view, offset: os.preadv(file, [view], offset))

    def _moved(self, spans: Sequence[Span], move: Callable[[int, memoryview, int], int]) -> Transfer:
        for address, nbytes, offset, device in spans:
            if self.fails or not any(at <= address and address + nbytes <= at + size for at, size in self.memory):
                return Transfer(None, None, TransferState.FAILED)
            view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            assert move(self._files[device], view, offset) == nbytes
        return Transfer(None, None, TransferState.DONE)


class SteppedSlabs:
    """`on_step`: what is looked at after each step."""

    def __init__(self, path: Path, clock: Clock, *, capacity: int = CAPACITY, replicas: int = 1, **fields: Any) -> None:
        self.path = path
        self.clock = clock
        self.day_s = DAY_S
        self.region = HostRegion.create(GEOMETRY, ROWS)
        config = file_config(path, capacity, **fields)
        self.tier = SlabTier(config, GEOMETRY, self.region, lambda: self.day_s, replicas=replicas)
        decide(self.tier, staged=False)
        self.on_step: Callable[[], object] = lambda: None
        self.ended: dict[int, Sequence[Outcome]] = {}
        self.slots = 0

    def open(self, namespace: bytes = NAMESPACE, epoch: int = 0) -> list[Entry]:
        """And list what is there."""
        self.slots = self.tier.open(namespace, epoch)
        return [entry for batch in self.tier.list_rows() for entry in batch]

    def step(self) -> None:
        self.clock.now += 0.01
        if self.tier.wake_fd is not None and (self.tier._moves.loads.running or self.tier._moves.stores.running):
            select.select([self.tier.wake_fd], [], [], DONE_S)
        for done in self.tier.poll():
            self.ended[done.batch_id] = done.outcomes
        self.on_step()

    def maintain(self) -> list[Entry]:
        gone: list[Entry] = []
        for batch in self.tier.maintain():
            gone += batch
            self.step()
        return gone

    def end(self, batch_id: int) -> list[Outcome]:
        for _ in range(1000):
            if batch_id in self.ended:
                return list(self.ended.pop(batch_id))
            self.step()
        raise AssertionError("a batch does not end")

    def begin_store(self, numbers: Sequence[int], slots: Sequence[int] | None = None) -> int:
        moves = []
        for row, number in enumerate(numbers):
            self.region.rows_view[row] = payload(number, GEOMETRY)
            slot = number if slots is None else slots[row]
            moves.append(Move(row, slot, key_of(number), tick=number + 1, seal=True))
        return self.tier.store(moves)

    def store(self, numbers: Sequence[int], slots: Sequence[int] | None = None) -> list[Outcome]:
        return self.end(self.begin_store(numbers, slots))

    def load(self, numbers: Sequence[int], slots: Sequence[int] | None = None) -> list[Outcome]:
        """An OK row holds what was stored under that key."""
        self.region.rows_view[:] = 0xEE
        places = numbers if slots is None else slots
        moves = [Move(row, slot, key_of(n)) for row, (n, slot) in enumerate(zip(numbers, places, strict=True))]
        outcomes = self.end(self.tier.load(moves))
        for row, (number, outcome) in enumerate(zip(numbers, outcomes, strict=True)):
            if outcome is Outcome.OK:
                assert holds(self.region, row, number), f"wrong bytes for key {number}"
        return outcomes

    def copy(self, to: Path) -> Path:
        """What a kill at this moment leaves."""
        return Path(shutil.copytree(self.path, to))

    def close(self) -> None:
        self.tier.close()
        self.region.close()


def holds(region: HostRegion, row: int, number: int) -> bool:
    wanted, size = payload(number, GEOMETRY), GEOMETRY.cell_payload
    starts = range(0, GEOMETRY.cells * GEOMETRY.cell_bytes, GEOMETRY.cell_bytes)
    return all((region.rows_view[row][at : at + size] == wanted[at : at + size]).all() for at in starts)


def number_of(entry: Entry) -> int:
    return int(entry.key[4:])


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), at)
