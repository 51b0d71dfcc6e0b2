"""The file tier: slots in slab files, moved by NIXL straight between the region and the disk.

A batch is cut into units of some megabytes. Sealing and checking one unit overlaps with the I/O of the others.
Reads may land in the region itself: NIXL's file back ends drain what is in flight before they report an error,
and a row that does not verify was promised to nobody yet.
"""

from __future__ import annotations

import errno
import logging
import resource
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

from nixl_tiers.chunk import Geometry
from nixl_tiers.config import FileTier
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.mover.agent import Agent, AgentError, Registration, Transfer, TransferState
from nixl_tiers.mover.messages import MAX_ENTRIES, Entry, Move, Outcome
from nixl_tiers.mover.tiers.base import Done, StorageTier, TierDown, TierRefused
from nixl_tiers.mover.tiers.batches import Batch, Batches
from nixl_tiers.mover.tiers.ledger import Claim, Ledger
from nixl_tiers.mover.tiers.manifest import Manifest, journal_bytes
from nixl_tiers.mover.tiers.rebuild import Scan
from nixl_tiers.mover.tiers.slabs import NoSpace, Plan, Slabs, guess_plan

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
_UNIT_BYTES: Final = 8 << 20
_UNIT_ROWS: Final = 64
_UNITS_RUNNING: Final = 4  # in each direction
_FULL_S: Final = 0.5  # how long a lack of space is believed before it is tried again
_MARGIN_BYTES: Final = 256 << 10  # directories, locks, extent trees: what is on the disk beside rows and journal
_NEVER: Final = (errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG)


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


@dataclass
class _Namespace:
    """All that belongs to the namespace being served."""

    claim: Claim
    manifest: Manifest
    slabs: Slabs
    sealer: Sealer
    scan: Scan | None = None


class FileStorage(StorageTier):
    """Slots in slab files below `<path>/<namespace>/<replica>`, journalled in SQLite, within the path's capacity."""

    def __init__(self, config: FileTier, geometry: Geometry, region: HostRegion) -> None:
        """`region` stays the caller's. Raises TierRefused if the wanted NIXL backend cannot be had here."""
        self._config = config
        self._geometry = geometry
        self._region = region
        self._ledger = Ledger(config.path, config.capacity)
        try:
            self._agent = Agent.gds_mt() if config.backend == "gds_mt" else Agent.posix()
            self._memory: Registration | None = self._agent.register_region(region)
        except AgentError as error:
            raise TierRefused(f"backend: {error}") from error
        self._open: _Namespace | None = None
        self._batches = Batches()
        self._loads: deque[_Unit] = deque()
        self._stores: deque[_Unit] = deque()
        self._running: list[_Running] = []
        self._allocator = ThreadPoolExecutor(1, thread_name_prefix="allocator")
        self._growth: Future[None] | None = None
        self._full_until_s = 0.0
        self._full_outcome = Outcome.NO_SPACE
        self._unit_rows = max(1, min(_UNIT_ROWS, _UNIT_BYTES // geometry.row_bytes))
        _raise_file_limit()

    # --- the contract ---------------------------------------------------------------------------------------------

    def open(self, namespace: bytes, epoch: int) -> int:
        self._close_namespace()
        path, row_bytes = self._config.path, self._geometry.row_bytes
        slots = _slots(self._config.capacity, row_bytes)
        if slots < 1:
            raise TierRefused(
                f"capacity: {self._config.capacity} bytes hold no row of {row_bytes} bytes beside the journal in {path}"
            )
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            with self._ledger.locked():
                claim = self._ledger.claim(namespace)
                try:
                    self._open = self._serve(claim, slots, Sealer(self._geometry, namespace, epoch))
                    self._ledger.make_room(0)  # the capacity may be smaller than last time
                except BaseException:
                    if self._open is None:
                        self._ledger.abandon(claim)
                    raise
        except OSError as error:
            reason = f"{error.filename or path}: {error.strerror or error}"
            if error.errno in _NEVER:
                raise TierRefused(f"path: {reason}") from error
            raise TierDown(reason) from error
        self._full_until_s = 0.0
        return slots

    def adopt(self) -> Iterator[list[Entry]]:
        served = self._served
        last = 0
        for batch in served.manifest.adopt():
            last = max([last, *(entry.tick for entry in batch)])
            yield [entry for entry in batch if served.slabs.has_room(entry.slot)]
        if not served.manifest.whole:
            yield from self._rebuilt(served, last)
        else:
            served.manifest.complete()

    def store(self, moves: Sequence[Move]) -> int:
        manifest = self._served.manifest
        for move in moves:
            manifest.forget(move.slot)  # a crash in the middle must not leave the old key over new bytes
        return self._accept(moves, writes=True)

    def load(self, moves: Sequence[Move]) -> int:
        return self._accept(moves, writes=False)

    def poll(self) -> list[Done]:
        for running in list(self._running):
            state = running.transfer.state()
            if state is not TransferState.PENDING:
                running.transfer.release()
                self._running.remove(running)
                self._start_more()  # before this one's bytes are checked: the disk need not wait for that
                self._finish(running.unit, good=state is TransferState.DONE)
        if self._growth is not None and self._growth.done():
            self._grown(self._growth)
        self._start_more()
        return self._batches.take()

    def drop(self, entries: Sequence[tuple[int, bytes]]) -> None:
        for slot, key in entries:
            self._served.manifest.forget(slot, key)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._loads or self._stores or self._batches.waiting)

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    def close(self) -> None:
        self._close_namespace()
        self._allocator.shutdown(wait=False, cancel_futures=True)
        if self._memory is not None:
            self._agent.deregister(self._memory)
            self._memory = None

    # --- opening and closing a namespace ----------------------------------------------------------------------------

    @property
    def _served(self) -> _Namespace:
        if self._open is None:
            raise RuntimeError("the tier is not open")
        return self._open

    def _serve(self, claim: Claim, slots: int, sealer: Sealer) -> _Namespace:
        plan = _plan(claim, self._geometry, slots)
        if not claim.about:
            plan = guess_plan(claim.directory, sealer, slots)
            if plan is not None:
                logger.warning("%s had lost its description: going by its rows' seals", claim.directory)
                # Its slot numbers may be those of another plan.
                for file in claim.directory.glob("manifest.*"):
                    file.unlink()
            elif not self._ledger.make_room(journal_bytes(slots)):
                raise TierDown(f"{self._config.path} is full: what live movers hold leaves no room for one more")
        if plan is None:
            # Nothing in it can be ours: rows of another shape, or a directory whose description is lost.
            for file in claim.directory.glob("[sm]*.*"):
                file.unlink()
            plan = Plan.of(self._geometry.row_bytes, slots)
        about = _about(self._geometry, plan)
        if claim.about != about:  # a full medium must not keep the tier from serving what it holds
            claim.describe(about)
        slabs = Slabs(claim.directory, plan, self._agent, self._ledger)
        return _Namespace(claim, Manifest(claim.directory, slots), slabs, sealer)

    def _rebuilt(self, served: _Namespace, last: int) -> Iterator[list[Entry]]:
        """The rows that the journal did not tell of, by their seals; used later than `last`, as they lack there."""
        scan = served.scan = Scan(served.slabs.stretches(served.manifest.unknown()), served.sealer)
        while not scan.done:
            yield []
        for start in range(0, len(scan.found), MAX_ENTRIES):
            batch = []
            for place, row in enumerate(scan.found[start : start + MAX_ENTRIES]):
                if not served.manifest.was_stored(row.slot):
                    entry = Entry(row.slot, row.key, last + 1 + start + place)
                    served.manifest.put(entry.slot, entry.key, entry.tick)
                    batch.append(entry)
            yield batch
        if scan.found:
            logger.info("%s: found %d rows by their seals", served.claim.directory, len(scan.found))
        if not scan.failed:
            served.manifest.complete()

    def _close_namespace(self) -> None:
        served, self._open = self._open, None
        if served is not None:
            if served.scan is not None:
                served.scan.stop()
            served.manifest.close()
            served.slabs.close()
            served.claim.release()

    # --- moving rows ------------------------------------------------------------------------------------------------

    def _accept(self, moves: Sequence[Move], *, writes: bool) -> int:
        batch = self._batches.begin(len(moves))
        waiting = self._stores if writes else self._loads
        for start in range(0, len(moves), self._unit_rows):
            end = min(start + self._unit_rows, len(moves))
            waiting.append(_Unit(batch, writes, list(range(start, end)), list(moves[start:end])))
        self._start_more()
        return batch.ticket

    def _start_more(self) -> None:
        """Neither direction waits for the other: requests wait for loads, and stores that starved would be overdue.
        Stores that need a new extent wait for it, and for each other."""
        while self._loads and self._has_turn(writes=False):
            unit = self._loads.popleft()
            self._settle(unit, [not self._served.slabs.has_room(move.slot) for move in unit.moves], Outcome.MISSING)
            self._start(unit)
        while self._stores and self._growth is None and self._has_turn(writes=True):
            if not self._served.manifest.may_overwrite(move.slot for move in self._stores[0].moves):
                return
            unit = self._stores.popleft()
            beyond = [not 0 <= move.slot < self._served.slabs.plan.slots for move in unit.moves]
            self._settle(unit, beyond, Outcome.FAILED)
            homeless = [not self._served.slabs.has_room(move.slot) for move in unit.moves]
            if any(homeless):
                if time.monotonic() >= self._full_until_s:
                    self._stores.appendleft(unit)
                    slot = unit.moves[homeless.index(True)].slot
                    self._growth = self._allocator.submit(self._served.slabs.grow, slot)
                    return
                self._settle(unit, homeless, self._full_outcome)
            self._start(unit)

    def _has_turn(self, *, writes: bool) -> bool:
        return sum(running.unit.writes == writes for running in self._running) < _UNITS_RUNNING

    def _start(self, unit: _Unit) -> None:
        if not unit.moves:
            return
        served, region, row_bytes = self._served, self._region, self._geometry.row_bytes
        spans = []
        try:
            for move in unit.moves:
                device, offset = served.slabs.place(move.slot)
                spans.append((region.address + move.row * row_bytes, row_bytes, offset, device))
                if move.seal and unit.writes:
                    served.sealer.seal(region.rows_view[move.row], move.key, sealed_at=int(time.time()))
        except AgentError as error:
            logger.warning("%s", error)
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
            if good:
                served.manifest.put(move.slot, move.key, move.tick)
                return Outcome.OK
            return Outcome.NO_SPACE if served.slabs.medium_is_full() else Outcome.FAILED
        if not good:
            return Outcome.FAILED
        verdict = served.sealer.verify(self._region.rows_view[move.row], move.key)
        if verdict is not Verdict.OK:
            logger.warning("slot %d is not the row that it should be (%s)", move.slot, verdict.name)
            served.manifest.forget(move.slot, move.key)
            return Outcome.CORRUPT
        if move.tick:
            served.manifest.touch(move.slot, move.key, move.tick)
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
                logger.warning("no room for more rows: %s", error)
            self._full_until_s = time.monotonic() + _FULL_S
            self._full_outcome = Outcome.NO_SPACE if isinstance(error, NoSpace) else Outcome.FAILED
        else:
            self._full_until_s = 0.0


def _slots(capacity_bytes: int, row_bytes: int) -> int:
    """How many rows fit beside their journal and what else a namespace takes."""
    return (capacity_bytes - journal_bytes(0) - _MARGIN_BYTES) // (row_bytes + journal_bytes(1) - journal_bytes(0))


def _about(geometry: Geometry, plan: Plan) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        **asdict(geometry),
        "row_bytes": plan.row_bytes,
        "slots": plan.slots,
        "slots_per_slab": plan.slots_per_slab,
        "journal_bytes": journal_bytes(plan.slots),
    }


def _plan(claim: Claim, geometry: Geometry, slots: int) -> Plan | None:
    """The plan by which the namespace was laid out, for `slots` slots now; None if it cannot be used."""
    about = claim.about
    try:
        plan = Plan(int(about["row_bytes"]), slots, int(about["slots_per_slab"]))
    except (KeyError, TypeError, ValueError):
        return None
    same = _about(geometry, plan) | {"slots": about.get("slots"), "journal_bytes": about.get("journal_bytes")} == about
    return plan if same and plan.row_bytes == geometry.row_bytes and plan.slots_per_slab > 0 else None


def _raise_file_limit() -> None:
    """A slab is an open file, and the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        logger.info("cannot raise the limit of open files to %d: %s", hard, error)
