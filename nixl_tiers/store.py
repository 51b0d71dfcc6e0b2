"""TieredStore: the tiers as one embeddable object, without any engine."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from nixl_tiers import config as configuration
from nixl_tiers.cascade.manager import Lookup
from nixl_tiers.chunk import Geometry, Key, Namespace, check_key
from nixl_tiers.config import ConfigError, TiersConfig
from nixl_tiers.config_warnings import warnings_here, warnings_of
from nixl_tiers.engine import Engine, TierRefusedError
from nixl_tiers.lifetime import at_end
from nixl_tiers.memory.region import HostRegion

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

PATIENCE_S: Final = 3.0
LEAVE_S: Final = 10.0
POLL_S: Final = 0.25  # deadlines pass without anybody saying so
UNASKED_S: Final = 1.0  # for a store that nobody closed: its process may be about to end


def open(  # noqa: A001 - nixl_tiers.open is what it is called
    config: Mapping[str, Any] | str | Path | TiersConfig, chunk_bytes: int, namespace: str
) -> TieredStore:
    """A store of chunks of `chunk_bytes` bytes. Chunks put under another `namespace` are never found in this one.

    Raises ConfigError (one sentence), RegionError if the memory cannot be had.
    """
    checked = config if isinstance(config, TiersConfig) else configuration.load(config)
    geometry = Geometry(cells=1, cell_payload=chunk_bytes)
    configuration.check_rows(checked, geometry.row_bytes)
    configuration.check_paths(checked)
    facts = {"api": "nixl_tiers.open", "name": namespace, "chunk_bytes": chunk_bytes, "salt": checked.salt}
    region = HostRegion.create(geometry, checked.cpu.capacity // geometry.row_bytes)
    region.prefault()
    try:
        return TieredStore.over(checked, Namespace.of(facts), region)
    except BaseException:
        region.close()
        raise


class TieredStore:
    """Puts and gets chunks by key, over a host region and any number of storage tiers.

    `engine` is the non-blocking face beneath, for schedulers. Thread-safe. Close it, or use it as a context manager.
    """

    def __init__(self, engine: Engine, region: HostRegion, config: TiersConfig) -> None:
        """Not for callers: use nixl_tiers.open or TieredStore.over."""
        self._patience_s = config.wait_s
        self._flush_on_exit_s = config.flush_on_exit_s
        self.engine = engine
        self._region = region
        self._names = itertools.count()
        self._batch = max(1, region.rows // 4)
        self._closed = False
        self._pid = os.getpid()
        self._end = at_end(self, partial(_end, engine, region))

    @classmethod
    def over(
        cls, config: TiersConfig, namespace: Namespace, region: HostRegion, patience_s: float = PATIENCE_S
    ) -> Self:
        """A store over a region that the caller made or joined; closing the store closes the region too.

        Raises ConfigError if a tier can never work (no such bucket); a tier that is down heals by itself.
        """
        for warning in (*warnings_of(config), *warnings_here(config)):
            log.warning("nixl_tiers: %s", warning)
        engine = Engine(config, namespace, region)
        try:
            engine.start(patience_s)
            return cls(engine, region, config)
        except BaseException as error:
            engine.close(UNASKED_S)
            if isinstance(error, TierRefusedError):
                raise ConfigError(str(error)) from None
            raise

    def put(self, keys: Sequence[Key], rows: NDArray[np.uint8] | Sequence[Any]) -> int:
        """Store chunk `rows[i]` under `keys[i]`; returns how many are in the store now, counted from the first.

        rows: uint8 (n, chunk_bytes), or n buffers of chunk_bytes bytes each. Storage tiers are written to behind the
        caller's back; who is faster than they are is held up before rows would be evicted unwritten, by at most
        `wait_s` a batch, and not for longer than that in all unless something is written meanwhile. Fewer than n are
        accepted only while the host tier is full of rows in use.
        """
        chunks = self._chunks(keys, rows)
        accepted = 0
        stall = _Stall(self._patience_s)
        for start in range(0, len(keys), self._batch):
            self._wait_for_room(stall)
            part = keys[start : start + self._batch]
            number = self._put_part(list(part), chunks[start : start + self._batch])
            accepted += number
            if number < len(part):
                break
        return accepted

    def _put_part(self, keys: list[Key], chunks: Sequence[NDArray[np.uint8]]) -> int:
        name = self._name()  # of its own: what came with an earlier part is older, and goes first
        try:
            plan = self.engine.prepare_store(keys, name, call=True)
            chunk_of = dict(zip(keys, chunks, strict=True))
            for key, row in zip(plan.keys, plan.rows, strict=True):
                self._region.rows_view[row, : self.chunk_bytes] = chunk_of[key]
            if plan.keys:
                self._region.mark(np.array(plan.rows), 0, plan.ticket, True)
        finally:
            self.engine.end_call(name)
        missing = (i for i, key in enumerate(keys) if self.engine.where(key) is None)
        return next(missing, len(keys))

    def get(self, keys: Sequence[Key], out: NDArray[np.uint8]) -> list[bool]:
        """Fetch chunks into out, uint8 (n, chunk_bytes); True at i means that verified bytes of keys[i] are in out[i].

        Waits for storage tiers, at most `wait_s` of the configuration for each part that fits the host tier; and where
        none of them gives anything, at most that long in all.
        """
        if out.dtype != np.uint8 or out.shape != (len(keys), self.chunk_bytes):
            raise ValueError(f"out must be uint8 of shape ({len(keys)}, {self.chunk_bytes})")
        hits: list[bool] = []
        stall = _Stall(self._patience_s)
        for start in range(0, len(keys), self._batch):
            part = list(keys[start : start + self._batch])
            hits += self._get_part(part, out[start : start + len(part)], stall)
        return hits

    def _get_part(self, keys: list[Key], out: NDArray[np.uint8], stall: _Stall) -> list[bool]:
        name = self._name()
        try:
            with self.engine.changed:  # held from the look-ups to the load, and while nothing is awaited
                try:
                    stall.begin()
                    while Lookup.PENDING in (answers := [self.engine.lookup(key, name) for key in keys]):
                        if stall.over(answers.count(Lookup.HIT)):
                            break  # what is pending is no hit
                        self.engine.end_step()
                        stall.wait(self.engine.changed)
                    stall.saw(answers.count(Lookup.HIT))
                    hits = [answer is Lookup.HIT for answer in answers]
                    rows = self.engine.prepare_load(list(itertools.compress(keys, hits)), name, call=True)
                finally:
                    self.engine.end_step()
            for i, row in zip(itertools.compress(range(len(keys)), hits), rows.tolist(), strict=True):
                out[i] = self._region.rows_view[row, : self.chunk_bytes]
        finally:
            self.engine.end_call(name)
        return hits

    def locate(self, keys: Sequence[Key]) -> list[str | None]:
        """The name of the first tier that holds each key now ("cpu", "file", "s3"), or None."""
        return [self.engine.where(key) for key in keys]

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every cascade has finished or failed; False if that took longer than `timeout_s`."""
        return self._wait_for(lambda: self.engine.backlog() == 0, timeout_s)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters and gauges by tier, the same numbers as the metrics; and as "problem" a sentence about what is
        wrong with the tier, as far as it is known, else an empty one."""
        problems = self.engine.problems()
        return {name: {**numbers, "problem": problems[name]} for name, numbers in self.engine.counters().items()}

    def reset(self) -> None:
        """Forget everything: what was put before is never a hit again (see `on_reset`)."""
        self.engine.reset()

    def close(self, patience_s: float = LEAVE_S) -> None:
        """Let movers finish what runs and leave. What was not written below yet is lost: `flush` first, or configure
        `flush_on_exit_s` for tiers with `write: on_evict`."""
        if self._closed or os.getpid() != self._pid:  # a forked child leaves its parent's store alone
            return
        self._closed = True
        try:
            if self._flush_on_exit_s:
                self.engine.demote_all()
                self.flush(self._flush_on_exit_s)
        finally:
            self._end.detach()
            _end(self.engine, self._region, patience_s)

    @property
    def sub_blocks(self) -> int:
        return self._region.geometry.sub_blocks

    @property
    def chunk_bytes(self) -> int:
        return self._region.geometry.payload_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_for_room(self, stall: _Stall) -> None:
        """Hold up a put that is faster than the tiers are."""
        until_s = time.monotonic() + self._patience_s
        with self.engine.changed:
            stall.begin()
            while (backlog := self.engine.backlog()) > 2 * self._batch and time.monotonic() < until_s:
                if stall.over(-backlog):
                    return
                stall.wait(self.engine.changed)

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        with self.engine.changed:
            return self.engine.changed.wait_for(condition, timeout_s)

    def _name(self) -> str:
        return f"api-{next(self._names)}"

    def _chunks(self, keys: Sequence[Key], rows: NDArray[np.uint8] | Sequence[Any]) -> Sequence[NDArray[np.uint8]]:
        if len(keys) != len(rows):
            raise ValueError(f"{len(keys)} keys but {len(rows)} rows")
        if len(set(keys)) != len(keys):
            raise ValueError("the keys of one put must differ from each other")
        for key in keys:
            check_key(key)
        chunks = [
            row.reshape(-1) if isinstance(row, np.ndarray) and row.dtype == np.uint8 else np.frombuffer(row, np.uint8)
            for row in rows
        ]
        for i, chunk in enumerate(chunks):
            if chunk.nbytes != self.chunk_bytes:
                raise ValueError(f"rows[{i}] has {chunk.nbytes} bytes, but this store's chunks have {self.chunk_bytes}")
        return chunks


class _Stall:
    """For how long one call has waited, part after part, without any progress: after `most_s` it waits no more."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._waited_s = 0.0
        self._best: int | None = None

    def begin(self) -> None:
        """Another part, whose first measure of progress is no progress yet."""
        self._best = None

    def saw(self, progress: int) -> None:
        """`progress`: any number that grows while there is some."""
        if self._best is not None and progress > self._best:
            self._waited_s = 0.0
        self._best = progress if self._best is None else max(self._best, progress)

    def over(self, progress: int) -> bool:
        self.saw(progress)
        return self._waited_s >= self._most_s

    def wait(self, changed: threading.Condition) -> None:
        began_s = time.monotonic()
        changed.wait(min(POLL_S, self._most_s - self._waited_s))
        self._waited_s += time.monotonic() - began_s


def _end(engine: Engine, region: HostRegion, patience_s: float = UNASKED_S) -> None:
    engine.close(patience_s)
    region.close()
