"""Host rows that the engine's workers, or threads, read (loads) and write (stores)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.promotion import Promotion, RequestIndex
from nixl_tiers.core.requests import FAILED, RUNNING, Request
from nixl_tiers.core.rows import CPU, FILLING, READY, Generation, Row
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.stats import Load, Savings
from nixl_tiers.core.writeback import WriteBack

Judge = Callable[[Sequence[Row]], tuple[Collection[Key], Collection[Key]]]
"""Says of rows that nobody writes any more which keys' hold nothing usable, and which lack their first sub-blocks, so
that no load can use them."""


class LoadPlan(NamedTuple):
    """What prepare_load pinned, in the order of its keys: host rows, and the tiers that their bytes came from.
    `missing`: of the rows that lack sub-blocks, place in `rows` -> how many at the row's beginning."""

    rows: list[int]
    sources: list[str]
    missing: dict[int, int]


class _Load(NamedTuple):
    """The rows that workers read, their keys, and those of them that came from a tier and were not read before."""

    rows: list[Row]
    keys: list[Key]
    promoted: list[Row]


@dataclass(frozen=True)
class StorePlan:
    """What prepare_store accepted: `keys[i]` goes into host row `rows[i]`; workers mark it with `store_seq`."""

    keys: list[Key]
    rows: list[int]
    store_seq: int


class Copies:
    """Keeps the rows that are being copied from eviction and from reuse, until their copy has ended.

    Two kinds of callers use host rows. A vLLM scheduler reports the keys that its workers are done with, and reports
    nothing of jobs that began before a reset. A thread that uses the store without an engine (`call`) ends its call by
    name: its rows are released then and not before, whatever was reset meanwhile.
    """

    def __init__(
        self,
        state: CascadeState,
        requests: RequestIndex,
        promotion: Promotion,
        writeback: WriteBack,
        savings: Savings,
    ) -> None:
        self._state = state
        self._host = state.host
        self._tiers = state.tiers
        self._requests = requests
        self._promotion = promotion
        self._writeback = writeback
        self._savings = savings
        self._loads: dict[str, list[_Load]] = {}  # of workers, by request
        self._calls: dict[str, list[Row]] = {}  # the rows that each call reads or writes
        self._store_seq = 0

    # --- loads -------------------------------------------------------------------------------------------------

    def prepare_load(
        self,
        name: str,
        keys: Sequence[Key],
        now: float,
        *,
        tokens: Sequence[int] = (),
        end: int | None = None,
        call: bool = False,
    ) -> LoadPlan:
        """Pin the rows of `keys`, all of them hits of this step. `tokens`: how many each key saves the engine from
        computing, and `end`: the token of the request before which they end, for the metrics.

        They are pinned until complete_load or, if a `call` is to read them, end_call.
        """
        request = self._requests.get(name)
        load = None if end is None else Load(max(0, end - sum(tokens)), end, now)
        tick = self._state.tick_of(request)
        rows = [self._host.index[key] for key in keys]
        assert {row.state for row in rows} <= {READY}, "load of a row that is not ready"
        pinned = list(keys)
        self._host.generation.table.pin_many(pinned)
        self._reference(rows, name, call)
        self._use(rows, request, tick)
        sources = [row.source for row in rows]
        if not call:
            promoted = [row for row in rows if row.source is not CPU]
            self._loads.setdefault(name, []).append(_Load(rows, pinned, promoted))
        for source in dict.fromkeys(sources):
            counters = self._state.counters_of(source)
            counters.hits += sources.count(source)
            if tokens:
                saved = sum(count for count, its in zip(tokens, sources, strict=True) if its == source)
                counters.hit_tokens += saved
                if load is not None:
                    load.tokens[source] = saved
        for tier in self._tiers:
            tier.index.touch(keys, tick)
        waited = self._promotion.observe_wait(request, loaded=True)
        if load is not None:
            load.waited = waited
            self._savings.load_began(name, load)
        self._promotion.release(request)
        request.weigh_anew(RUNNING)
        missing = {place: row.missing for place, row in enumerate(rows) if row.missing}
        return LoadPlan([row.index for row in rows], sources, missing)

    def complete_load(
        self, name: str, now: float, took_s: float | None = None, *, at_most: bool = False, failed: bool = False
    ) -> None:
        """Workers are done with the rows of this request's load. They took so long, or less (`at_most`), if known.

        `failed`: they could not read them: they are misses, and so is every key to the request from now on. Otherwise
        it would hit the same row, and fail, again and again.
        """
        rows = self._end_load(name)
        if failed:
            self._load_failed(name, rows, now)
            return
        self._host.counters.bytes_read += len(rows) * self._state.row_bytes
        self._savings.load_ended(name, now)
        if took_s is not None:
            self.copied(len(rows), took_s, now, at_most=at_most)

    def reset(self, garbage: DeferredFree) -> None:
        """Workers report nothing of the loads of before."""
        garbage.add(self._loads)
        self._loads = {}

    def copied(self, rows: int, seconds: float, now: float, *, at_most: bool = False) -> None:
        """Workers have taken so long to copy these rows to the engine, and the engine to take notice. `at_most`: or
        less, as it took notice only when it had computed something else; that says nothing unless it is quicker than
        expected. No rows say nothing either."""
        if not rows:
            return
        if not at_most or seconds < self._state.price_of_copies(now).seconds(rows):
            self._state.copies.record(rows * self._state.row_bytes, seconds, now)

    def used(self, name: str, keys: Sequence[Key]) -> None:
        """The engine uses these chunks from its own memory, in prefix order, for a request: they are as recent here as
        what it loads. What the same request loads or stores is deeper, and must be evicted first, or the root of the
        prefix would go before its leaves. So the root has a tick of its own, which is later; and of a prefix that is
        reported in parts the deepest comes first."""
        request = self._requests.get(name)
        self._state.tick_of(request)
        tick = 0 if request.wishes.evict_first else self._state.tick
        self._state.tick += 1
        self._use([row for row in map(self._host.index.get, keys) if row is not None], request, tick)
        for tier in self._tiers:
            tier.index.touch(keys, tick)

    # --- stores ------------------------------------------------------------------------------------------------

    def prepare_store(self, name: str, keys: Sequence[Key], *, call: bool = False) -> StorePlan:
        """Rows for those of `keys` (in prefix order) that the host does not hold; for their prefix if it is full.

        They are written until complete_store or, if a `call` is to write them, end_call.
        """
        fresh = [key for key in keys if key not in self._host.index]
        request = self._requests.get(name)
        tick = self._state.tick_of(request)
        if len(fresh) < len(keys):
            self._use([row for key in keys if (row := self._host.index.get(key)) is not None], request, tick)
        room = self._state.make_room(len(fresh), request.wishes.tenant)
        self._store_seq += 1
        plan = StorePlan(fresh[:room], [], self._store_seq)
        rows = [self._host.insert(key, FILLING, tick, request.wishes.tenant) for key in plan.keys]
        self._reference(rows, name, call)
        for row in rows:
            row.host_only = request.wishes.host_only
            row.store_seq = self._store_seq
            plan.rows.append(row.index)
        self._host.counters.dropped_full += len(fresh) - room
        return plan

    def complete_store(self, keys: Iterable[Key], judge: Judge, dropped: Collection[Key] = ()) -> None:
        """Workers are done writing the rows of `keys` (in any order). What they copied of `dropped` is of no use."""
        rows = self._being_filled(keys)
        kept = [row for row in rows if row.key not in dropped] if dropped else rows
        bad = judge(kept)
        for row in rows:
            row.worker_refs = 0
            if row.key in dropped:
                self._host.invalidate(row)
        filled = self._filled(kept, *bad)
        for generation in dict.fromkeys(row.generation for row in rows if row.key in dropped or row.state is READY):
            self._flushed_before(generation)
        self._write_on(filled)

    def end_call(self, name: str, judge: Judge) -> None:
        """A call has ended, well or not: it neither reads nor writes any row from now on, and its request is finished.
        Does nothing else for a call without rows."""
        rows = self._calls.get(name, ())
        written = [row for row in rows if row.state is FILLING and not row.invalidated]
        bad = judge(written)
        self._calls.pop(name, None)
        self._host.unpin([row for row in rows if row.state is READY])
        for row in rows:
            row.call_refs -= 1
            if row.invalidated:
                self._host.reclaim(row)
            elif row.state is not FILLING:
                row.source = CPU
                self._host.counters.bytes_read += self._state.row_bytes
        self._write_on(self._filled(written, *bad))
        self._requests.finish(name)

    # --- inside ------------------------------------------------------------------------------------------------

    def _being_filled(self, keys: Iterable[Key]) -> list[Row]:
        """The rows of `keys` that workers fill now, in prefix order."""
        rows = (self._host.index.get(key) for key in keys)
        filling = (r for r in rows if r is not None and r.worker_refs and r.state is FILLING)
        return sorted(filling, key=lambda r: r.order)

    def _load_failed(self, name: str, rows: Sequence[Row], now: float) -> None:
        if (request := self._requests.by_name.get(name)) is not None:
            self._promotion.release(request)
            request.become(FAILED)
        for row in rows:
            self._host.counters.failed_loads += 1
            if not row.worker_refs:  # else another load reads it too, and has its own end
                self._host.counters.unreadable += 1
                self._host.invalidate(row)
        self._savings.load_failed(name, now)

    def _use(self, rows: Sequence[Row], request: Request, tick: int) -> None:
        self._host.touch(rows, tick)
        if not request.wishes.host_only:
            for row in rows:
                if row.host_only:
                    self._writeback.allow(row)

    def _reference(self, rows: Sequence[Row], name: str, call: bool) -> None:
        """A worker, or a call, is going to read or write these rows. What is written is in no order that it could be
        evicted in, and needs no pin."""
        if call:
            for row in rows:
                row.call_refs += 1
            self._calls.setdefault(name, []).extend(rows)
        else:
            for row in rows:
                row.worker_refs += 1

    def _end_load(self, name: str) -> list[Row]:
        """No worker reads the rows of the request's first load any more. One of before a reset is not found."""
        loads = self._loads.get(name, [])
        rows, keys, promoted = loads.pop(0) if loads else _Load([], [], [])
        if not loads:
            self._loads.pop(name, None)
        self._host.generation.table.unpin_many(keys)  # no row that a worker reads is removed, but by a reset
        for row in rows:
            row.worker_refs -= 1
        for row in promoted:
            row.source = CPU
        if rows:  # all of one generation
            self._flushed_before(rows[0].generation)
        return rows

    def _filled(self, rows: list[Row], failed: Collection[Key], incomplete: Collection[Key]) -> list[Row]:
        """Of rows that nobody writes any more, those that are hits from now on; the others are invalidated."""
        good, counters = rows, self._host.counters
        if failed or incomplete:
            good = [row for row in rows if row.key not in failed and row.key not in incomplete]
            for row in rows:
                if row.key in failed or row.key in incomplete:
                    counters.failed_stores += row.key in failed
                    counters.incomplete += row.key not in failed
                    self._host.invalidate(row)
        self._host.ready(good)
        if (announced := self._state.announced) is not None:
            for row in good:
                announced.seen(row.key)
        counters.stored += len(good)
        counters.bytes_written += len(good) * self._state.row_bytes
        return good

    def _write_on(self, rows: Sequence[Row]) -> None:
        """Rows are complete: queue them for the tiers below, and make room for the next."""
        self._writeback.write_through(rows, self._tiers)
        self._writeback.clean()
        self._state.turn_due = True

    def _flushed_before(self, generation: Generation) -> None:
        """A job of `generation` has ended: an engine flushes jobs of before a reset ahead of those that began after."""
        if self._host.has_unflushed and generation is self._host.generation:
            self._host.flushed()
