"""Engine: the cascade, its movers and a host region as one thing that a scheduler may call without ever waiting.

Every public method takes the lock for microseconds and returns; bytes are moved by workers and movers. What movers
report is applied on the supervisor's thread, so that cascades go on while the scheduler sleeps. That is safe between
a look-up and the load of one step, because rows that a step called hits are not evicted before its end.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_tiers.cascade.limits import Limits
from nixl_tiers.cascade.manager import Lookup, StorePlan, TierManager
from nixl_tiers.cascade.types import Direction, Job, TierSpec, TierState, Write
from nixl_tiers.chunk import Key, Namespace, Outcome, check_key
from nixl_tiers.clock import RunningClock
from nixl_tiers.config.schema import StorageConfig, TiersConfig, format_size, tier_to_dict
from nixl_tiers.lifetime import ForkedLock
from nixl_tiers.mover.protocol import (
    CheckExistence,
    Configure,
    Delete,
    DeleteCold,
    Down,
    ExistenceChecked,
    Finished,
    Heartbeat,
    Listed,
    ListedIndex,
    Load,
    Open,
    Opened,
    Refused,
    Slots,
    Store,
    ToCoordinator,
    ToMover,
    sendable,
)
from nixl_tiers.mover.supervisor import Supervisor
from nixl_tiers.tier_log import TierLog
from nixl_tiers.tiers.base import Move

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nixl_tiers.cascade.host import Row
    from nixl_tiers.memory.cold_index import SharedColdIndex
    from nixl_tiers.memory.region import HostRegion

log = logging.getLogger(__name__)

_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()
LISTING_S: Final = 10.0  # between two lines about a listing that takes so long
LOCATED_AT_ONCE: Final = 256  # keys, for which the lock is held
MOST_SLOTS: Final = 2  # in capacities: what others store on a shared medium beyond it must be told of


class TierRefusedError(RuntimeError):
    """A storage tier can never work as configured; one sentence that begins with the name of its field."""


class Coordinator:
    """Non-blocking face of the store. One for a scheduler; several threads may call it.

    A step is: any number of lookup and prepare_load calls, then end_step. `changed` is notified whenever a mover
    reported something, for those that may wait.
    """

    def __init__(
        self,
        config: TiersConfig,
        namespace: Namespace,
        region: HostRegion,
        *,
        hellos: Sequence[Configure] | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.namespace = namespace
        self.region = region
        self._config = config
        self._clock = clock or RunningClock()
        self._names = config.names
        geometry = region.geometry
        specs = [
            TierSpec(name, tier.write, tier.physical_slots, tier.eviction, tier.existence_checks)
            for name, tier in zip(config.names, config.storage, strict=True)
        ]
        limits = limits or replace(
            Limits(), wait_s=config.wait_s, pin_s=config.wait_s + 20, check_timeout_s=config.probe_s
        )
        self._core = TierManager(region.rows, geometry.row_bytes, specs, limits, config.cpu.eviction)
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._refusals: dict[int, str] = {}  # by tier
        self._answered: set[int] = set()
        self._used_bytes = [0] * len(specs)
        self._denials: list[dict[str, str]] = [{} for _ in specs]  # by tier and kind of request: a sentence
        self._listed = [0] * len(specs)
        self._say_listing_at = [0.0] * len(specs)
        self._logs = [
            TierLog(name, tier.place, format_size(tier.capacity))
            for name, tier in zip(config.names, config.storage, strict=True)
        ]
        self._last_word = [""] * len(specs)
        hellos = hellos or [
            Configure(
                tier_to_dict(tier),
                geometry.cells,
                geometry.cell_payload,
                geometry.sub_blocks,
                region.rows,
                named=_written_below(config.storage, place),
            )
            for place, tier in enumerate(config.storage)
        ]
        self._movers = Supervisor(hellos, self._names, region.fd, self, self._clock)
        self._pid = os.getpid()
        _coordinators.add(self)

    def start(self, patience_s: float = 3.0, ready_s: float = 0.0) -> None:
        """Start the movers and give the tiers `patience_s` to say what they think of their configuration, and
        `ready_s`, counted from the start too, to say what they hold (see wait_ready).

        Raises TierRefusedError if one can never work. One that is down, or slow to answer, starts as a miss and heals.
        """
        log.info(
            "nixl_tiers: cpu tier, %s: %d rows of %s; storage tiers: %s; namespace %s",
            format_size(self.region.nbytes),
            self.region.rows,
            format_size(self.region.geometry.row_bytes),
            ", ".join(self._names) or "none",
            self.namespace.digest.hex(),
        )
        if not self._config.storage:
            return
        began_s = time.monotonic()
        self._movers.start(self._open_message())
        with self.changed:
            self.changed.wait_for(lambda: len(self._answered) == len(self._names), max(patience_s, ready_s))
            refusals = [f"tiers[{tier + 1}].{reason}" for tier, reason in sorted(self._refusals.items())]
        if refusals:
            self.close(1.0)
            raise TierRefusedError(refusals[0])
        self.wait_ready(max(0.0, began_s + ready_s - time.monotonic()))

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until each tier has told all that it holds, or that it is down; False if that took longer."""
        with self.changed:
            return self.changed.wait_for(lambda: self.ready, timeout_s)

    @property
    def ready(self) -> bool:
        """Whether each tier has told all that it holds, or that it is down."""
        with self._lock:
            return all(
                storage.state is TierState.UP or (storage.state is TierState.DOWN and tier in self._answered)
                for tier, storage in enumerate(self._core.tiers)
            )

    def close(self, patience_s: float) -> None:
        """Let the movers write their journals and leave; with a patience of 0 without looking back."""
        self._movers.close(patience_s)

    @property
    def mover_pids(self) -> list[int | None]:
        return self._movers.pids

    # --- what a scheduler calls --------------------------------------------------------------------------------

    def lookup(self, key: Key, request: str, position: int | None = None, first: int = 0) -> Lookup:
        """Is `key` (the chunk that ends at token `position` of the request) a hit? PENDING ends within wait_s.

        `first`: the first sub-block of the chunk that a load is going to read. Raises TypeError, ValueError for what
        cannot be a key.
        """
        check_key(key)
        with self._lock:
            return self._core.lookup(key, request, position, self._clock(), first)

    def be_patient(self, request: str) -> None:
        """Have a request wait for keys that nobody knows yet while a tier tells what it holds. Call it first."""
        with self._lock:
            self._core.wait_for_listing(request)

    def restrict(self, request: str, tiers: Iterable[int]) -> None:
        """Have a new request load from these storage tiers only (numbered as configured, from 0), until it is
        finished. Host memory is always a hit."""
        with self._lock:
            self._core.set_allowed_tiers(request, tiers)

    def source(self, key: Key) -> str:
        """ "cpu", or the storage tier that the bytes of this hit were promoted from."""
        with self._lock:
            return self._core.source(key)

    def end_step(self) -> None:
        with self._lock:
            self._core.end_step()
            work = self._core.events.busy
        if work:
            self._movers.wake()

    def prepare_load(self, keys: Sequence[Key], request: str, *, call: bool = False) -> NDArray[np.int64]:
        """Host rows of keys that this step's look-ups called hits, pinned until complete_load; or, where `request` is
        the `call` of a thread, until end_call."""
        with self._lock:
            return np.array(self._core.prepare_load(keys, request, call=call), np.int64)

    def partial(self, keys: Sequence[Key]) -> dict[int, int]:
        """Which rows of a load that was prepared lack sub-blocks: place in `keys` -> how many at the beginning."""
        with self._lock:
            return self._core.partial(keys) if self.region.geometry.sub_blocks > 1 else {}

    def complete_load(self, keys: Collection[Key]) -> None:
        with self._lock:
            self._core.complete_load(keys)

    def fail_load(self, keys: Collection[Key], request: str) -> None:
        """In place of complete_load where a worker could not copy all of them: `request` gets no hit any more."""
        with self._lock:
            self._core.fail_load(keys, request)

    def prepare_store(self, keys: Sequence[Key], request: str, *, call: bool = False) -> StorePlan:
        """Rows to fill with the new ones of `keys`, in prefix order; fewer than asked when the host tier is full.

        They are the caller's until complete_store; or, where `request` is the `call` of a thread, until end_call.
        Raises TypeError, ValueError for what cannot be a key.
        """
        for key in keys:
            check_key(key)
        with self._lock:
            if self._core.host.free < len(keys):
                self._look_for_ended()
            return self._core.prepare_store(keys, request, call=call)

    def complete_store(self, keys: Collection[Key]) -> None:
        """Every worker is done with the store job of `keys`; the region's control words say which rows are good."""
        with self._lock:
            rows = self._core.rows_being_filled(keys)
            self._core.complete_store(rows, *self._failed(rows))
            work = self._core.events.busy
        if work:
            self._movers.wake()

    def end_call(self, call: str) -> None:
        """A thread's call has ended, well or not, and touches no row any more; those that it was to fill are hits if
        the region's control words say so. Nothing happens for a call that has no rows."""
        with self.changed:
            self._core.end_call(call, *self._failed(self._core.rows_being_filled_by_call(call)))
            work = self._core.events.busy
            self.changed.notify_all()
        if work:
            self._movers.wake()

    def keep(self, keys: Sequence[Key], request: str) -> None:
        """Spare the host's rows of `keys` from eviction until `request` ends, if no tier below could take them."""
        with self._lock:
            self._core.pin(keys, request)

    def touch(self, keys: Iterable[Key], request: str) -> None:
        """The engine used these chunks (in prefix order) from its own memory; call it before anything deeper."""
        with self._lock:
            self._core.touch(keys, request)

    def finish_request(self, request: str) -> None:
        with self._lock:
            self._core.finish_request(request)

    def take_evicted(self) -> list[Key]:
        """Keys that left the host tier since the last call and not through prepare_store's own answer."""
        with self._lock:
            return self._core.take_evicted()

    def reset(self) -> None:
        """The bytes may no longer match the weights: nothing stored so far is a hit any more."""
        keep = self._config.on_reset == "keep"
        with self._lock:
            self._core.reset(keep_tiers=keep)
            if not keep:
                self._answered.clear()
                # Epoch 0 is for weights as they were loaded; those of after a reset are nobody else's.
                self.namespace = replace(self.namespace, epoch=secrets.randbits(63) | 1)
                if self._config.storage:  # with the lock: of two resets, movers must hear of the last one last
                    self._movers.reopen(self._open_message())

    def flushed(self) -> None:
        """Workers have ended every job of before the last reset (vLLM 0.33 tells; before, the engine finds out)."""
        with self._lock:
            self._core.flushed()

    def where(self, key: Key) -> str | None:
        """The first tier that holds `key` now, without asking for it. Raises as `lookup`."""
        check_key(key)
        with self._lock:
            return self._core.where(key, self._clock())

    def locate(self, keys: Sequence[Key]) -> list[str | None]:
        """The same for many keys."""
        places: list[str | None] = []
        for start in range(0, len(keys), LOCATED_AT_ONCE):
            with self._lock:
                now = self._clock()
                places += [self._core.where(key, now) for key in keys[start : start + LOCATED_AT_ONCE]]
        return places

    def demote_all(self) -> None:
        """Queue all that a tier written on eviction does not hold yet: the engine is leaving."""
        with self._lock:
            self._core.demote_all()
        self._movers.wake()

    def backlog(self) -> int:
        """Rows whose cascade to some tier is still to end; 0 when all have ended, well or not."""
        with self._lock:
            return self._core.backlog()

    def pressure(self) -> int:
        """The same of the tiers that are written to now: of one that is still being listed, rows wait for that."""
        with self._lock:
            return self._core.pressure()

    def counters(self) -> dict[str, dict[str, float]]:
        """By tier: monotonic counters (rows, or bytes where the name says so) and gauges."""
        with self._lock:
            book = self._core.counters()
            used = dict(zip(self._names, self._used_bytes, strict=True))
            denials = {name: len(each) for name, each in zip(self._names, self._denials, strict=True)}
            listed = dict(zip(self._names, self._listed, strict=True))
            row_bytes = self.region.geometry.row_bytes
            capacity = {"cpu": self._config.cpu.capacity} | {
                name: tier.capacity for name, tier in zip(self._names, self._config.storage, strict=True)
            }
            return {
                name: {
                    **asdict(tier.counters),
                    "used_bytes": used.get(name, tier.used * row_bytes),
                    "capacity_bytes": capacity[name],
                    "rows": tier.rows,
                    "up": float(tier.up),
                    "breaker": float(tier.circuit),
                    "quarantined": float(tier.quarantined),
                    "denials": float(denials.get(name, 0)),
                    "listed_rows": float(listed.get(name, 0)),
                }
                for name, tier in book.items()
            }

    def problems(self) -> dict[str, str]:
        """By tier: why it is down or what its medium denies, in words; empty where nothing is known to be wrong."""
        with self._lock:
            known = [
                "; ".join([*filter(None, [word]), *denials.values()])
                for word, denials in zip(self._last_word, self._denials, strict=True)
            ]
            return {"cpu": "", **dict(zip(self._names, known, strict=True))}

    # --- what the supervisor calls -----------------------------------------------------------------------------

    def on_message(self, tier: int, message: ToCoordinator) -> None:
        with self.changed:
            now = self._clock()
            match message:
                case Finished():
                    outcomes = [Outcome(code) for code in message.outcomes]
                    self._core.events.finished(tier, message.job, outcomes, now, message.partial)
                case Heartbeat():
                    self._used_bytes[tier] = message.used_bytes
                    self._listed[tier] = message.listed
                    self._say_listing(tier, now)
                    self._say_denials(tier, message.denials)
                    return
                case Listed():
                    if message.epoch == self.namespace.epoch:
                        entries = [(entry.slot, entry.key, entry.tick) for entry in message.entries]
                        self._core.events.listed(tier, entries, message.last)
                        if message.last:
                            self._logs[tier].listed(len(self._core.tiers[tier].slots))
                case ExistenceChecked():
                    self._core.events.existence_checked(tier, message.probe, message.absent, now)
                case Opened():
                    self._check_slots(tier, message.slots)
                    if message.epoch == self.namespace.epoch:
                        self._answered.add(tier)
                        self._say_listing_at[tier] = now + LISTING_S
                        self._core.events.opened(tier, message.slots)
                        self._last_word[tier] = ""
                        self._logs[tier].up(now)
                case Slots():
                    self._check_slots(tier, message.slots)
                    if message.epoch == self.namespace.epoch:
                        self._core.events.resized(tier, message.slots)
                case Down():
                    self._answered.add(tier)
                    self._core.events.down(tier, now)
                    self.on_trouble(tier, message.reason)
                case Refused():
                    self._answered.add(tier)
                    self._core.events.down(tier, now)
                    self._refusals[tier] = message.reason
                    self.on_trouble(tier, message.reason)
            self.changed.notify_all()

    def on_table(self, tier: int, message: ListedIndex, table: SharedColdIndex) -> None:
        with self._lock:
            known = self._core.events.known_keys(tier)
        for key in known:  # without the lock: where a tier was opened again these can be many
            table.remove(key)
        with self.changed:
            if message.epoch == self.namespace.epoch:
                self._core.events.index_listed(tier, table, message.newest)
                self.changed.notify_all()
                return
        table.close()

    def on_trouble(self, tier: int, reason: str) -> None:
        with self._lock:
            self._last_word[tier] = reason
            self._logs[tier].down(reason, self._clock())

    def on_line(self, tier: int, level: int, text: str) -> None:
        with self._lock:
            self._logs[tier].line(level, text)

    def on_killed(self, tier: int) -> None:
        with self.changed:
            self._core.events.killed(tier, self._clock())
            self.changed.notify_all()

    def on_lost(self, tier: int) -> None:
        with self.changed:
            self._denials[tier] = {}  # the next mover finds out anew
            self._core.events.lost(tier, self._clock())
            self.changed.notify_all()

    def on_tick(self, heard_s: float, room: Sequence[int]) -> tuple[list[tuple[int, ToMover]], dict[int, str], bool]:
        with self._lock:
            now = self._clock()
            self._core.expire(heard_s)
            for storage, packets in zip(self._core.tiers, room, strict=True):
                storage.send_credits = packets
            jobs = self._core.events.plan(now)
            moves = [(job, message) for job in jobs if (message := self._sendable(job, now)) is not None]
            messages: list[tuple[int, ToMover]] = []
            messages += [(job.tier, message) for job, message in moves if job.direction is Direction.LOAD]
            most = self._core.limits.deletes_per_batch
            for tier, storage in enumerate(self._core.tiers):
                messages += [(tier, Delete(batch)) for batch in storage.delete_batches(most)]
                messages += [(tier, DeleteCold(nameless)) for nameless in storage.cold_delete_batches(most)]
            messages += [(job.tier, message) for job, message in moves if job.direction is Direction.STORE]
            for probe in self._core.events.plan_checks(now):
                if sendable(question := CheckExistence(probe.id, probe.keys, probe.chain)):
                    messages.append((probe.tier, question))
                else:
                    self._core.events.existence_checked(probe.tier, probe.id, (), now)
            for tier_log, storage in zip(self._logs, self._core.tiers, strict=True):
                tier_log.watch(storage.breakers, now)
            closing = [rows for storage in self._core.tiers for rows in storage.take_retired()]
            result = messages, self._core.health.overdue(heard_s), self._core.events.busy
        for rows in closing:
            rows.close()
        return result

    def leave_to_parent(self) -> None:
        """In a forked child: let go of what is the parent's, and answer every call with a RuntimeError."""
        self._lock = ForkedLock(self._pid)  # type: ignore[assignment]
        self.changed = ForkedLock(self._pid)  # type: ignore[assignment]
        self._movers.leave_to_parent()

    # --- inside ------------------------------------------------------------------------------------------------

    def _sendable(self, job: Job, now: float) -> Store | Load | None:
        """The message for a job; None for one that no mover would take, which must cost no more than itself."""
        message = _message(job)
        if sendable(message):
            return message
        self._core.events.finished(job.tier, job.id, [Outcome.FAILED] * len(job.moves), now)
        return None

    def _look_for_ended(self) -> None:
        """Take back rows of stores of before a reset that workers have ended by their own words. An engine that says
        nothing of such jobs, and finds all rows in their hands, would never have a job again that could end for them.
        """
        rows = self._core.unflushed_stores()
        if rows:
            ended = self.region.ended([row.index for row in rows], [row.store_seq for row in rows])
            self._core.release_unflushed([row for row, done in zip(rows, ended.tolist(), strict=True) if done])

    def _failed(self, rows: Sequence[Row]) -> tuple[set[Key], set[Key]]:
        """Which of these rows that were to be filled were not, and which lack sub-blocks that a load may want; of the
        others, notes which sub-blocks they lack."""
        failed, incomplete = set[Key](), set[Key]()
        if rows and self.region.geometry.sub_blocks > 1:
            for row, missing in zip(rows, self.region.missing([row.index for row in rows]).tolist(), strict=True):
                row.missing = missing
        for store_seq in {row.store_seq for row in rows}:
            of_store = [row for row in rows if row.store_seq == store_seq]
            places = np.array([row.index for row in of_store])
            if (written := self.region.written(places, store_seq)).all():
                continue
            words = zip(of_store, written.tolist(), self.region.copied(places, store_seq).tolist(), strict=True)
            for row, good, copied in words:
                if not good:
                    (incomplete if copied else failed).add(row.key)
        return failed, incomplete

    def _check_slots(self, tier: int, slots: int) -> None:
        """Raises ValueError for more than any medium of this capacity has: each costs the book a byte."""
        if slots * self.region.geometry.row_bytes > MOST_SLOTS * self._config.storage[tier].capacity:
            raise ValueError(f"the {self._names[tier]} tier cannot have {slots} slots")

    def _open_message(self) -> Open:
        return Open(self.namespace.digest, self.namespace.epoch)

    def _say_denials(self, tier: int, denials: dict[str, str]) -> None:
        """One line for each kind of request, when the medium begins to deny it and when it has ended."""
        before, self._denials[tier] = self._denials[tier], denials
        for kind in denials.keys() - before.keys():
            log.warning("nixl_tiers: the %s tier: %s", self._names[tier], denials[kind])
        for kind in before.keys() - denials.keys():
            log.warning("nixl_tiers: the %s tier: %s is no longer denied", self._names[tier], kind)

    def _say_listing(self, tier: int, now: float) -> None:
        """One line now and then while a tier takes long to tell what it holds."""
        if self._core.tiers[tier].state is TierState.LISTING and now >= self._say_listing_at[tier]:
            self._say_listing_at[tier] = now + LISTING_S
            what = f"{self._listed[tier]:,} rows so far; what it has not told of yet is a miss"
            log.info("nixl_tiers: the %s tier is still being listed: %s", self._names[tier], what)


def _written_below(tiers: Sequence[StorageConfig], place: int) -> bool:
    """Whether rows that leave the tier at `place` may have to be written to the next one that is ever written to."""
    return next((tier.write is Write.ON_EVICT for tier in tiers[place + 1 :] if tier.write is not Write.OFF), False)


def _message(job: Job) -> Store | Load:
    if job.direction is Direction.LOAD:
        return Load(job.id, [Move(move.row.index, move.entry.slot, move.key) for move in job.moves])
    return Store(job.id, [Move(m.row.index, m.entry.slot, m.key, m.tick, m.seal, m.row.missing) for m in job.moves])


def _leave_to_parent() -> None:
    for coordinator in list(_coordinators):
        coordinator.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
