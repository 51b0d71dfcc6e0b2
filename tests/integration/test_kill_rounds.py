"""kill -9 of the engine, of its mover, of both, at random moments of a random load; again and again on one medium.

Every round opens what the kill of the last one left, and checks it before it goes on: every hit is byte-exact, every
row that is accounted for is a hit, what is on the medium is what is accounted for, within its budget; no process, no
shared memory and no temporary file is left. `KILL_ROUNDS=100` runs more than the default 20 rounds, shared by the
media.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.chunk import PAGE
from nixl_tiers.testing.servers import MotoServer, S3Server
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.rowfile.quota import FANOUT, MARGIN_BYTES, NAME_BYTES
from tests.support.disks import disk_bytes
from tests.support.leaks import MARK, ProcessWatch, processes_with_mark, shared_memory_names
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(3600)

MEDIA = ["slabs", "files", "s3"]
ROUNDS = -(-int(os.environ.get("KILL_ROUNDS", "20")) // len(MEDIA))  # of each
SIZE = 16 << 10
ROW = 20 << 10  # with its seal
HOST_ROWS, MOST_ROWS, KEYS = 30, 60, 150  # so that the load never stops storing, loading and evicting
STEPS = 40  # of the load, at most before a kill
TIMEOUT_S = 120.0
FILES_BYTES = MARGIN_BYTES + (FANOUT + 3) * PAGE + MOST_ROWS * (ROW + NAME_BYTES)
OFFERED = MOST_ROWS - MOST_ROWS // 16  # of a full directory of files: the rest is left to what is to be stored
Tier = dict[str, Any]


def key_of(number: int) -> bytes:
    return b"key-%06d" % number


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def open_store(tier: Tier) -> nixl_tiers.TieredStore:
    config = {"tiers": [{"type": "cpu", "capacity": HOST_ROWS * ROW}, tier], "wait_s": 5.0}
    return nixl_tiers.open(config, SIZE, "kill-rounds")


def name_of(tier: Tier) -> str:
    return "s3" if "bucket" in tier else str(tier["type"])


def hits_of(store: nixl_tiers.TieredStore, numbers: list[int]) -> int:
    """How many are hits; AssertionError for one with a wrong byte."""
    out = np.full((len(numbers), SIZE), 0xEE, np.uint8)
    hits = store.get([key_of(number) for number in numbers], out)
    for number, hit, row in zip(numbers, hits, out, strict=True):
        assert not hit or np.array_equal(row, content(number)), f"a wrong byte for key {number}"
    return sum(hits)


def check(store: nixl_tiers.TieredStore, tier: Tier, held: int) -> int:
    """Check a store that was just opened on a medium that holds so many rows; returns how many its storage tier has.
    -1: the number on the medium is not known from outside."""
    name = name_of(tier)
    until(lambda: store.stats()[name]["up"] == 1.0, "the tier", timeout_s=TIMEOUT_S)
    until(lambda: not store.stats()[name]["problem"], "its predecessor's lease to expire", timeout_s=TIMEOUT_S)
    rows = int(store.stats()[name]["rows"])
    assert held < 0 or rows == (min(held, OFFERED) if tier.get("layout") == "files" else held)
    # Nothing is stored meanwhile; on a busy machine a load may come too late, and is tried again.
    what = f"each of {rows} rows that are accounted for to be a hit"
    until(lambda: hits_of(store, list(range(KEYS))) == rows, what, timeout_s=TIMEOUT_S)
    assert store.stats()[name]["corrupt"] == 0
    if tier.get("layout") == "files":
        written = Path(tier["path"]) / INCOMING
        until(lambda: not list(written.iterdir()), "what was being written to be swept", timeout_s=TIMEOUT_S)
    return rows


def live(tier: Tier, env: dict[str, str], held: int, seed: int, talk: Connection) -> None:
    """One process: check the rows that are there, report them, and load the store until it is killed. Reports
    each mover that is up, and of each step of the load, so that a moment is one of the load on any machine."""
    os.environ.update(env)  # that of the process it was forked from is older
    store = open_store(tier)
    try:
        talk.send(("rows", check(store, tier, held)))
        draw = random.Random(seed)
        mover = None
        for step in itertools.count():
            now = store.coordinator.mover_pids[0]
            if now not in (mover, None) and store.stats()[name_of(tier)]["up"] == 1.0:
                mover = now
                talk.send(("mover", mover))
            some = draw.sample(range(KEYS), 12)
            if draw.random() < 0.6:
                store.put([key_of(number) for number in some], np.stack([content(number) for number in some]))
            else:
                hits_of(store, some)
            talk.send(("step", step))
    except BaseException as error:
        talk.send(("error", repr(error)))
        raise


def receive(talk: Connection, topic: str, wanted: Callable[[int], bool] = lambda _: True) -> int:
    """The value of the next message of this topic from the engine. AssertionError if it reports an error."""
    deadline = time.monotonic() + 3 * TIMEOUT_S  # it has its own
    while time.monotonic() < deadline and talk.poll(3 * TIMEOUT_S):
        got, value = talk.recv()
        assert got != "error", value
        if got == topic and wanted(value):
            return int(value)
    raise AssertionError(f"no {topic} from the engine")


class Medium:
    """The medium's content while no process uses it, seen from outside."""

    def __init__(self, tier: Tier, server: S3Server | None = None) -> None:
        self.tier = tier
        self._server = server

    def settle(self) -> None:
        """Wait until the server has answered the requests of killed processes."""
        if self._server is not None:
            until(lambda: not self._hung_up(), "the server to end its requests", timeout_s=TIMEOUT_S)

    def _hung_up(self) -> bool:
        """Whether a connection to the server was closed by its client, and not by the server yet."""
        assert self._server is not None
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(line[1].endswith(f":{self._server.port:04X}") and line[3] == "08" for line in lines)

    def rows(self) -> int:
        """-1 if that is not known from outside."""
        if self._server is not None:
            pages = self._server.client().get_paginator("list_objects_v2")
            found = pages.paginate(Bucket=self.tier["bucket"], Prefix=f"{self.tier['prefix']}/")
            return sum(each["Key"].count("/") > 1 for page in found for each in page.get("Contents", ()))
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
        yield Medium({"type": "file", "layout": request.param, "path": str(tmp_path / "kv"), "capacity": capacity})
        return
    moto: MotoServer = request.getfixturevalue("moto")
    bucket: Callable[[S3Server], str] = request.getfixturevalue("s3_bucket")
    request.getfixturevalue("s3_credentials")(moto)
    kind = "tests.mover.stub_tiers:ShortLeaseConfig"  # or each round would wait for its predecessor's lease to expire
    tier = {"type": kind, "lease_s": 2.0, "bucket": bucket(moto), "prefix": request.getfixturevalue("s3_prefix")}
    yield Medium(tier | {"endpoint": moto.endpoint, "capacity": MOST_ROWS * ROW}, moto)


def test_after_a_kill_at_any_moment_rows_are_intact_and_accounted_for(medium: Medium, tmp_path: Path) -> None:
    tier = medium.tier
    draw = random.Random(7)
    # Engines are forked from a process that has imported everything: most of a round is then the load itself.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.test_kill_rounds"])
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shared = shared_memory_names()
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark, "TMPDIR": str(temporary)}
    rows = []
    for round_ in range(ROUNDS):
        victim = draw.choice(["engine", "mover", "both"])
        ours, theirs = context.Pipe()
        coordinator = context.Process(target=live, args=(tier, env, medium.rows(), round_, theirs), daemon=True)
        coordinator.start()
        theirs.close()
        try:
            rows.append(receive(ours, "rows"))
            moment = draw.randrange(STEPS)
            receive(ours, "step", lambda step, moment=moment: step >= moment)
            time.sleep(draw.uniform(0.0, 0.05))  # no step's beginning or end
            killed = set(processes_with_mark(mark)) if victim != "engine" else set()
            for mover in killed:
                with suppress(ProcessLookupError):
                    os.kill(mover, signal.SIGKILL)
            if victim == "mover":  # the engine goes on with another one, and with true hits
                receive(ours, "mover", lambda mover, killed=killed: mover not in killed)
                moment = receive(ours, "step") + draw.randrange(STEPS)
                receive(ours, "step", lambda step, moment=moment: step >= moment)
        finally:
            movers = ProcessWatch(processes_with_mark(mark))
            coordinator.kill()
            coordinator.join()
            ours.close()
        assert movers.wait_for_exit(TIMEOUT_S), "an orphaned mover stays"
        until(lambda: not processes_with_mark(mark), f"{processes_with_mark(mark)} to end", timeout_s=TIMEOUT_S)
        medium.settle()
        assert medium.nbytes() <= tier["capacity"]
    with open_store(tier) as store:
        rows.append(check(store, tier, medium.rows()))
    assert max(rows) > MOST_ROWS / 2, "rounds in which little is stored show little"
    assert shared_memory_names() <= shared
    assert list(temporary.iterdir()) == []
