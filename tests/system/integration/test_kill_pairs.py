"""Two engines on one medium under kill -9 at random moments: a killed engine costs the other none of its rows, the
bounds hold all the time, and the engine that replaces it finds what it has left.

In every round one of the two, or its mover, or both engines are killed under load and started again, while the other
goes on. `SEED=n` repeats a run whose seed was printed, `KILL_ROUNDS=n` sets the rounds of the slow ones.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.tiers.s3.budget import USAGE_NAME
from nixl_tiers.tiers.s3.record import Record
from tests.support.disks import assert_never_exceeds, least_disk_bytes
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

SHORT, LONG = 2, int(os.environ.get("KILL_ROUNDS", "30"))
KINDS = ["flushed", "engine", "mover", "both", "crowd"]
"""What is killed: both processes of an engine just after it has written all rows, under load an engine, its mover, both
at once, both of both engines."""
WINDOW_SHARE = 4  # of a small shared prefix
IN_FLIGHT = 8  # rows that a killed engine may have been writing or loading


class Medium:
    """What two engines use, seen from outside."""

    tier: Tier
    bound: int
    """In bytes, at every moment."""
    pause_s = 0.01  # between two measurements
    replicas = 1  # engines that share the capacity of slabs
    steps = 12  # of the load of each engine, at most before a kill

    def nbytes(self, _: object = None) -> int:
        raise NotImplementedError

    def owner(self) -> object:
        """Another one: another engine than before may write and delete."""
        return None

    def ready(self, pair: list[Engine]) -> bool:
        return all(engine.writes for engine in pair)

    def check_survivor(self, before: Census, after: Census) -> None:
        """Of an engine that could write, by the same right, before the other was killed and afterwards."""
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


class Parts(Medium):
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


class Prefix(Medium):
    """Below a prefix of a bucket."""

    pause_s = 0.1

    def __init__(self, server: S3Server, place: dict[str, Any]) -> None:
        self.client = server.client()
        self.tier = {"endpoint": server.endpoint, **place}

    def nbytes(self, _: object = None) -> int:
        return least_s3_bytes(self.client, self.tier)

    def read(self, name: str) -> bytes:
        found = self.client.get_object(Bucket=self.tier["bucket"], Key=f"{self.tier['prefix']}/{name}")
        body: bytes = found["Body"].read()
        return body

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
        self.tier |= {
            "type": kind,
            "window_share": WINDOW_SHARE,
            "stale_s": 2.0,
            "capacity": capacity,
        }

    def check_survivor(self, before: Census, after: Census) -> None:
        assert after.losses["corrupt"] == 0

    def check_heir(self, left_rows: int, found: Census, *, wrote: bool) -> None:
        """Others go on."""

    def check_quiet(self, pair: list[Engine], both: list[Census]) -> None:
        def settled() -> bool:
            record, nbytes = Record.decode(self.read(USAGE_NAME)), self.nbytes()
            return record is not None and nbytes <= record.nbytes <= self._free_bytes

        until(settled, "a record of what is there, at least, with a window free", timeout_s=TIMEOUT_S)


def kill_rounds(medium: Medium, rounds: int, temporary: Path) -> None:
    seed = int(os.environ.get("SEED", "7" if rounds == SHORT else str(time.time_ns() % 10_000)))
    print(f"SEED={seed}")
    draw = random.Random(seed)
    kinds = [KINDS[0], *draw.sample(KINDS[1:], len(KINDS) - 1)]
    shared = shared_memory_names()
    temporary.mkdir()
    with (
        assert_never_exceeds(Path(), medium.bound, medium.nbytes, medium.pause_s) as samples,
        Engines(temporary, medium.replicas) as engines,
    ):
        pair = [engines.start(medium.tier, seed), engines.start(medium.tier, seed)]
        for round_ in range(rounds):
            kind = kinds[round_ % len(kinds)]
            until(lambda: medium.ready(pair), "engines that store", timeout_s=TIMEOUT_S)
            owner = medium.owner()
            # Losses before do not count: who owns a prefix now may have read while another engine deleted.
            writing = {number: pair[number].census() for number in range(2) if pair[number].writes}
            for engine in pair:
                engine.load()
            number = draw.choice([*writing] if draw.random() < 0.7 and writing else [0, 1])
            wrote = False
            killed = [0, 1] if kind == "crowd" else [number]
            for engine in pair:
                engine.run(draw.randrange(medium.steps // 2, medium.steps))
            print(f"round {round_}: {kind} {killed}")
            if kind == "flushed":
                pair[1 - number].flush()
                left_rows = [pair[number].flush()]
                wrote = pair[number].writes and medium.owner() == owner
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
            if medium.owner() == owner:
                for each in writing.keys() - killed:
                    medium.check_survivor(writing[each], both[each])
            medium.check_quiet(pair, both)
    assert max(samples) > MOST_ROWS / 2 * ROW, "rounds in which little is stored show little"
    assert shared_memory_names() <= shared
    assert list(temporary.iterdir()) == []


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
