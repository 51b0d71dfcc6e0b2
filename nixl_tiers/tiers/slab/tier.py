"""The file tier: slots in slab files, moved by NIXL straight between the region and the disk.

A batch is cut into units of some megabytes. Sealing and checking one unit overlaps with the I/O of the others.
Reads may land in the region itself: NIXL's file back ends drain what is in flight before they report an error,
and a row that does not verify was promised to nobody yet.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from nixl_tiers.chunk import Geometry, Outcome
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import Entry, FinishedBatch, Move, StorageTier, TierDown, TierRefused, seal_row
from nixl_tiers.tiers.disk import MountGuard, describe, open_agent, open_error, prepare_path
from nixl_tiers.tiers.expiry import sweep_s
from nixl_tiers.tiers.log_once import LogOnce
from nixl_tiers.tiers.moves import Batch, Batches
from nixl_tiers.tiers.nixl_agent import AgentError, Registration, Transfer, TransferState
from nixl_tiers.tiers.slab.quota import SlabQuota
from nixl_tiers.tiers.slab.rebalance import REBALANCE_S, Rebalancer
from nixl_tiers.tiers.slab.shard import Shard, slots_within
from nixl_tiers.tiers.slab.slabs import NoSpace

logger = logging.getLogger(__name__)

_UNIT_BYTES: Final = 8 << 20
_UNIT_ROWS: Final = 64
_UNITS_RUNNING: Final = 4  # in each direction
_FULL_S: Final = 0.5  # how long a lack of space is believed before it is tried again


@dataclass
class _Unit:
    """Moves of one batch that share one transfer."""

    batch: Batch
    writes: bool
    places: list[int]  # where each move stands in its batch
    moves: list[Move]


@dataclass
class _Running:
    unit: _Unit
    transfer: Transfer


class SlabTier(StorageTier):
    """Slots in slab files below `<path>/<namespace>/<shard>`, journalled in SQLite, within the path's capacity."""

    def __init__(
        self, config: FileConfig, geometry: Geometry, region: HostRegion, clock: Callable[[], float] = time.time
    ) -> None:
        """`region` stays the caller's; `clock` tells the time of day, in Unix seconds. Raises TierRefused if the wanted
        NIXL backend cannot be had here."""
        self._config = config
        self._clock = clock
        self._geometry = geometry
        self._region = region
        self._quota = SlabQuota(config.path, config.capacity)
        self._memory: Registration | None
        self._agent, self._memory = open_agent(config, region)
        self._mount = MountGuard()
        self._open: Shard | None = None
        self._rebalancer: Rebalancer | None = None
        self._batches = Batches()
        self._loads: deque[_Unit] = deque()
        self._stores: deque[_Unit] = deque()
        self._running: list[_Running] = []
        self._allocator = ThreadPoolExecutor(1, thread_name_prefix="allocator")
        self._growth: Future[None] | None = None
        self._log_once = LogOnce(logger)
        self._full_until_s = 0.0
        self._full_outcome = Outcome.NO_SPACE
        self._unit_rows = max(1, min(_UNIT_ROWS, _UNIT_BYTES // geometry.row_bytes))
        _raise_file_limit()

    # --- the contract ---------------------------------------------------------------------------------------------

    def open(self, namespace: bytes, epoch: int) -> int:
        self._close_shard()
        path, row_bytes = self._config.path, self._geometry.row_bytes
        slots = slots_within(self._config.capacity, row_bytes)
        if slots < 1:
            raise TierRefused(
                f"capacity: {self._config.capacity} bytes hold no row of {row_bytes} bytes beside the journal in {path}"
            )
        try:
            prepare_path(self._config, self._mount, self._log_once)
            self._quota.forget_uid()
            with self._quota.locked():
                shard = self._quota.acquire_shard(namespace)
                try:
                    sealer = Sealer(self._geometry, namespace, epoch)
                    self._open = Shard(
                        shard,
                        slots,
                        sealer,
                        self._agent,
                        self._quota,
                        max_age_s=self._config.max_age,
                        clock=self._clock,
                    )
                    self._quota.make_room(0)  # the capacity may be smaller than last time
                except BaseException:
                    if self._open is None:
                        self._quota.discard(shard)
                    raise
        except OSError as error:
            raise open_error(error) from error
        self._mount.remember(path)
        self._rebalancer = Rebalancer(self._open, self._quota, self._allocator)
        self._full_until_s = 0.0
        return slots

    @property
    def slots(self) -> int | None:
        return self._rebalancer.slots if self._rebalancer is not None else None

    def list_rows(self) -> Iterator[list[Entry]]:
        return self._served.list_rows()

    def maintain(self) -> Iterator[list[Entry]]:
        """Erase what is too old, then take or give room among the processes that share the path."""
        served, rebalancer = self._served, self._rebalancer
        yield from served.expire(self._slots_in_use)
        if rebalancer is not None:
            yield from rebalancer.rebalance(self._slots_in_use, lambda: self._growth is not None)

    @property
    def maintain_s(self) -> float | None:
        age_s = self._config.max_age
        return REBALANCE_S if age_s is None else min(REBALANCE_S, sweep_s(age_s))

    def store(self, moves: Sequence[Move]) -> int:
        journal = self._served.journal
        for move in moves:
            journal.start_overwrite(move.slot)  # a crash in the middle must not leave the old key over new bytes
        return self._accept(moves, writes=True)

    def load(self, moves: Sequence[Move]) -> int:
        return self._accept(moves, writes=False)

    def poll(self) -> list[FinishedBatch]:
        for running in list(self._running):
            state = running.transfer.state()
            if state is not TransferState.PENDING:
                running.transfer.release()
                self._running.remove(running)
                self._start_more()  # before this one's bytes are checked: the disk need not wait for that
                self._finish(running.unit, good=state is TransferState.DONE)
        if self._growth is not None and self._growth.done():
            self._grown(self._growth)
        problem = self._open.health.poll() if self._open is not None else ""
        if problem:
            self._give_up()
        self._start_more()
        if problem and not self._running and self._growth is None and not self._batches.waiting:
            raise TierDown(problem)
        return self._batches.take()

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        for slot, key in entries:
            self._served.journal.remove(slot, key)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._loads or self._stores or self._batches.waiting) or (
            self._open is not None and bool(self._open.health.problem)
        )

    @property
    def used_bytes(self) -> int:
        return self._quota.used_bytes

    def close(self) -> None:
        self._close_shard()
        self._allocator.shutdown(wait=False, cancel_futures=True)
        if self._memory is not None:
            self._agent.deregister(self._memory)
            self._memory = None

    # --- opening and closing a namespace ----------------------------------------------------------------------------

    @property
    def _served(self) -> Shard:
        if self._open is None:
            raise RuntimeError("the tier is not open")
        return self._open

    def _close_shard(self) -> None:
        shard, self._open, self._rebalancer = self._open, None, None
        if shard is not None:
            self._allocator.submit(lambda: None).result()  # what it is at is about this shard
            shard.close()

    # --- moving rows ------------------------------------------------------------------------------------------------

    def _accept(self, moves: Sequence[Move], *, writes: bool) -> int:
        batch = self._batches.begin(len(moves))
        waiting = self._stores if writes else self._loads
        for start in range(0, len(moves), self._unit_rows):
            end = min(start + self._unit_rows, len(moves))
            waiting.append(_Unit(batch, writes, list(range(start, end)), list(moves[start:end])))
        self._start_more()
        return batch.batch_id

    def _give_up(self) -> None:
        """What stands under the tier has gone: end what has not been started. What runs ends by itself."""
        for waiting in (self._loads, self._stores):
            while waiting and (waiting is self._loads or self._growth is None):
                unit = waiting.popleft()
                self._settle(unit, [True] * len(unit.moves), Outcome.FAILED)

    def _start_more(self) -> None:
        """Neither direction waits for the other: requests wait for loads, and stores that starved would be overdue.
        Stores that need a new extent wait for it, and for each other. Nothing begins on what is no longer ours."""
        if self._open is not None and self._open.health.problem:
            return
        while self._loads and self._has_turn(writes=False):
            unit = self._loads.popleft()
            self._settle(unit, [not self._is_there(move.slot) for move in unit.moves], Outcome.MISSING)
            self._start(unit)
        while self._stores and self._growth is None and self._has_turn(writes=True):
            slots = [move.slot for move in self._stores[0].moves]
            if not self._served.journal.may_overwrite(slots) or not self._served.erasing.isdisjoint(slots):
                return
            unit = self._stores.popleft()
            beyond = [not 0 <= move.slot < self._served.slabs.layout.slots for move in unit.moves]
            self._settle(unit, beyond, Outcome.FAILED)
            homeless = [not self._served.slabs.is_allocated(move.slot) for move in unit.moves]
            if any(homeless):
                if time.monotonic() >= self._full_until_s:
                    self._stores.appendleft(unit)
                    slot = unit.moves[homeless.index(True)].slot
                    self._growth = self._allocator.submit(self._served.slabs.grow, slot)
                    return
                self._settle(unit, homeless, self._full_outcome)
            self._start(unit)

    def _is_there(self, slot: int) -> bool:
        served = self._served
        if not served.slabs.is_allocated(slot) or slot in served.erasing:
            return False
        return not served.listed or bool(served.journal.sealed_at[slot])

    def _slots_in_use(self) -> set[int]:
        units = [*self._loads, *self._stores, *(running.unit for running in self._running)]
        return {move.slot for unit in units for move in unit.moves}

    def _has_turn(self, *, writes: bool) -> bool:
        return sum(running.unit.writes == writes for running in self._running) < _UNITS_RUNNING

    def _start(self, unit: _Unit) -> None:
        if not unit.moves:
            return
        served, region, row_bytes = self._served, self._region, self._geometry.row_bytes
        spans = []
        try:
            for move in unit.moves:
                device, offset = served.slabs.locate(move.slot)
                spans.append((region.address + move.row * row_bytes, row_bytes, offset, device))
                if move.seal and unit.writes:
                    seal_row(served.sealer, region, move, self._clock())
        except (AgentError, OSError) as error:
            self._log_once.report("agent", describe(error) if isinstance(error, OSError) else str(error))
            served.health.check_soon()
            self._settle(unit, [True] * len(unit.moves), Outcome.FAILED)
            return
        transfer = self._agent.write(spans) if unit.writes else self._agent.read(spans)
        self._running.append(_Running(unit, transfer))

    def _finish(self, unit: _Unit, *, good: bool) -> None:
        if not good and len(unit.moves) > 1:
            # One bad row fails a whole transfer: each gets a transfer of its own to say for itself.
            waiting = self._stores if unit.writes else self._loads
            for place, move in zip(reversed(unit.places), reversed(unit.moves), strict=True):
                waiting.appendleft(_Unit(unit.batch, unit.writes, [place], [move]))
            return
        for place, move in zip(unit.places, unit.moves, strict=True):
            self._batches.end(unit.batch, place, self._outcome(move, unit.writes, good))

    def _outcome(self, move: Move, writes: bool, good: bool) -> Outcome:
        served = self._served
        if writes:
            sealed_at = served.sealer.sealed_at(self._region.rows_view[move.row])
            if good:
                served.journal.put(move.slot, move.key, move.tick, sealed_at)
                return Outcome.OK
            served.journal.mark_garbage(move.slot, sealed_at)
            if served.slabs.disk_is_full():
                return Outcome.NO_SPACE
            served.store_failed()
            return Outcome.FAILED
        if not good:
            served.load_failed()
            return Outcome.FAILED
        verdict = served.sealer.verify(self._region.rows_view[move.row], move.key)
        if verdict is not Verdict.OK:
            served.log_corrupt(move.slot, verdict.name)
            served.journal.remove(move.slot, move.key)
            return Outcome.CORRUPT
        if served.has_expired(move.slot, served.sealer.sealed_at(self._region.rows_view[move.row])):
            served.journal.remove(move.slot, move.key)  # its bytes stay, for the next sweep
            return Outcome.MISSING
        if move.tick:
            served.journal.touch(move.slot, move.key, move.tick)
        return Outcome.OK

    def _settle(self, unit: _Unit, which: list[bool], outcome: Outcome) -> None:
        """End these moves of the unit now; the others stay in it."""
        if not any(which):
            return
        for place, hit in zip(unit.places, which, strict=True):
            if hit:
                self._batches.end(unit.batch, place, outcome)
        unit.places = [place for place, hit in zip(unit.places, which, strict=True) if not hit]
        unit.moves = [move for move, hit in zip(unit.moves, which, strict=True) if not hit]

    def _grown(self, growth: Future[None]) -> None:
        self._growth = None
        try:
            growth.result()
        except (NoSpace, OSError) as error:
            if not self._full_until_s:
                logger.warning("no room for more rows: %s", describe(error) if isinstance(error, OSError) else error)
            self._served.health.check_soon()
            self._full_until_s = time.monotonic() + _FULL_S
            if self._rebalancer is not None:
                self._rebalancer.growth_failed()
            self._full_outcome = Outcome.NO_SPACE if isinstance(error, NoSpace) else Outcome.FAILED
        else:
            self._full_until_s = 0.0


def _raise_file_limit() -> None:
    """A slab is an open file, and the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        logger.info("cannot raise the limit of open files to %d: %s", hard, error)
