"""Engines in processes of their own, which tests kill: a store under a random load that verifies every byte of every
hit, and that answers questions between two steps of the load."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Self

import numpy as np

from nixl_tiers.store import TieredStore, open_with
from nixl_tiers.tiers.s3.names import RowNames
from tests.support.leaks import MARK, ProcessWatch, has_mark, processes_with_mark, reclaim_all_host_rows
from tests.support.times import changed
from tests.support.waiting import serves, until

SIZE: Final = 16 << 10
ROW: Final = 20 << 10  # with its seal
HOST_ROWS, MOST_ROWS, KEYS = 30, 60, 150  # so that the load never stops storing, loading and evicting
TIMEOUT_S: Final = 120.0
LOSSES: Final = ("missing", "corrupt", "removed")
"""Counters of rows that a tier's index has and its medium has not."""

Tier = dict[str, Any]


def key_of(number: int) -> bytes:
    return b"key-%06d" % number


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def config_of(tier: Tier, replicas: int) -> dict[str, Any]:
    return {"tiers": [{"type": "cpu", "capacity": HOST_ROWS * ROW}, tier], "replicas": replicas, "wait_s": 5.0}


def name_of(tier: Tier) -> str:
    return "s3" if "bucket" in tier else "file"


def found_in(store: TieredStore, numbers: Iterable[int]) -> set[int]:
    """Those that are hits; AssertionError for one with a wrong byte."""
    wanted = list(numbers)
    out = np.full((len(wanted), SIZE), 0xEE, np.uint8)
    hits = store.get([key_of(number) for number in wanted], out)
    for number, hit, row in zip(wanted, hits, out, strict=True):
        assert not hit or np.array_equal(row, content(number)), f"a wrong byte for key {number}"
    return {number for number, hit in zip(wanted, hits, strict=True) if hit}


def load_step(store: TieredStore, draw: random.Random) -> None:
    some = draw.sample(range(KEYS), 12)
    if draw.random() < 0.6:
        store.put([key_of(number) for number in some], np.stack([content(number) for number in some]))
    else:
        found_in(store, some)


@dataclass(frozen=True)
class Census:
    """What a store's storage tier holds while it has no load."""

    rows: frozenset[int]  # in its index
    served: frozenset[int]  # of all keys, those that are hits, byte by byte
    losses: Mapping[str, int]  # since the store was opened


def _census(store: TieredStore, name: str) -> Census:
    """Writes what is queued, empties the host, so that all hits come from the storage tier, and gets all keys."""
    until(lambda: serves(store.stats()[name]), "the tier", timeout_s=TIMEOUT_S)
    until(lambda: store.wait_ready(1.0), "the tier to be listed", timeout_s=TIMEOUT_S)
    until(lambda: store.flush(1.0) and reclaim_all_host_rows(store), "every host row to be free", timeout_s=TIMEOUT_S)
    keys = range(KEYS)
    served: set[int] = set()
    absent: set[int] = set()  # of those of a medium that is asked, or of which nothing need be asked

    def complete() -> bool:
        # On a busy machine a load may come too late, and is tried again. What is lost is no longer in the index.
        # Of what is asked, the same: what is unknown while the medium is late is asked for when it is in time again.
        with store.coordinator.core() as core:
            late = any(shared.slow or shared.later for shared in core.checks.tiers.values())
        served.update(found_in(store, [n for n in keys if n not in served]))
        with store.coordinator.core() as core:
            now, asked = store.coordinator.now(), core.checks.tiers.values()
            absent.update(n for n in keys if all(shared.is_absent(key_of(n), now) for shared in asked))
        places = zip(keys, _located(store), strict=True)
        return not late and all(n in served or (n in absent and place is None) for n, place in places)

    until(complete, "every row of the index to be loaded", timeout_s=TIMEOUT_S)
    until(lambda: reclaim_all_host_rows(store), "every host row to be free", timeout_s=TIMEOUT_S)
    rows = {n for n, place in zip(keys, _located(store), strict=True) if place == name}
    numbers = store.stats()[name]
    return Census(frozenset(rows), frozenset(served), {each: int(numbers[each]) for each in LOSSES})


def _store_and_flush(store: TieredStore, name: str, draw: random.Random) -> int:
    """Returns how many rows the storage tier then has: the newest of them for some milliseconds only."""
    new = [number for number, place in enumerate(_located(store)) if place is None]
    some = draw.sample(new, min(12, len(new)))
    if some:
        store.put([key_of(number) for number in some], np.stack([content(number) for number in some]))
    until(lambda: store.flush(1.0), "all rows to be written", timeout_s=TIMEOUT_S)
    return int(store.stats()[name]["rows"])


def _located(store: TieredStore) -> list[str | None]:
    return store.locate([key_of(number) for number in range(KEYS)])


def _serve(config: Mapping[str, Any], env: dict[str, str], seed: int, talk: Connection, shown: Any) -> None:
    """The engine's process. Between two steps of the load it answers requests; the load pauses after all but "load".
    `shown`: steps, the mover's process, rows, whether it may write."""
    os.environ.update(env)  # that of the process it was forked from is older
    draw, name = random.Random(seed), name_of(config["tiers"][1])
    try:
        # A census loads all, also what was under way when a mover was killed.
        store = open_with(changed(set_aside_s=(1.0, 5.0)), config, SIZE, "kill-rounds")
        loading = False
        while True:
            numbers = store.stats()[name]
            writes = serves(numbers) and not numbers["problem"]
            shown[1:] = [store.coordinator.mover_pids[0] or 0, int(numbers["rows"]), int(writes)]
            if talk.poll(0.0 if loading else 0.05):
                request = talk.recv()
                loading = request == "load"
                if request == "census":
                    talk.send(_census(store, name))
                elif request == "flush":
                    talk.send(_store_and_flush(store, name, draw))
            elif loading:
                load_step(store, draw)
                shown[0] += 1
    except EOFError:  # the test has ended
        os._exit(0)
    except BaseException as error:
        talk.send(error)
        raise


class Engine:
    """An engine's process and its mover's. It starts when this is made; no load until `load`."""

    def __init__(self, context: Any, config: Mapping[str, Any], env: Mapping[str, str], seed: int) -> None:
        """`context`: of `multiprocessing`."""
        self.mark = uuid.uuid4().hex
        self._talk, theirs = context.Pipe()
        self._shown = context.Array("q", 4, lock=False)
        env = {**env, MARK: self.mark}
        self._process = context.Process(target=_serve, args=(config, env, seed, theirs, self._shown), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def rows(self) -> int:
        """In its storage tier after the last step."""
        return int(self._shown[2])

    @property
    def writes(self) -> bool:
        """Whether its storage tier is up and has no problem: the lease of a private prefix is its own."""
        self._raise_error()
        return bool(self._shown[3])

    def load(self) -> None:
        """Start or continue the load."""
        self._talk.send("load")

    def census(self) -> Census:
        """Pauses the load."""
        self._talk.send("census")
        return self._answer()  # type: ignore[no-any-return]

    def flush(self) -> int:
        """Pauses the load. How many rows the storage tier has: it has just written some of them, and writes none."""
        self._talk.send("flush")
        return self._answer()  # type: ignore[no-any-return]

    def run(self, steps: int) -> None:
        """Return after so many more steps of the load, so that a moment is one of the load on any machine."""
        end = self._shown[0] + steps
        self._until(lambda: self._shown[0] >= end, f"{steps} steps")

    def kill_mover(self) -> None:
        """kill -9; returns when its engine has started another one."""
        killed = self._shown[1]
        self._kill_mover()
        self._until(lambda: self._shown[1] not in {0, killed}, "another mover")

    def kill(self, *, mover: bool = False) -> None:
        """kill -9; its mover at the same time, or else the mover finds out by itself. Returns when both have ended."""
        ended = ProcessWatch(pid for pid in (self._process.pid, self._shown[1]) if pid)
        if mover:
            self._kill_mover()
        self._process.kill()
        self._process.join()
        self._talk.close()
        assert ended.wait_for_exit(TIMEOUT_S), "an orphaned mover stays"
        until(lambda: not processes_with_mark(self.mark), "its last processes to end", timeout_s=TIMEOUT_S)

    def _kill_mover(self) -> None:
        if has_mark(self._shown[1], self.mark):
            with suppress(ProcessLookupError):
                os.kill(self._shown[1], signal.SIGKILL)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            self._raise_error()
            return condition()

        until(holds, what, timeout_s=TIMEOUT_S)

    def _answer(self) -> Any:
        assert self._talk.poll(4 * TIMEOUT_S), "no answer from an engine"  # it has timeouts of its own
        answer = self._talk.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _raise_error(self) -> None:
        if self._talk.poll(0):
            self._answer()


class Engines:
    """Makes engines, forked from a process that has imported everything: most of a round is then the load itself.
    A context manager: all are killed at its end."""

    def __init__(self, temporary: os.PathLike[str], replicas: int = 1) -> None:
        """`replicas`: how many of them share a tier's capacity."""
        self._replicas = replicas
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.engines"])
        self._env = {**os.environ, "TMPDIR": os.fspath(temporary)}
        self._numbers = itertools.count()
        self._living: list[Engine] = []

    def start(self, tier: Tier, seed: int) -> Engine:
        engine = Engine(self._context, config_of(tier, self._replicas), self._env, 1000 * seed + next(self._numbers))
        self._living.append(engine)
        return engine

    def kill(self, engine: Engine, *, mover: bool = False) -> None:
        self._living.remove(engine)
        engine.kill(mover=mover)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._living:
            self.kill(self._living[-1])


def sleep_a_moment(draw: random.Random) -> None:
    """So that a kill is at no step's beginning or end."""
    time.sleep(draw.uniform(0.0, 0.05))


def s3_rows(client: Any, tier: Tier) -> dict[str, int]:
    """The bytes of the objects of rows below a prefix, by name."""
    pages = client.get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=tier["bucket"], Prefix=f"{tier['prefix']}/")
    names = RowNames(tier["prefix"])
    return {
        each["Key"]: each["Size"] for page in found for each in page.get("Contents", ()) if names.parse(each["Key"])
    }


def least_s3_bytes(client: Any, tier: Tier) -> int:
    """Of the rows that two listings in a row both found: they were there at the moment between them. One listing alone
    may count a row that is deleted behind it, and another one that is uploaded ahead of it for that row's room."""
    before, after = s3_rows(client, tier), s3_rows(client, tier)
    return sum(min(nbytes, after.get(name, 0)) for name, nbytes in before.items())
