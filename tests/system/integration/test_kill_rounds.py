"""kill -9 of engines, of their movers, of both, at random moments of a random load; again and again on one medium.

With one engine, every round opens what the kill of the last one left, and checks it before it goes on: every hit is
byte-exact, every row that is accounted for is a hit, what is on the medium is what is accounted for, within its budget;
no process, no shared memory and no temporary file is left. With two, a killed engine costs the other none of its rows,
the bounds hold all the time, and the engine that replaces it finds what it has left. `SEED=n` repeats a run whose seed
was printed, `KILL_ROUNDS=n` sets the rounds.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES
from nixl_tiers.tiers.rowfile.tier import MARGIN_BYTES
from nixl_tiers.tiers.s3.budget import USAGE_NAME
from nixl_tiers.tiers.s3.record import Record
from tests.support.disks import assert_never_exceeds, disk_bytes, least_disk_bytes
from tests.support.engines import (
    MOST_ROWS,
    ROW,
    TIMEOUT_S,
    Census,
    Engine,
    Engines,
    Tier,
    least_s3_bytes,
    sleep_a_moment,
)
from tests.support.file_tier import file_tier
from tests.support.leaks import shared_memory_names
from tests.support.servers import S3Server
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(3600)


@contextmanager
def engines_that_leave_nothing(temporary: Path, replicas: int = 1) -> Iterator[Engines]:
    shared = shared_memory_names()
    temporary.mkdir()
    with Engines(temporary, replicas) as engines:
        yield engines
    assert shared_memory_names() <= shared
    assert list(temporary.iterdir()) == []


VICTIMS = ["engine", "mover", "both"]
ROUNDS = -(-int(os.environ.get("KILL_ROUNDS", "8")) // 2)  # of each layout
STEPS = 40  # of the load, at most before a kill
FILES_BYTES = MARGIN_BYTES + MOST_ROWS * (ROW + NAME_BYTES)


@pytest.mark.parametrize(("layout", "capacity"), [("slabs", 4 << 20), ("files", FILES_BYTES)])
def test_after_a_kill_at_any_moment_rows_are_intact_and_accounted_for(
    layout: str, capacity: int, tmp_path: Path
) -> None:
    place, draw, found = tmp_path / "kv", random.Random(7), list[int]()
    tier = file_tier(place, capacity, layout=layout)

    def files() -> int:
        return sum(1 for _ in place.rglob("*.row"))

    def check(engine: Engine, held: int) -> None:
        """One that was started where so many row files are. It has stored nothing yet."""
        until(lambda: engine.writes, "the tier", timeout_s=TIMEOUT_S)
        if layout == "files":  # rows are asked for
            until(lambda: len(engine.census().rows) == held, "the rows to be found", timeout_s=TIMEOUT_S)
            until(lambda: not list((place / INCOMING).iterdir()), "what was being written to be swept", TIMEOUT_S)
            assert files() == held
        census = engine.census()
        assert census.served == census.rows
        assert census.losses["corrupt"] == 0
        found.append(len(census.rows))

    victims = [*draw.sample(VICTIMS, len(VICTIMS)), *draw.choices(VICTIMS, k=ROUNDS)]
    with engines_that_leave_nothing(tmp_path / "tmp") as engines:
        for round_, victim in enumerate([*victims[:ROUNDS], "end"]):
            held, engine = files(), engines.start(tier, round_)
            check(engine, held)
            engine.load()
            engine.run(draw.randrange(STEPS))
            sleep_a_moment(draw)
            if victim == "mover":  # the engine goes on with another one, and with true hits
                engine.kill_mover()
                until(lambda engine=engine: engine.writes, "the other mover", timeout_s=TIMEOUT_S)
                engine.run(draw.randrange(STEPS))
            engines.kill(engine, mover=victim == "both")
            assert disk_bytes(place) <= capacity
    assert max(found) > MOST_ROWS / 2, "rounds in which little is stored show little"


# --- two engines ---


SHORT, LONG = 2, int(os.environ.get("KILL_ROUNDS", "30"))
KINDS = ["flushed", "engine", "mover", "both", "crowd"]
"""What is killed: both processes of an engine just after it has written all rows, under load an engine, its mover, both
at once, both of both engines."""
WINDOW_SHARE = 4  # of a small shared prefix
IN_FLIGHT = 8  # rows that a killed engine may have been writing or loading


class Both:
    """What two engines use, seen from outside."""

    tier: Tier
    bound: int
    """In bytes, at every moment."""
    pause_s = 0.01  # between two measurements
    replicas = 1  # engines that share the capacity of slabs
    steps = 12  # of the load of each engine, at most before a kill

    def nbytes(self, _: object = None) -> int:
        raise NotImplementedError

    def check_survivor(self, before: Census, after: Census) -> None:
        """Of an engine before the other was killed and afterwards."""
        assert after.losses == before.losses
        assert after.rows == after.served

    def check_heir(self, left_rows: int, found: Census, *, wrote: bool) -> None:
        """`left_rows`: of an engine that was killed when all was written, the other not writing either; `wrote`:
        whether these were its own. `found`: by the one that replaces it."""
        assert len(found.rows) == left_rows

    def check_heirs(self, left_rows: list[int], found: list[Census]) -> None:
        """The same for engines, or movers, that were killed at any moment."""

    def check_quiet(self, pair: list[Engine], both: list[Census]) -> None:
        """Both engines have paused."""


class Parts(Both):
    """Two parts of one path: each engine has rows of its own."""

    replicas = 2

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bound = 3 << 20
        self.tier = file_tier(path, self.bound)

    def nbytes(self, _: object = None) -> int:
        return least_disk_bytes(self.path)

    def check_heirs(self, left_rows: list[int], found: list[Census]) -> None:
        assert sum(len(census.rows) for census in found) >= sum(left_rows) - IN_FLIGHT * len(found), "they are not warm"

    def check_quiet(self, pair: list[Engine], both: list[Census]) -> None:
        for census in both:
            assert census.rows == census.served
        assert {each.name for each in self.path.iterdir() if not each.name.startswith(".")} == {"part-0", "part-1"}
        for part in self.path.glob("part-*"):
            names = {each.name for shard in part.iterdir() if shard.is_dir() for each in shard.iterdir()}
            ours = ("slab-", "manifest.", "namespace.json", "about.json")
            assert {name for name in names if not name.startswith(ours)} == set()


class Prefix(Both):
    """Below a prefix of a bucket."""

    pause_s = 0.1

    def __init__(self, server: S3Server, place: dict[str, Any]) -> None:
        self.client = server.client()
        self.tier = {"endpoint": server.endpoint, **place}

    def nbytes(self, _: object = None) -> int:
        return least_s3_bytes(self.client, self.tier)

    def check_heir(self, left_rows: int, found: Census, *, wrote: bool) -> None:
        assert len(found.rows) * ROW == self.nbytes()
        assert not wrote or len(found.rows) >= left_rows


class LargePrefix(Prefix):
    """Nothing need be deleted."""

    def __init__(self, server: S3Server, place: dict[str, Any]) -> None:
        super().__init__(server, place)
        kind = "tests.mover.stub_tiers:FastBudgetConfig"
        self.bound = 64 << 20
        self.tier |= {"type": kind, "window_share": 64, "stale_s": 2.0, "capacity": self.bound}
        self._kept: set[int] = set()

    def check_heirs(self, left_rows: list[int], found: list[Census]) -> None:
        """What a killed mover was loading may have killed it, and is no hit for a while."""
        for census in found:
            assert len(self._kept - census.served) <= IN_FLIGHT
            assert census.rows >= census.served

    def check_quiet(self, pair: list[Engine], both: list[Census]) -> None:
        for census in both:
            assert not any(census.losses.values()), census.losses
            self._kept |= census.served


class SmallPrefix(Prefix):
    """Rows are deleted for room all the time."""

    steps = 60  # so that far more is offered than the upload windows take

    def __init__(self, server: S3Server, place: dict[str, Any]) -> None:
        super().__init__(server, place)
        kind, capacity = "tests.mover.stub_tiers:FastBudgetConfig", MOST_ROWS * ROW
        window = capacity // WINDOW_SHARE
        self._free_bytes = capacity - window
        self.bound = capacity + window  # and one for each further mover: an engine starts when the killed one has ended
        self.tier |= {"type": kind, "window_share": WINDOW_SHARE, "stale_s": 2.0, "capacity": capacity}

    def check_survivor(self, before: Census, after: Census) -> None:
        assert after.losses["corrupt"] == 0

    def check_heir(self, left_rows: int, found: Census, *, wrote: bool) -> None:
        """Others go on."""

    def check_quiet(self, pair: list[Engine], both: list[Census]) -> None:
        def settled() -> bool:
            name = f"{self.tier['prefix']}/{USAGE_NAME}"
            found = self.client.get_object(Bucket=self.tier["bucket"], Key=name)
            record, nbytes = Record.decode(found["Body"].read()), self.nbytes()
            return record is not None and nbytes <= record.nbytes <= self._free_bytes

        until(settled, "a record of what is there, at least, with a window free", timeout_s=TIMEOUT_S)


def kill_rounds(medium: Both, rounds: int, temporary: Path) -> None:
    seed = int(os.environ.get("SEED", "7" if rounds == SHORT else str(time.time_ns() % 10_000)))
    print(f"SEED={seed}")
    draw = random.Random(seed)
    kinds = [KINDS[0], *draw.sample(KINDS[1:], len(KINDS) - 1)]
    with (
        assert_never_exceeds(Path(), medium.bound, medium.nbytes, medium.pause_s) as samples,
        engines_that_leave_nothing(temporary, medium.replicas) as engines,
    ):
        pair = [engines.start(medium.tier, seed), engines.start(medium.tier, seed)]
        for round_ in range(rounds):
            kind = kinds[round_ % len(kinds)]
            until(lambda: all(engine.writes for engine in pair), "engines that store", timeout_s=TIMEOUT_S)
            before = [engine.census() for engine in pair]
            for engine in pair:
                engine.load()
            number = draw.choice([0, 1])
            wrote = False
            killed = [0, 1] if kind == "crowd" else [number]
            for engine in pair:
                engine.run(draw.randrange(medium.steps // 2, medium.steps))
            print(f"round {round_}: {kind} {killed}")
            if kind == "flushed":
                pair[1 - number].flush()
                left_rows = [pair[number].flush()]
                wrote = pair[number].writes
            else:
                sleep_a_moment(draw)
                left_rows = [pair[each].rows for each in killed]
            for each in killed:
                if kind == "mover":
                    pair[each].kill_mover()
                else:
                    engines.kill(pair[each], mover=kind != "engine")
            if kind != "mover":
                for each in killed:
                    pair[each] = engines.start(medium.tier, seed)
                    if draw.random() < 0.3:  # while it starts
                        time.sleep(draw.uniform(0.0, 1.0))
                        engines.kill(pair[each], mover=True)
                        pair[each] = engines.start(medium.tier, seed)
            found = [pair[each].census() for each in killed]
            if kind == "flushed":
                medium.check_heir(left_rows[0], found[0], wrote=wrote)
            medium.check_heirs(left_rows, found)
            both = [engine.census() for engine in pair]
            assert all(census.losses["corrupt"] == 0 for census in both)
            for each in {0, 1} - {*killed}:
                medium.check_survivor(before[each], both[each])
            medium.check_quiet(pair, both)
    assert max(samples) > MOST_ROWS / 2 * ROW, "rounds in which little is stored show little"


@pytest.fixture(params=[SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def rounds(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture
def prefix(
    request: pytest.FixtureRequest,
    seaweedfs: S3Server,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> Prefix:
    s3_credentials(seaweedfs)
    made: Prefix = request.param(seaweedfs, {"bucket": s3_bucket(seaweedfs), "prefix": s3_prefix})
    return made


def test_two_parts_of_one_path(tmp_path: Path, rounds: int) -> None:
    kill_rounds(Parts(tmp_path / "kv"), rounds, tmp_path / "tmp")


@pytest.mark.parametrize("prefix", [LargePrefix, SmallPrefix], indirect=True)
def test_one_prefix(prefix: Prefix, tmp_path: Path, rounds: int) -> None:
    kill_rounds(prefix, rounds, tmp_path / "tmp")
