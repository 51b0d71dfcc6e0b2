"""Kills at every write of a record and of a row, by both ways of moving rows: whatever is listed then is what its slot
holds, and no row is lost that was reported."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.tiers.nixl_agent import AgentError, Span, Transfer, TransferState
from nixl_tiers.tiers.slab import transfers as transfers_module
from nixl_tiers.tiers.slab.journal import WRITE_S
from nixl_tiers.tiers.slab.slabs import Slabs
from tests.mover.harness import NAMESPACE, key_of, shard_dir
from tests.support.fake_movers import Clock
from tests.support.hooked import FLUSH, WRITE, slab_writes
from tests.tiers.slab.stepped import GEOMETRY, FakeAgent, SteppedSlabs, Threads, number_of

CAPACITY = 2 << 20
SLOTS = 8
AGE_S = 3600


class Killed:
    """A tier, and what a kill before each of its writes leaves: a copy, which rows were reported by then (slot ->
    number), and slots of which either row may be there."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self.held: dict[int, int] = {}
        self.in_doubt: set[int] = set()
        self.leaves: list[tuple[Path, dict[int, int], set[int]]] = []
        self.fails: set[str] = set()
        self.looks = False
        self.clock = clock

    def start(self) -> None:
        self.one = SteppedSlabs(self.folder / "kv", self.clock, capacity=CAPACITY, max_age=AGE_S)
        self.one.open()
        self.looks = True

    def leave(self) -> None:
        if self.looks:
            to = self.one.copy(self.folder / f"leaf-{len(self.leaves)}")
            self.leaves.append((to, dict(self.held), set(self.in_doubt)))

    def hook(self, what: int, _: int, raw: bytes, at: int) -> int:
        self.leave()
        name = "flush" if what == FLUSH else "row" if what != WRITE else "record" if at else "header"
        return errno.EIO if name in self.fails else 0

    def store(self, rows: dict[int, int]) -> list[Outcome]:
        """Numbers by slots."""
        self.in_doubt = set(rows)
        for slot in rows.keys() & self.held.keys():
            self.one.tier.delete([(slot, key_of(self.held.pop(slot)))])
        outcomes = self.one.store([*rows.values()], [*rows])
        good = {slot: number for (slot, number), end in zip(rows.items(), outcomes, strict=True) if end is Outcome.OK}
        self.held |= good
        self.in_doubt = set()
        return outcomes

    def expire(self) -> None:
        self.one.day_s += AGE_S + 1
        self.in_doubt, held = set(self.held), self.held
        self.held = {}
        assert sorted(map(_number, self.one.maintain())) == sorted(held.values())
        self.in_doubt = set()

    def run(self) -> None:
        self.store({slot: slot for slot in range(SLOTS)})
        self.store({0: 10, 1: 11, 3: 13, 6: 16})  # neighbours, and others
        self.one.tier.delete([(2, key_of(self.held.pop(2)))])
        self.one.tier.touch([4, 5], [100, 101])
        self.one.clock.now += WRITE_S
        self.one.step()
        self.store({2: 2})  # again, into the same slot
        self.expire()
        self.store({slot: 20 + slot for slot in range(3)})
        self.looks = False

    def check(self) -> None:
        """Each leaf, with the tier as it is."""
        assert len(self.leaves) > 12
        for path, expected, in_doubt in self.leaves:
            after = SteppedSlabs(path, self.one.clock, capacity=CAPACITY)
            try:
                found = {entry.slot: number_of(entry) for entry in after.open()}
                for slot, number in found.items():
                    assert after.load([number], [slot]) == [Outcome.OK], "what is listed is not there"
                kept = {slot: number for slot, number in found.items() if slot not in in_doubt}
                assert expected.items() <= kept.items(), "a row is lost"
                hidden = set(range(SLOTS)) - found.keys()
                journal = after.tier._open.journal  # type: ignore[union-attr]
                for slot in hidden:
                    assert journal.sealed_at[slot] or not _bytes_in(path, slot), "bytes that nothing will erase"
            finally:
                after.close()
                shutil.rmtree(path)


def _number(entry: Any) -> int:
    return int(entry.key[4:])


def _bytes_in(path: Path, slot: int) -> bool:
    with (shard_dir(path, NAMESPACE) / "slab-00000.kv").open("rb") as file:
        file.seek(slot * GEOMETRY.row_bytes)
        return any(file.read(GEOMETRY.row_bytes))


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Killed]:
    clock = Clock()
    Threads(monkeypatch, clock)
    killed = Killed(tmp_path, clock)
    erase = Slabs.erase

    def leave_and_erase(self: Slabs, slots: list[int]) -> None:
        killed.leave()
        erase(self, slots)
        killed.leave()

    monkeypatch.setattr(Slabs, "erase", leave_and_erase)
    yield killed
    killed.looks = False
    killed.one.close()


@pytest.fixture
def by_nixl(killed: Killed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers_module, "open_worker", lambda *_: None)
    agent = FakeAgent(killed.leave)
    monkeypatch.setattr(transfers_module, "open_agent", lambda _, region: (agent, agent.register_region(region)))


@pytest.mark.parametrize("way", [None, "by_nixl"], ids=["the worker", "NIXL"])
def test_kills_at_every_write(way: str | None, killed: Killed, library: str, request: pytest.FixtureRequest) -> None:
    if way is not None:
        request.getfixturevalue(way)
    with slab_writes(library, killed.hook):
        killed.start()
        killed.run()
        killed.check()
        killed.one.close()


@pytest.mark.usefixtures("by_nixl")
def test_what_a_failed_transfer_has_written_is_erased_one_day(
    killed: Killed, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are to be tried again one by one, which does not happen."""
    tries: list[Sequence[Span]] = []
    honest = FakeAgent.write

    def write(agent: FakeAgent, spans: Sequence[Span]) -> Transfer:
        tries.append(spans)
        if len(tries) > 1:
            raise AgentError("no more")
        honest(agent, spans[:1])
        return Transfer(None, None, TransferState.FAILED)

    with slab_writes(library, killed.hook):
        killed.start()
        killed.looks = False
        monkeypatch.setattr(FakeAgent, "write", write)
        assert killed.store({0: 0, 1: 1}) == [Outcome.FAILED] * 2
        killed.one.close()
        after = SteppedSlabs(killed.folder / "kv", killed.clock, capacity=CAPACITY)
        assert after.open() == []
        assert _bytes_in(after.path, 0)
        assert after.tier._open.journal.sealed_at[0], "bytes that nothing will erase"  # type: ignore[union-attr]
        after.close()


def test_no_store_or_load_waits_for_a_flush(killed: Killed, library: str) -> None:
    """Threads that move rows share the lock of the records."""
    calls: list[int] = []
    with slab_writes(library, lambda what, *_: calls.append(what) or 0):
        killed.start()
        calls.clear()
        killed.store({0: 0, 1: 1})
        assert calls
        assert FLUSH not in calls
        killed.one.close()


@pytest.mark.parametrize("way", [None, "by_nixl"], ids=["the worker", "NIXL"])
def test_no_row_is_written_while_not_even_the_header_can_be(
    way: str | None, killed: Killed, library: str, request: pytest.FixtureRequest
) -> None:
    if way is not None:
        request.getfixturevalue(way)
    with slab_writes(library, killed.hook):
        killed.start()
        killed.looks = False
        killed.store({0: 0, 1: 1})
        killed.fails = {"record", "header"}
        slab = shard_dir(killed.one.path, NAMESPACE) / "slab-00000.kv"
        before = slab.read_bytes()
        assert killed.store({1: 11}) == [Outcome.FAILED]
        assert slab.read_bytes() == before
        assert killed.one.load([0]) == [Outcome.OK]
        killed.fails = set()
        assert killed.store({1: 11}) == [Outcome.OK]
        killed.one.close()
