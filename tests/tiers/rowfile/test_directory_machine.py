"""Engines that share a simulated directory, with the real budget, eviction and expiry, in any order of events. No I/O,
and a virtual clock. After each event the bound is checked, and that no engine's account is below the truth.

A store is several steps, as is a sweep: others store, delete and sweep between any two of them. Processes stand still,
are killed in the middle of anything, and are replaced, perhaps later and by an engine with rows of another size; what
they leave unfinished lies there until a sweep knows that nobody writes it. Rows are used, found to be corrupt, and
deleted by hand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from nixl_tiers.tiers.rowfile import budget as budget_module
from nixl_tiers.tiers.rowfile import evict as evict_module
from nixl_tiers.tiers.rowfile.budget import SIZED_ROWS, Budget, Swept
from nixl_tiers.tiers.rowfile.evict import FANOUTS, Evictor, Row
from nixl_tiers.tiers.rowfile.expire import MIN_PASS_S, Expiry, age_from

ROWS = 64
SIZES = {"a": 4, "b": 6, "c": 4}  # of a row, by namespace
CAPACITY = ROWS * SIZES["a"]
SHARE, LEAST_ROWS, DIRECTORIES, SAMPLE = 8, 2, 4, 24  # for WINDOW_SHARE and so on, so that engines meet
WINDOW = CAPACITY // SHARE
ORPHAN_S = 900.0
MAX_AGE_S = 4000.0
NAMES = [f"{number:03d}.row" for number in range(200)]
Place = tuple[str, str, str]


@dataclass(eq=False)
class File:
    sealed_s: float
    used_s: float
    nbytes: int
    writer: Process | None = None  # that is writing it, or left it unfinished


@dataclass(eq=False)
class Store:
    """One row, from its reservation on."""

    place: Place
    file: File | None = None  # in .incoming


class Files:
    """The directory as one process sees it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world

    def namespaces(self) -> Sequence[str]:
        return sorted({namespace for namespace, _, _ in self.world.files})

    def rows(self, namespace: str, fanout: str) -> Sequence[Row]:
        return [
            Row(*place, int(file.used_s * 1e9), file.nbytes)
            for place, file in sorted(self.world.files.items())
            if place[:2] == (namespace, fanout)
        ]

    def unlink(self, rows: Sequence[Row]) -> Sequence[Row]:
        gone = []
        for row in rows:
            self.world.meanwhile(self.process)
            file = self.world.files.get(row[:3])
            if file is not None and int(file.used_s * 1e9) == row.used_ns:
                del self.world.files[row[:3]]
                gone.append(row)
        return gone

    def sealed_at(self, rows: Sequence[Row]) -> Sequence[int | None]:
        assert all(row.used_ns / 1e9 > self.world.now - MAX_AGE_S for row in rows), "a seal was read in vain"
        found = [self.world.files.get(row[:3]) for row in rows]
        return [None if file is None else int(file.sealed_s) for file in found]

    def touch(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.world.use(row[:3])


class Process:
    """One engine's, until it is killed."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        world.processes.append(self)
        self.number = number
        self.namespace = world.random.choice(sorted(SIZES))
        self.row_bytes = SIZES[self.namespace]
        self.budget = Budget(CAPACITY, self.row_bytes)
        files: Any = Files(self)
        self.evicts = Evictor(files, self.budget, world.random)
        self.expires = Expiry(files, self.budget, MAX_AGE_S, world.random)
        self.stores: list[Store] = []
        self.reserved_bytes = 0
        self.paused_until_s = self.next_pass_s = 0.0
        self.work: Iterator[None] = iter(())
        self.expiring: Iterator[None] = iter(())
        self.swept_at: dict[Process, int] | None = None
        """What each process had reserved and ended, when the sweep began by which rows are stored now."""

    def step(self) -> None:
        """Of the thread that sweeps: a directory, or what is due next."""
        if next(self.work, self) is not self:
            return
        if self.budget.sweep_due or self.world.random.random() < 0.02:
            self.work = self.sweep()
        elif self.budget.excess_bytes:
            self.work = self.evicts.steps()
        elif next(self.expiring, self) is self and self.world.now >= self.next_pass_s:
            self.next_pass_s = self.world.now + self.expires.pass_s
            self.expiring = self.expires.steps(lambda: self.world.now)

    def sweep(self) -> Iterator[None]:
        world, budget = self.world, self.budget
        swept_at = {each: each.reserved_bytes - each.row_bytes * len(each.stores) for each in world.processes}
        budget.begin_sweep()
        yield
        found = Swept()
        parts = [self.read_incoming(found), self.read_rows(found)]
        for part in parts if world.random.random() < 0.7 else reversed(parts):
            yield from part
        if world.random.random() < world.faults:
            budget.end_sweep(None)
            return
        budget.end_sweep(found)
        self.swept_at = swept_at

    def read_incoming(self, found: Swept) -> Iterator[None]:
        for file in list(self.world.incoming):
            if file.writer is self and any(store.file is file for store in self.stores):
                continue
            if file not in self.world.incoming:
                continue
            if self.is_orphan(file):
                self.world.incoming.remove(file)
            else:
                found.add_unfinished(file.nbytes, self.row_bytes)
            yield

    def is_orphan(self, file: File) -> bool:
        """Of the same machine it is known; of others after a time."""
        dead = file.writer is self or file.writer not in self.world.alive()
        return (dead and file.sealed_s % 2 < 1) or self.world.now - file.used_s > ORPHAN_S

    def read_rows(self, found: Swept) -> Iterator[None]:
        world = self.world
        namespaces = sorted({namespace for namespace, _, _ in world.files})
        for namespace in namespaces:
            names: list[Place] = []
            for fanout in world.fanouts:
                names += [place for place in world.files if place[:2] == (namespace, fanout)]
                yield
            sizes = [world.files[place].nbytes for place in names if place in world.files]
            found.rows[namespace] = len(names), max(sizes[:SIZED_ROWS], default=0)

    # --- a store

    def reserve(self, place: Place) -> bool:
        if not self.budget.reserve():
            return False
        self.reserved_bytes += self.row_bytes
        self.stores.append(Store(place))
        return True

    def make(self, store: Store) -> None:
        if store.file is None:
            store.file = File(self.world.now, self.world.now, self.row_bytes, self)
            self.world.incoming.append(store.file)
            self.world.check()

    def publish(self, store: Store) -> None:
        file = store.file
        if file in self.world.incoming:  # else somebody took it for an orphan
            self.world.incoming.remove(file)
            file.used_s = self.world.now
            self.world.files[store.place] = file
            self.world.check()
            self.world.stored += 1

    def end(self, store: Store) -> None:
        self.stores.remove(store)
        self.budget.ended()


@dataclass
class World:
    """`engines` places, each with one process at most."""

    random: random.Random
    engines: int
    faults: float = 0.05
    now: float = 1e6
    processes: list[Process] = field(default_factory=list)  # the dead ones, too
    files: dict[Place, File] = field(default_factory=dict)
    incoming: list[File] = field(default_factory=list)
    fanouts: tuple[str, ...] = FANOUTS[:DIRECTORIES]
    stored: int = 0
    _inside: bool = False

    def __post_init__(self) -> None:
        for _ in range(self.random.choice([0, 20, 50, 60, 80])):
            place = self.place(self.random.choice(sorted(SIZES)))
            then_s = self.now - self.random.randrange(1, 5000)
            self.files[place] = File(then_s, then_s, SIZES[place[0]])
        if self.random.random() < 0.2:  # the server's clock was ahead
            self.files[self.place("a")] = File(self.now + 1e5, self.now + 1e5, SIZES["a"])
        self._least = self.there
        self.places: list[Process | None] = [Process(self, number) for number in range(self.engines)]

    def place(self, namespace: str) -> Place:
        name = self.random.choice(NAMES)
        return namespace, self.fanouts[int(name[:3]) % len(self.fanouts)], name

    def alive(self) -> list[Process]:
        return [each for each in self.places if each is not None]

    @property
    def there(self) -> int:
        return sum(file.nbytes for file in [*self.files.values(), *self.incoming])

    # --- events

    def step(self, process: Process) -> None:
        for _ in range(self.random.choice([1, 1, 3, 8, 30])):
            process.step()

    def store(self, process: Process) -> None:
        for _ in range(self.random.choice([1, 2, 10])):
            if not process.reserve(self.place(process.namespace)):
                return

    def writes(self, process: Process) -> None:
        """The file is made, or gets its name, or its store ends."""
        for store in process.stores[: self.random.choice([1, 3, 10])]:
            if store.file is None:
                process.make(store)
            elif self.random.random() < self.faults:
                if self.random.random() < 0.5 and store.file in self.incoming:
                    self.incoming.remove(store.file)
                process.end(store)
            elif store.file in self.incoming:
                process.publish(store)
            else:
                process.end(store)

    def use(self, place: Place) -> None:
        if (file := self.files.get(place)) is not None:
            file.used_s = self.now

    def loads(self, _: Process) -> None:
        for place in self.random.sample(sorted(self.files), min(len(self.files), 3)):
            self.use(place)

    def corrupt(self, _: Process) -> None:
        """A row that a load has found to be no row, deleted by another thread than the one that sweeps."""
        if self.files:
            del self.files[self.random.choice(sorted(self.files))]

    def cleans(self, _: Process) -> None:
        """Somebody deletes rows by hand."""
        most = CAPACITY - self.random.choice([1, 1, 2, 4]) * WINDOW
        for place in self.random.sample(sorted(self.files), len(self.files)):
            if self.there > most:
                del self.files[place]

    def passes(self, _: Process) -> None:
        self.now += self.random.choice([0.3, 5.0, 60.0])

    def long(self, _: Process) -> None:
        self.now += self.random.choice([300.0, 1000.0])

    def pause(self, process: Process) -> None:
        """It stands still, whatever it is doing."""
        process.paused_until_s = self.now + self.random.choice([10.0, 400.0, 2000.0])

    def kill(self, process: Process) -> None:
        """The call that each of its threads is in may be completed. Its place stays empty, or not."""
        for store in process.stores:
            if self.random.random() < 0.3:
                process.make(store)
            if store.file is not None and self.random.random() < 0.3:
                process.publish(store)
        process.stores.clear()
        place = process.number
        self.places[place] = None
        if self.random.random() < 0.7:
            self.places[place] = Process(self, place)

    def starts(self, _: Process) -> None:
        for place, process in enumerate(self.places):
            if process is None:
                self.places[place] = Process(self, place)

    def together(self, process: Process) -> None:
        """All sweep at the same time, and then all store as much as they may."""
        for each in self.alive() if self.random.random() < 0.7 else ():
            each.work = each.sweep()
            for _ in each.work:
                pass
        for each in self.alive():
            for _ in range(2 * ROWS):
                if not each.reserve(self.place(each.namespace)):
                    break
        for each in self.alive():
            for store in each.stores[: self.random.choice([0, 30])]:
                each.make(store)
                each.publish(store)
                each.end(store)

    def meanwhile(self, process: Process) -> None:
        """Others go on while this one is in a call."""
        if self._inside or self.random.random() < 0.7:
            return
        self._inside = True
        others = [each for each in self.alive() if each is not process]
        for event in self.random.choices([World.step, World.store, World.writes, World.loads, World.corrupt], k=3):
            if others:
                event(self, self.random.choice(others))
        self._inside = False

    # --- what holds

    def check(self) -> None:
        bound = CAPACITY + (self.engines - 1) * WINDOW
        assert self.there <= max(bound, self._least), "beyond the bound"

    def check_accounts(self) -> None:
        there = self.there
        self._least = min(self._least, there)  # who finds too much stores nothing
        for process in self.alive():
            if process.swept_at is not None:
                since = sum(
                    each.reserved_bytes - process.swept_at.get(each, 0)
                    for each in self.processes
                    if each is not process
                )
                assert there <= process.budget.used_bytes + since, "an account is below the truth"
                own = process.reserved_bytes - process.swept_at[process]
                assert own <= WINDOW, "more than a window since a sweep"

    def run(self, steps: int) -> None:
        names = list(EVENTS)
        weights = [weight * self.random.choice(MORE_OR_LESS.get(event, [1.0])) for event, weight in EVENTS.items()]
        for event in self.random.choices(names, weights, k=steps):
            process = self.random.choice(self.places)
            if process is None:
                if event is World.starts:
                    self.starts(None)  # type: ignore[arg-type]
            elif self.now >= process.paused_until_s:
                event(self, process)
            self.check_accounts()

    def settle(self, *, used: bool) -> None:
        """Without faults, until everything that is there now must have expired. `used`: all rows are, all the time."""
        self.faults = 0.0
        until_s, interval_s = self.now + 1.1 * MAX_AGE_S + 2 * MIN_PASS_S, 40.0
        for place, process in enumerate(self.places):
            self.places[place] = process or Process(self, place)
        while self.now < until_s:
            self.now += interval_s
            for process in self.alive():
                for _ in range(8):
                    process.step()
                self.writes(process)
                for place in self.files if used else ():
                    self.use(place)
                self.check()
                self.check_accounts()
        for process in self.alive():
            for _ in range(100):
                process.step()

    def check_settled(self) -> None:
        for file in self.files.values():
            begins_s = age_from(int(file.sealed_s), int(1e9 * file.used_s))
            assert begins_s > self.now - 1.1 * MAX_AGE_S - 2 * MIN_PASS_S, "a row has not expired"
            assert begins_s < self.now + 60, "a row will not expire"
        for process in self.alive():
            for store in list(process.stores):
                process.end(store)
            for _ in range(100):
                if process.reserve(self.place(process.namespace)):
                    break
                process.step()
            else:
                raise AssertionError("an engine stores no more")


EVENTS: dict[Callable[[World, Process], Any], float] = {
    World.step: 60,
    World.store: 40,
    World.writes: 60,
    World.loads: 8,
    World.passes: 4,
    World.corrupt: 1.0,
    World.cleans: 0.3,
    World.long: 0.3,
    World.pause: 0.6,
    World.kill: 0.8,
    World.starts: 3,
    World.together: 1,
}
MORE_OR_LESS: dict[Callable[[World, Process], Any], list[float]] = {
    World.step: [0.3, 1.0, 2.0],
    World.store: [0.3, 1.0],
    World.writes: [0.2, 1.0, 2.0],
    World.loads: [0.0, 1.0, 4.0],
    World.corrupt: [0.0, 1.0, 5.0],
    World.cleans: [0.0, 1.0, 10.0],
    World.pause: [0.0, 1.0, 3.0],
    World.kill: [0.0, 1.0, 5.0],
    World.together: [0.0, 1.0, 4.0],
}
"""In one world, than in others."""


def explore(seeds: range, steps: int = 1500, *, settle: bool = False, engines: int = 0) -> int:
    """Raises AssertionError if something does not hold. Returns how many rows were stored. `engines`: 0: of chance."""
    stored = 0
    for seed in seeds:
        chance = random.Random(seed)
        some, faults = chance.choice([1, 2, 2, 3, 8]), chance.choice([0.0, 0.02, 0.1])
        world = World(chance, engines or some, faults)
        world.run(steps)
        if settle:
            world.settle(used=seed % 2 == 0)
            world.check_settled()
        stored += world.stored
    return stored


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "WINDOW_SHARE", SHARE)
    monkeypatch.setattr(budget_module, "WINDOW_ROWS", LEAST_ROWS)
    monkeypatch.setattr(evict_module, "FANOUTS", FANOUTS[:DIRECTORIES])
    monkeypatch.setattr(evict_module, "SAMPLE_ROWS", SAMPLE)


@pytest.mark.parametrize("engines", [1, 2, 8])
def test_bound_holds_in_any_order_of_events(engines: int) -> None:
    assert explore(range(100, 120), engines=engines) > 1500


def test_rows_expire_and_engines_go_on_storing() -> None:
    explore(range(200, 224), 400, settle=True)
