"""kill -9 of the engine, of its mover, of both, at random moments of a random load; again and again on one medium.

Every round opens what the kill of the last one left, and checks it before it goes on: every hit is byte-exact, every
row that is accounted for is a hit, what is on the medium is what is accounted for, within its budget; no process, no
shared memory and no temporary file is left. `KILL_ROUNDS=100` runs more than the default 12 rounds, shared by the
media.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES
from nixl_tiers.tiers.rowfile.tier import MARGIN_BYTES
from nixl_tiers.tiers.s3.budget import USAGE_NAME
from nixl_tiers.tiers.s3.record import Record
from tests.support.disks import disk_bytes
from tests.support.engines import MOST_ROWS, ROW, TIMEOUT_S, Engine, Engines, Tier, s3_rows, sleep_a_moment
from tests.support.file_tier import file_tier
from tests.support.leaks import shared_memory_names
from tests.support.servers import MotoServer, S3Server
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(3600)

MEDIA = ["slabs", "files", "s3"]
VICTIMS = ["engine", "mover", "both"]
ROUNDS = -(-int(os.environ.get("KILL_ROUNDS", "12")) // len(MEDIA))  # of each
STEPS = 40  # of the load, at most before a kill
FILES_BYTES = MARGIN_BYTES + MOST_ROWS * (ROW + NAME_BYTES)
WINDOW_ROWS = 5  # of the bucket


class Medium:
    """The medium's content while no process uses it, seen from outside."""

    def __init__(self, tier: Tier, server: S3Server | None = None) -> None:
        self.tier = tier
        self._server = server

    def settle(self) -> None:
        """Wait until the server has answered the requests of killed processes; then their usage record is released, as
        each round would wait until it is stale."""
        if self._server is not None:
            until(lambda: not self._hung_up(), "the server to end its requests", timeout_s=TIMEOUT_S)
            client, at = (
                self._server.client(),
                {"Bucket": self.tier["bucket"], "Key": f"{self.tier['prefix']}/{USAGE_NAME}"},
            )
            record = Record.decode(client.get_object(**at)["Body"].read())
            assert record is not None
            client.put_object(**at, Body=replace(record, writer="").encode())

    def _hung_up(self) -> bool:
        """Whether a connection to the server was closed by its client, and not by the server yet."""
        assert self._server is not None
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(line[1].endswith(f":{self._server.port:04X}") and line[3] == "08" for line in lines)

    def rows(self) -> int:
        """-1 if that is not known from outside."""
        if self._server is not None:
            return len(s3_rows(self._server.client(), self.tier))
        if self.tier["layout"] == "files":
            return sum(1 for _ in Path(self.tier["path"]).rglob("*.row"))
        return -1

    def nbytes(self) -> int:
        if self._server is not None:
            return self.rows() * ROW
        return disk_bytes(Path(self.tier["path"]))


@pytest.fixture(params=MEDIA)
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    if request.param != "s3":
        capacity = FILES_BYTES if request.param == "files" else 4 << 20
        yield Medium(file_tier(tmp_path / "kv", capacity, layout=request.param))
        return
    moto: MotoServer = request.getfixturevalue("moto")
    bucket: Callable[[S3Server], str] = request.getfixturevalue("s3_bucket")
    request.getfixturevalue("s3_credentials")(moto)
    # It is written often, and lasts on a machine on which the server takes seconds for a request.
    kind = "tests.mover.stub_tiers:FastBudgetConfig"
    tier = {
        "type": kind,
        "stale_s": 60.0,
        "window_share": MOST_ROWS // WINDOW_ROWS,
        "bucket": bucket(moto),
        "prefix": request.getfixturevalue("s3_prefix"),
    }
    yield Medium(tier | {"endpoint": moto.endpoint, "capacity": MOST_ROWS * ROW}, moto)


def check(engine: Engine, medium: Medium, held: int) -> int:
    """Check an engine that was started on a medium with so many rows; how many its storage tier has found. It has
    stored nothing yet."""
    until(lambda: engine.writes, "the tier", timeout_s=TIMEOUT_S)
    in_bucket = "bucket" in medium.tier
    if in_bucket or medium.tier.get("layout") == "files":  # rows are asked for
        until(lambda: len(engine.census().rows) == medium.rows(), "the rows to be found", timeout_s=TIMEOUT_S)
    census = engine.census()
    if in_bucket:  # each killed mover may have uploaded a window that is not counted: room is made for it
        assert len(census.rows) >= min(held, MOST_ROWS - 7 * WINDOW_ROWS)
    elif held >= 0:
        assert len(census.rows) == held
    assert census.served == census.rows
    assert census.losses["corrupt"] == 0
    if medium.tier.get("layout") == "files":
        written = Path(medium.tier["path"]) / INCOMING
        until(lambda: not list(written.iterdir()), "what was being written to be swept", timeout_s=TIMEOUT_S)
    return len(census.rows)


def test_after_a_kill_at_any_moment_rows_are_intact_and_accounted_for(medium: Medium, tmp_path: Path) -> None:
    draw = random.Random(7)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shared = shared_memory_names()
    rows = []
    victims = [*draw.sample(VICTIMS, len(VICTIMS)), *draw.choices(VICTIMS, k=ROUNDS)]
    with Engines(temporary) as engines:
        for round_, victim in enumerate(victims[:ROUNDS]):
            held, engine = medium.rows(), engines.start(medium.tier, round_)
            rows.append(check(engine, medium, held))
            engine.load()
            engine.run(draw.randrange(STEPS))
            sleep_a_moment(draw)
            if victim == "mover":  # the engine goes on with another one, and with true hits
                engine.kill_mover()
                until(lambda engine=engine: engine.writes, "the other mover", timeout_s=TIMEOUT_S)
                engine.run(draw.randrange(STEPS))
            engines.kill(engine, mover=victim == "both")
            medium.settle()
            assert medium.nbytes() <= medium.tier["capacity"]
        held, engine = medium.rows(), engines.start(medium.tier, ROUNDS)
        rows.append(check(engine, medium, held))
    assert max(rows) > MOST_ROWS / 2, "rounds in which little is stored show little"
    assert shared_memory_names() <= shared
    assert list(temporary.iterdir()) == []
