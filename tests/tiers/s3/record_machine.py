"""Movers that share a simulated bucket, with the real account, takeover and sweeps, in any order of events. No I/O, and
a virtual clock. The bound, and that no record is below the truth, are checked after each event; and of each delete that
its mover has written the record not long ago, and that it may be one of a running sweep.

Each request of a mover arrives, is answered, gets lost on either way, or arrives long after its mover gave it up. Some
servers test a condition and write up to a second later. Movers stand still, are killed and replaced; uploads that were
reported as failed arrive later; somebody deletes rows, a counter or the record.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.record import FAILED_ENDS_S, Counter, Record, UploadQuota
from nixl_tiers.tiers.s3.sweep import BEGIN, DELETE, PAGE, Listed, Sweeper
from nixl_tiers.tiers.s3.takeover import CLAIM, COUNTERS, KEEP, PUBLISH, READ, WAIT, WRITE, Ask, Takeover, Terms

SHARE, ROW = 8, 5
CAPACITY = 64 * ROW
WINDOW = CAPACITY // SHARE
NAMES = RowNames("p")
ROWS = sorted(NAMES.name("00" * 16, b"%08d" % number) for number in range(200))
COUNTER_TIMEOUT_S = 3 * 3600.0
RACE_S = 0.9  # between a test and its write
DELETE_S = 20.0  # none begins later than that after its mover's last write of the record


class Lost(Exception):
    """A request without an answer."""


@dataclass
class Stray:
    """What arrives late, or never."""

    until_s: float
    arrive: Callable[[], object]
    must: bool = False  # it does arrive by then
    process: Process | None = None  # with which it ends


class Process:
    """One mover."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.quota = world.quota(name)
        self.quota.half_used = self._half
        terms = Terms(stale_s=world.stale_s, sweep_s=world.sweep_s)
        self.takeover: Takeover = world.takeover(self.quota, terms, nonce=world.nonce)
        self.sweeper: Sweeper = world.sweeper(self.takeover, NAMES, lambda: world.now, None)
        self.uploads: list[str] = []
        self.hurries = False
        self.paused_until_s = 0.0
        self.steps: Generator[Ask, Any, Any] | None = None
        self.asked: Ask | None = None
        self.answer: tuple[Any] | None = None
        self.wait_until_s = 0.0
        self.listed_to = ""
        self.listed: dict[str, float] = {}  # Last-Modified of each row, as last listed by it
        self.sent_s = self.wrote_s = float("-inf")  # its last write of the record, and the last one that was answered

    def _half(self) -> None:
        self.hurries = True

    def _turn(self) -> Generator[Ask, Any, None]:
        now = yield from self.takeover.turn(self.world.now)
        yield from self.sweeper.work(now)

    def resume(self, resumed: Callable[[], Ask]) -> None:
        try:
            self.asked = resumed()
        except (StopIteration, Lost):
            self.steps = self.asked = None
        self.answer = None
        match self.asked:
            case Ask(what, seconds) if what == WAIT:
                self.wait_until_s = self.world.now + seconds
            case Ask(what) if what == WRITE:
                self.sent_s = self.world.now
            case Ask(what, names) if what == DELETE:
                self._check_delete(names)

    def _check_delete(self, names: list[str]) -> None:
        world, account = self.world, self.takeover.account
        assert world.now < self.wrote_s + DELETE_S, "a delete long after the last own write"
        assert account is not None, "a delete by who does not write the record"
        if self.sweeper._rows is None:  # of the running sweep
            share = 2 * WINDOW / CAPACITY
            young_s = account.oldest + (world.now - account.oldest) * share
            assert all(self.listed[name] <= young_s for name in names), "an early delete of a young row"

    def step(self) -> None:
        """A request is begun, arrives, or is answered."""
        world, asked = self.world, self.asked
        if self.steps is None:
            if world.now >= self.takeover.next_s or self.hurries:
                self.hurries = False
                self.steps = steps = self._turn()
                self.resume(lambda: next(steps))
            return
        steps = self.steps
        assert asked is not None
        if self.answer is not None:
            (answer,) = self.answer
            if asked.what == WRITE and answer not in (None, world.racing):
                self.wrote_s = self.sent_s
            if answer is not world.racing:
                self.resume(lambda: steps.send((world.now, answer)))
        elif asked.what == WAIT:
            if world.now >= self.wait_until_s:
                self.resume(lambda: steps.send((world.now, None)))
        elif world.fails():
            if world.random.random() < 0.5:
                world.serve(self, asked)
            elif asked.what in (WRITE, PUBLISH, DELETE) and world.random.random() < 0.5:
                late_s = world.random.choice([0.5, 5.0, 40.0])
                world.strays.append(Stray(world.now + late_s, lambda: world.serve(self, asked)))
            self.resume(lambda: steps.throw(Lost()))
        else:
            self.answer = (world.serve(self, asked),)


@dataclass
class World:
    """`movers` places, each with one process at a time."""

    random: random.Random
    movers: int
    racy: bool = False  # the server tests a condition and writes in two steps
    faults: float = 0.05  # of requests
    stale_s: float = 30.0  # the bound does not rest on it
    sweep_s: float = 30.0
    rates: dict[str, float] = field(default_factory=dict)  # of events, times the usual one
    quota: Callable[[str], UploadQuota] = lambda name: UploadQuota(name, CAPACITY, ROW)
    takeover: type[Takeover] = Takeover
    sweeper: type[Sweeper] = Sweeper
    now: float = 1e6
    rows: dict[str, float] = field(default_factory=dict)
    counters: dict[str, tuple[Counter, float]] = field(default_factory=dict)
    record: tuple[str, Record] | None = None
    strays: list[Stray] = field(default_factory=list)
    published: list[tuple[str, Counter]] = field(default_factory=list)
    highest: dict[str, int] = field(default_factory=dict)  # counter of each that was ever published
    stored: int = 0
    listings: int = 0
    racing: Any = field(default_factory=object)
    _started: int = 0
    _written: int = 0

    def __post_init__(self) -> None:
        self.places = [self.process() for _ in range(self.movers)]
        for name in self.random.sample(ROWS, self.random.choice([0, 40, 60, 64, 80])):
            self.rows[name] = self.now - self.random.randrange(1, 10_000)
        self._least = ROW * len(self.rows)

    def process(self) -> Process:
        self._started += 1
        return Process(self, f"m{self._started}")

    def nonce(self) -> str:
        self._written += 1
        return str(self._written)

    def fails(self) -> bool:
        return self.random.random() < self.faults

    # --- the server

    def serve(self, process: Process, asked: Ask) -> Any:
        """The answer, as of now."""
        given = asked.given
        match asked.what:
            case str(what) if what == READ:
                return (None, None) if self.record is None else self.record
            case str(what) if what == WRITE:
                return self._write(process, *given)
            case str(what) if what == COUNTERS:
                gone = [name for name, (_, at) in self.counters.items() if self.now - at > COUNTER_TIMEOUT_S]
                for name in gone:
                    del self.counters[name]
                return {name: counter for name, (counter, _) in self.counters.items()}
            case str(what) if what == PUBLISH:
                before = self.counters.get(process.name, (given,))[0]
                if before.ended <= given.ended or self.random.random() < 0.5:  # a late one may be lower
                    self.counters[process.name] = given, self.now
                self.published.append((process.name, given))
                self.highest[process.name] = max(given.ended, self.highest.get(process.name, 0))
            case str(what) if what == CLAIM:
                return False
            case str(what) if what == BEGIN:
                process.listed_to = given
                self.listings += not given
            case str(what) if what == PAGE:
                found = [name for name in ROWS if name in self.rows and name > process.listed_to][:6]
                process.listed_to = found[-1] if found else process.listed_to
                process.listed |= {name: self.rows[name] for name in found}
                return [Listed(name, self.rows[name], ROW) for name in found] or None
            case str(what) if what == DELETE:
                confirmed = {name for name in given if self.random.random() > self.faults}
                for name in confirmed:
                    self.rows.pop(name, None)
                return confirmed
            case str(what) if what == KEEP:
                return True
        return None

    def _write(self, process: Process, record: Record, etag: str | None) -> Any:
        there = None if self.record is None else self.record[0]
        if etag not in {"", there}:
            return None

        def written() -> str:
            tag = record.encode().decode()  # as S3's: the same content has the same ETag
            self.record = tag, record
            if process.answer == (self.racing,):
                process.answer = (tag,)
            return tag

        if not self.racy or self.random.random() < 0.3:
            return written()
        self.strays.append(Stray(self.now + RACE_S, written, must=True))
        return self.racing

    # --- events

    def step(self, place: Process) -> None:
        if not self.stands(place):
            for _ in range(self.random.choice([1, 2, 4, 12])):
                place.step()

    def stands(self, place: Process) -> bool:
        return self.now < place.paused_until_s

    def upload(self, place: Process) -> None:
        for _ in range(self.random.choice([1, 2, 8])):
            if not self.stands(place) and place.quota.try_acquire(ROW):
                place.uploads.append(self.random.choice(ROWS))

    def arrives(self, place: Process) -> None:
        """And is not answered yet."""
        if place.uploads and not self.stands(place):
            self._store(place.uploads[0])

    def ends(self, place: Process) -> None:
        for name in [] if self.stands(place) else place.uploads[: self.random.choice([1, 2, 8])]:
            place.uploads.remove(name)
            done = self.random.random() < 0.9
            place.quota.upload_ended(ROW, self.now, done=done)
            if done:
                self._store(name)
            elif self.random.random() < 0.5:
                until_s = self.now + 0.99 * FAILED_ENDS_S
                self.strays.append(Stray(until_s, lambda name=name: self._store(name), process=place))  # type: ignore[misc]

    def _store(self, name: str) -> None:
        self.rows[name] = self.now
        self.stored += 1

    def late(self, _: Process) -> None:
        """Something that was given up arrives."""
        if self.strays:
            self.strays.pop(self.random.randrange(len(self.strays))).arrive()

    def passes(self, _: Process) -> None:
        self.advance(self.random.choice([0.05, 0.3, 1.0, 5.0, 12.0]))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        over = [stray for stray in self.strays if stray.until_s <= self.now]
        self.strays = [stray for stray in self.strays if stray.until_s > self.now]
        self.random.shuffle(over)
        for stray in over:
            if stray.must:
                stray.arrive()

    def long(self, _: Process) -> None:
        if self.random.random() < 0.2:
            self.advance(self.random.choice([40.0, 70.0, 300.0]))

    def pause(self, place: Process) -> None:
        """A process stands still, its uploads too."""
        if self.random.random() < 0.3:
            place.paused_until_s = self.now + self.random.choice([10.0, 31.0, 45.0, 4 * 3600.0])
            if place.paused_until_s - self.now > 3600.0 and self.random.random() < 0.5:
                self.advance(3.5 * 3600.0)  # its counter is too old by then

    def kill(self, place: Process) -> None:
        for name in place.uploads:
            if self.random.random() < 0.5:
                self._store(name)
        self.strays = [stray for stray in self.strays if stray.process is not place]
        self.places[self.places.index(place)] = self.process()

    def row_goes(self, _: Process) -> None:
        if self.rows:
            del self.rows[self.random.choice(sorted(self.rows))]

    def counter_falls(self, _: Process) -> None:
        """An earlier write of it arrives once more."""
        if self.published:
            name, counter = self.random.choice(self.published[-12:])
            self.counters[name] = counter, self.now

    def record_goes(self, _: Process) -> None:
        if self.random.random() < 0.1:
            self.record = None

    # --- what holds

    def check(self) -> None:
        there = ROW * len(self.rows)
        bound = CAPACITY + (self.movers - 1) * WINDOW
        assert there <= max(bound, self._least), "beyond the bound"
        self._least = min(self._least, there)  # who finds too much stores nothing
        if self.record is None or not self.record[1].swept:
            return
        record = self.record[1]
        most, alive = record.nbytes, {place.name: place.quota._started for place in self.places}
        for name, highest in {**self.highest, **alive}.items():
            counted = record.counted.get(name)
            if counted is not None:  # what a dead one has published is counted before anybody in its place is
                most += alive[name] - counted if name in alive else max(0, highest - counted)
            elif self.racy:  # a record that counted it may have been replaced by the copy of an older one, for a second
                most += WINDOW + min(WINDOW, highest)
            elif name in alive:
                most += WINDOW
        assert there <= most, "a record is below the truth"

    def run(self, steps: int) -> None:
        names = list(EVENTS)
        weights = [
            weight * self.random.choice(MORE_OR_LESS[event]) * self.rates.get(event.__name__, 1.0)
            for event, weight in EVENTS.items()
        ]
        for event in self.random.choices(names, weights, k=steps):
            event(self, self.random.choice(self.places))
            self.check()

    def settle(self, seconds: float = 600.0) -> None:
        """Without faults, and without uploads but those that are under way."""
        self.faults = 0.0
        for place in self.places:
            place.paused_until_s = 0.0
        until_s = self.now + seconds
        while self.now < until_s:
            self.advance(0.25)
            for place in self.places:
                self.ends(place)
                for _ in range(4):
                    place.step()
                self.check()


EVENTS: dict[Callable[[World, Process], None], float] = {
    World.step: 100,
    World.upload: 30,
    World.arrives: 4,
    World.ends: 30,
    World.passes: 14,
    World.late: 3,
    World.long: 1,
    World.pause: 0.6,
    World.kill: 0.3,
    World.row_goes: 0.5,
    World.record_goes: 0.2,
    World.counter_falls: 0.5,
}
MORE_OR_LESS: dict[Callable[[World, Process], None], list[float]] = {
    **{event: [1.0] for event in EVENTS},
    World.step: [0.5, 1.0, 2.0],
    World.ends: [0.3, 1.0, 2.0],
    World.passes: [0.3, 1.0],
    World.long: [0.0, 1.0],
    World.pause: [0.0, 1.0, 3.0],
    World.kill: [0.0, 0.5, 1.0, 4.0],
    World.record_goes: [0.0, 0.0, 1.0],
}
"""In one world, than in others."""


def world_of(seed: int, **named: Any) -> World:
    chance = random.Random(seed)
    choice = {
        "movers": chance.choice([1, 2, 2, 3, 8]),
        "racy": chance.random() < 0.5,
        "faults": chance.choice([0.0, 0.02, 0.1]),
        "stale_s": chance.choice([0.0, 5.0, 30.0]),
        "sweep_s": chance.choice([0.0, 30.0]),
    }
    return World(chance, **(choice | named))


def explore(seeds: range, steps: int = 2500, **named: Any) -> None:
    """Raises AssertionError if something does not hold."""
    for seed in seeds:
        world_of(seed, **named).run(steps)
