"""MoverLink: the coordinator's line to its movers. Applies what they report, and plans what they are sent.

All `on_*` methods are called on the supervisor's thread (`mover.supervisor.Handler`). They take the coordinator's lock
for microseconds. Results are applied at once, not at the scheduler's next call, so that cascades go on while the
scheduler sleeps. That is safe between a look-up and the load of one step, because rows that a step called hits are not
evicted before the step ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from nixl_tiers.base.chunk import Namespace, Outcome
from nixl_tiers.base.manifest import Description
from nixl_tiers.config.schema import StorageConfig, TiersConfig, format_size, tier_to_dict
from nixl_tiers.core.listing import Steps
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Direction, Job, TierState
from nixl_tiers.memory.columns import ListedColumns
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import (
    MAX_TOUCHED,
    CheckExistence,
    Configure,
    Delete,
    Down,
    ExistenceChecked,
    Finished,
    Heartbeat,
    Listed,
    Load,
    Open,
    Opened,
    Refused,
    Slots,
    Store,
    ToCoordinator,
    ToMover,
    Touch,
    sendable,
)
from nixl_tiers.mover.supervisor import IDLE_S, TICK_S, Supervisor, Turn
from nixl_tiers.runtime.tier_log import LogQueue, TierLog, Write
from nixl_tiers.tiers.base import MAX_SLOTS, Move

TOUCH_S: Final = 1.0  # between two packets of recent uses to one mover
USES_A_PART: Final = 256
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
DROPPED_PER_TURN: Final = 4096  # entries of structures that a reset has replaced
PAUSE_S: Final = 0.0001  # between two steps of a listing
MAX_CAPACITIES: Final = 2  # of slots: a shared medium may hold more than this engine's own capacity


class TierStatus:
    """What the mover of one storage tier last reported. Guarded by the coordinator's lock."""

    def __init__(self, name: str, config: StorageConfig, write: Write) -> None:
        self.name = name
        self.capacity = config.capacity  # bytes
        self.reads_only = config.write == "off"
        self.log = TierLog(name, config.place, format_size(config.capacity), write)
        self.answered = False  # opened, down or refused since the current namespace was sent
        self.refusal = ""  # why the tier can never work as configured
        self.used_bytes = 0
        self.listed_rows = 0
        self.staged = (False, False)  # loads and stores
        self.touch_at_s = 0.0  # when the next packet of recent uses may be sent

    def gauges(self) -> dict[str, float]:
        return {
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.capacity,
            "denials": float(len(self.log.denials)),
            "listed_rows": float(self.listed_rows),
            "loads_staged": float(self.staged[0]),
            "stores_staged": float(self.staged[1]),
        }


class MoverLink:
    """One for a coordinator, whose core and lock it shares.

    The supervisor's thread holds the link, never the coordinator, so that an unused coordinator is collected and
    closed.
    """

    def __init__(
        self,
        core: TierManager,
        config: TiersConfig,
        namespace: Namespace,
        region: HostRegion,
        *,
        changed: threading.Condition,
        clock: Callable[[], float],
        description: Description,
    ) -> None:
        """`changed`: notified after every report of a mover that may change an answer; its lock guards everything."""
        self.namespace = namespace
        self._log_queue = LogQueue()
        self.tiers = [
            TierStatus(name, tier, self._log_queue.put) for name, tier in zip(config.names, config.storage, strict=True)
        ]
        self.changed: threading.Condition = changed
        self.after_tick: Callable[[], None] | None = None  # called without the lock, at least once in IDLE_S
        self._core = core
        self._row_bytes = region.geometry.row_bytes
        self._clock = clock
        self._touch_s = TOUCH_S
        self.supervisor = Supervisor(
            _configures(config.storage, region, engine_id(), description),
            config.names,
            region.fd,
            self,
            clock,
        )

    def start(self) -> None:
        """Start the movers; each opens the namespace."""
        self.supervisor.start(self._open_message())

    def reopen(self, namespace: Namespace) -> None:
        """Have every mover open another namespace. Call it with the lock held: the last of two resets must win."""
        self.namespace = namespace
        for tier in self.tiers:
            tier.answered = False
        if self.tiers:
            self.supervisor.reopen(self._open_message())

    def wake(self, at_once: bool) -> None:
        """There is work for the movers."""
        if at_once:
            self.supervisor.wake()
        else:
            self.supervisor.wake_soon()

    def flush_recent_uses(self) -> None:
        """The movers are about to be stopped: the next tick sends all recent uses, in as many packets as they take.
        Call it with the lock held."""
        self._touch_s = 0.0
        for tier in self.tiers:
            tier.touch_at_s = 0.0

    @property
    def ready(self) -> bool:
        """Whether each tier has listed all that it holds, or has reported that it is down. With the lock held."""
        return all(
            tier.state is TierState.UP or (tier.state is TierState.DOWN and status.answered)
            for tier, status in zip(self._core.tiers, self.tiers, strict=True)
        )

    # --- what the supervisor calls -----------------------------------------------------------------------------

    def on_message(self, tier: int, message: ToCoordinator) -> None:
        status = self.tiers[tier]
        if isinstance(message, Listed) and message.last and message.epoch == self.namespace.epoch:
            take_steps(self._core.events.listing_ends(tier), self.changed)
        elif isinstance(message, Opened):
            self._on_opened(tier, message)
            return
        with self._locked():
            now = self._clock()
            match message:
                case Finished():
                    outcomes = _outcomes(message.outcomes)
                    self._core.events.finished(
                        tier, message.job, outcomes, now, message.partial, seconds=message.seconds
                    )
                case Heartbeat():
                    status.used_bytes = message.used_bytes
                    status.listed_rows = message.listed
                    status.staged = message.staged
                    self._core.events.gone_before(tier, message.gone_before)
                    if self._core.tiers[tier].state is TierState.LISTING:
                        status.log.listing(message.listed, now)
                    status.log.denied(message.denials)
                    return
                case Listed():
                    if message.epoch == self.namespace.epoch:
                        entries = [(entry.slot, entry.key, entry.tick) for entry in message.entries]
                        self._core.events.listed(tier, entries, message.last)
                        if message.last:
                            each = self._core.tiers[tier]
                            status.log.listed(None if each.spec.asked else len(each.index.slots))
                case ExistenceChecked():
                    self._core.events.existence_checked(tier, message.check_id, message.absent, now)
                case Slots():
                    self._check_slots(status, message.slots)
                    if message.epoch == self.namespace.epoch:
                        self._core.events.resized(tier, message.slots)
                case Down():
                    if message.epoch != self.namespace.epoch:
                        return  # the mover is about to open the new one, and says how that went
                    status.answered = True
                    self._core.events.down(tier, now)
                    status.log.down(message.reason, now)
                case Refused():
                    status.answered = True
                    status.refusal = message.reason
                    self._core.events.down(tier, now)
                    status.log.down(message.reason, now)
            self.changed.notify_all()

    def _on_opened(self, tier: int, message: Opened) -> None:
        status = self.tiers[tier]
        self._check_slots(status, message.slots)
        self.supervisor.expect_mount(tier, message.mount_point)
        with self._locked():
            if message.epoch != self.namespace.epoch:
                return
            steps = self._core.events.opened(tier, message.slots)
        take_steps(steps, self.changed)
        with self._locked():
            if message.epoch == self.namespace.epoch:
                status.answered = True
                status.log.up(self._clock())

    def on_columns(self, tier: int, epoch: int, columns: ListedColumns) -> None:
        with self._locked():
            current = epoch == self.namespace.epoch
            steps: Steps = self._core.events.columns_listed(tier, columns) if current else iter(())
        take_steps(steps, self.changed)
        columns.close()

    def on_problem(self, tier: int, reason: str) -> None:
        with self._locked():
            self.tiers[tier].log.down(reason, self._clock())

    def on_log_line(self, tier: int, level: int, text: str) -> None:
        with self._locked():
            self.tiers[tier].log.line(level, text)

    def on_killed(self, tier: int) -> None:
        with self._locked():
            self._core.events.killed(tier, self._clock())
            self.changed.notify_all()

    def on_reaped(self, tier: int) -> None:
        with self._locked():
            self.tiers[tier].log.mover_lost()
            self._core.events.lost(tier, self._clock())
            self.changed.notify_all()

    def on_tick(self, received_s: float, send_credits: Sequence[int]) -> Turn:
        with self._locked():
            now = self._clock()
            for each, free in zip(self._core.tiers, send_credits, strict=True):
                each.send_credits = free
            jobs = self._core.turn(received_s, now)
            moves = [(job, message) for job in jobs if (message := self._sendable(job, now)) is not None]
            messages: list[tuple[int, ToMover]] = []
            messages += [(job.tier, message) for job, message in moves if job.direction is Direction.LOAD]
            most = self._core.limits.deletes_per_batch
            for tier, each in enumerate(self._core.tiers):
                messages += [(tier, Delete(batch)) for batch in each.delete_batches(most)]
            messages += [(job.tier, message) for job, message in moves if job.direction is Direction.STORE]
            for check in self._core.events.plan_checks(now):
                if sendable(question := CheckExistence(check.id, check.keys, check.chain)):
                    messages.append((check.tier, question))
                else:
                    self._core.events.existence_checked(check.tier, check.id, (), now)
            for status, each in zip(self.tiers, self._core.tiers, strict=True):
                status.log.watch(each.breakers, now)
            overdue = self._core.health.overdue(received_s)
            unfinished, pause_s = self._core.events.unfinished, self._core.events.pause_s
            unfinished |= any(each.index.to_delete and each.send_credits > 0 for each in self._core.tiers)
            busy = pause_s > 0 or self._core.events.busy
        messages += self._touches(now)
        garbage = self._core.garbage
        garbage.drop(DROPPED_PER_TURN)
        if self.after_tick is not None:
            self.after_tick()
        if unfinished or garbage:
            return Turn(messages, overdue, wait_s=0.0)
        return Turn(messages, overdue, TICK_S if busy else IDLE_S, pause_s)

    # --- inside ------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; what is to be logged is written after its release."""
        try:
            with self.changed:
                yield
        finally:
            self._log_queue.write()

    def _touches(self, now: float) -> list[tuple[int, ToMover]]:
        """The rows used lately, in at most one packet a tier every `_touch_s`. Takes the lock for a part at a time."""
        messages: list[tuple[int, ToMover]] = []
        for tier, (status, each) in enumerate(zip(self.tiers, self._core.tiers, strict=True)):
            while now >= status.touch_at_s and each.send_credits > 0 and each.state is TierState.UP:
                used: list[tuple[int, int]] = []
                for _ in range(MAX_TOUCHED // USES_A_PART):
                    with self.changed:
                        some = each.index.take_uses(USES_A_PART)
                    used += some
                    if not some:
                        break
                if not used:
                    break
                messages.append((tier, Touch(used)))
                each.send_credits -= 1
                status.touch_at_s = now + self._touch_s
        return messages

    def _sendable(self, job: Job, now: float) -> Store | Load | None:
        """The message for a job; None if it is too large for any mover to accept, which fails this job only."""
        message = _message(job)
        if sendable(message):
            return message
        self._core.events.finished(job.tier, job.id, [Outcome.FAILED] * len(job.moves), now)
        return None

    def _check_slots(self, status: TierStatus, slots: int) -> None:
        """Raises ValueError for more slots than any medium of this capacity has: each used one costs a byte. Where
        it is only read, there are as many as others have filled."""
        limit = MAX_SLOTS if status.reads_only else MAX_CAPACITIES * status.capacity // self._row_bytes
        if slots > limit:
            raise ValueError(f"the {status.name} tier cannot have {slots} slots")

    def _open_message(self) -> Open:
        return Open(self.namespace.digest, self.namespace.epoch)


def take_steps(steps: Steps, lock: threading.Condition) -> None:
    """Take the lock for one step at a time."""
    done = False
    while not done:
        with lock:
            done = next(steps, True) is True
            if done:
                lock.notify_all()
        if not done:
            time.sleep(PAUSE_S)  # so that a thread that waits for the lock gets it


def _outcomes(codes: bytes) -> list[Outcome]:
    """Raises ValueError, as `Outcome` does, which takes ten times as long: each row that was moved has one."""
    try:
        return [_OUTCOMES[code] for code in codes]
    except KeyError as error:
        raise ValueError(f"{error} is no outcome") from None


def _message(job: Job) -> Store | Load:
    if job.direction is Direction.LOAD:
        return Load(job.id, [Move(move.row.index, move.slot, move.key) for move in job.moves])
    return Store(job.id, [Move(m.row.index, m.slot, m.key, m.tick, m.seal, m.row.missing) for m in job.moves])


def engine_id() -> str:
    """A new ID of this engine, for its movers: HOST/PID/RANDOM. In Kubernetes the host is the pod's name."""
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"


def _configures(
    tiers: Sequence[StorageConfig], region: HostRegion, engine: str, description: Description
) -> list[Configure]:
    """The first message to each tier's mover. `engine`: see StorageTier.identify."""
    geometry = region.geometry
    return [
        Configure(
            tier_to_dict(tier),
            geometry.cells,
            geometry.cell_payload,
            geometry.sub_blocks,
            region.rows,
            physical_slots=tier.physical_slots,
            engine=engine,
            secret_variables=tier.secret_variables,
            description=description,
        )
        for tier in tiers
    ]
