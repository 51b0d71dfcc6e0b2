"""MoverLink: the coordinator's line to its movers. Applies what they report, and plans what they are sent.

All `on_*` methods are called on the supervisor's thread (`mover.handler.Handler`). They take the coordinator's lock
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from nixl_tiers.base.chunk import Namespace, Outcome
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import Times
from nixl_tiers.config.schema import TiersConfig, tier_to_dict
from nixl_tiers.core.listing import Steps
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.slots import slots_each
from nixl_tiers.core.turn import NOW, Due
from nixl_tiers.core.types import Direction, Job, TierState
from nixl_tiers.memory.columns import ListedColumns
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.handler import Turn
from nixl_tiers.mover.protocol import (
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
    RowsEnded,
    Slots,
    Store,
    ToCoordinator,
    ToMover,
    packet_of,
)
from nixl_tiers.mover.supervisor import IDLE_S, TICK_S, Supervisor
from nixl_tiers.runtime.copies import take_memory
from nixl_tiers.runtime.mover_status import MoverStatus
from nixl_tiers.runtime.recent_uses import RecentUses
from nixl_tiers.runtime.tier_log import LogQueue
from nixl_tiers.tiers.base import MAX_SLOTS, Move

_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
DROPPED_PER_TURN: Final = 4096  # entries of structures that a reset has replaced
PAUSE_S: Final = 0.0001  # between two steps of a listing
MAX_CAPACITIES: Final = 2  # of slots: a shared medium may hold more than this engine's own capacity


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
        times: Times,
    ) -> None:
        """`changed`: notified after every report of a mover that may change an answer; its lock guards everything."""
        self.namespace = namespace
        self._log_queue = LogQueue()
        members = [
            (name, f"{name}[{place}]" if len(tier.members) > 1 else name, member)
            for name, tier in zip(config.names, config.storage, strict=True)
            for place, member in enumerate(tier.members)
        ]
        write, replicas = self._log_queue.put, config.replicas or 1
        self.movers = [MoverStatus(tier, name, member, write, replicas) for tier, name, member in members]
        self.changed: threading.Condition = changed
        self.after_tick: Callable[[], None] | None = None  # called without the lock, at least once in IDLE_S
        self._core = core
        self._region = region
        self._row_bytes = region.geometry.row_bytes
        self._clock = clock
        self._recent_uses = RecentUses(core, changed)
        self.supervisor = Supervisor(
            _configures(config, region, engine_id(), description, times),
            [name for _, name, _ in members],
            region.fd,
            self,
            clock,
        )

    def without(self, silent: Mapping[str, str]) -> None:
        """These tiers are down until they answer, and why, by their names."""
        with self._locked():
            for mover in self.movers:
                if mover.tier in silent:
                    mover.answered = True
                    mover.log.down(silent[mover.tier], self._clock())

    def start(self) -> None:
        """Start the movers; each opens the namespace."""
        self.supervisor.start(self._open_message())

    def reopen(self, namespace: Namespace) -> None:
        """Have every mover open another namespace. Call it with the lock held: the last of two resets must win."""
        self.namespace = namespace
        for mover in self.movers:
            mover.answered = False
        if self.movers:
            self.supervisor.reopen(self._open_message())

    def wake(self, due: Due) -> None:
        """There is work for the movers."""
        if due is NOW:
            self.supervisor.wake()
        else:
            self.supervisor.wake_soon()

    def flush_recent_uses(self) -> None:
        """The movers are about to be stopped: the next tick sends all recent uses. Call it with the lock held."""
        self._recent_uses.flush()

    @property
    def ready(self) -> bool:
        """Whether each mover has listed all that it holds, or has reported that it is down. With the lock held."""
        return all(
            member.state is TierState.UP or (member.state is TierState.DOWN and status.answered)
            for member, status in zip(self._core.movers, self.movers, strict=True)
        )

    def of_tier(self, name: str) -> list[MoverStatus]:
        """The movers of the tier of this name."""
        return [mover for mover in self.movers if mover.tier == name]

    # --- what the supervisor calls -----------------------------------------------------------------------------

    def on_message(self, mover: int, message: ToCoordinator) -> None:
        status = self.movers[mover]
        if isinstance(message, Listed) and message.last and message.epoch == self.namespace.epoch:
            take_steps(self._core.events.listing_ends(mover), self.changed)
        elif isinstance(message, Opened):
            self._on_opened(mover, message)
            return
        with self._locked():
            now = self._clock()
            match message:
                case RowsEnded() | Finished():
                    self._on_rows_ended(mover, message, now)
                case Heartbeat():
                    status.used_bytes = message.used_bytes
                    status.listed_rows = message.listed
                    status.staged = message.staged
                    status.stuck = message.stuck
                    self._core.events.gone_before(mover, message.gone_before)
                    if self._core.movers[mover].state is TierState.LISTING:
                        status.log.listing(message.listed, now)
                    status.log.denied(message.denials)
                    return
                case Listed():
                    if message.epoch == self.namespace.epoch:
                        entries = [(entry.slot, entry.key, entry.tick) for entry in message.entries]
                        self._core.events.listed(mover, entries, message.last)
                        if message.last:
                            member = self._core.movers[mover]
                            tier = self._core.tiers[member.tier]
                            status.log.listed(None if tier.spec.asked else len(tier.index.slots_of(member)))
                case ExistenceChecked():
                    self._core.events.existence_checked(mover, message.check_id, message.absent, now)
                case Slots():
                    self._check_slots(status, message.slots)
                    if message.epoch == self.namespace.epoch:
                        self._core.events.resized(mover, message.slots)
                case Down():
                    if message.epoch != self.namespace.epoch:
                        return  # the mover is about to open the new one, and says how that went
                    status.answered = True
                    self._core.events.down(mover, now)
                    status.log.down(message.reason, now)
                case Refused():
                    status.answered = True
                    status.refusal = message.reason
                    self._core.events.down(mover, now)
                    status.log.down(message.reason, now)
            self.changed.notify_all()

    def _on_opened(self, mover: int, message: Opened) -> None:
        status = self.movers[mover]
        self._check_slots(status, message.slots)
        self.supervisor.expect_mount(mover, message.mount_point)
        with self._locked():
            if message.epoch != self.namespace.epoch:
                return
            steps = self._core.events.opened(mover, message.slots)
        take_steps(steps, self.changed)
        with self._locked():
            if message.epoch == self.namespace.epoch:
                status.answered = True
                status.log.up(self._clock())

    def _on_rows_ended(self, mover: int, message: RowsEnded | Finished, now: float) -> None:
        events, outcomes = self._core.events, _outcomes(message.outcomes)
        if isinstance(message, RowsEnded):
            events.rows_ended(mover, message.job, message.rows, outcomes, now, partial=message.partial)
        else:
            events.finished(mover, message.job, outcomes, now, message.partial, seconds=message.seconds)

    def on_columns(self, mover: int, epoch: int, columns: ListedColumns) -> None:
        with self._locked():
            current = epoch == self.namespace.epoch
            steps: Steps = self._core.events.columns_listed(mover, columns) if current else iter(())
        take_steps(steps, self.changed)
        columns.close()

    def on_problem(self, mover: int, reason: str) -> None:
        with self._locked():
            self.movers[mover].log.down(reason, self._clock())

    def on_log_line(self, mover: int, level: int, text: str) -> None:
        with self._locked():
            self.movers[mover].log.line(level, text)

    def on_killed(self, mover: int) -> None:
        with self._locked():
            self.movers[mover].stuck = False
            self._core.events.killed(mover, self._clock())
            self.changed.notify_all()

    def on_reaped(self, mover: int) -> None:
        with self._locked():
            self.movers[mover].log.mover_lost()
            self._core.events.lost(mover, self._clock())
            self.changed.notify_all()

    def on_tick(self, received_s: float, send_credits: Sequence[int]) -> Turn:
        with self._locked():
            now = self._clock()
            members = self._core.movers
            for member, free in zip(members, send_credits, strict=True):
                member.send_credits = free
            take_memory(self._core, self._region)
            jobs = self._core.turn(received_s, now)
            moves = [(job, packet) for job in jobs if (packet := self._packet_of(job, now)) is not None]
            messages: list[tuple[int, ToMover | bytes]] = []
            messages += [(job.mover, packet) for job, packet in moves if job.direction is Direction.LOAD]
            most = self._core.limits.deletes_per_batch
            for member in members:
                messages += [(member.number, Delete(batch)) for batch in member.delete_batches(most)]
            messages += [(job.mover, packet) for job, packet in moves if job.direction is Direction.STORE]
            for check in self._core.events.plan_checks(now):
                packet = packet_of(CheckExistence(check.id, check.keys, check.chain))
                if packet is not None:
                    messages.append((self._core.tiers[check.tier].members[0].number, packet))
                else:
                    self._core.checks.answered(check.tier, check.id, (), now)
            for status, member in zip(self.movers, members, strict=True):
                status.log.watch(member.breakers, now)
                member.refusal = status.log.refusal
            overdue = self._core.health.overdue(received_s)
            overdue |= {n: "existence checks are stuck" for n, status in enumerate(self.movers) if status.stuck}
            unfinished, pause_s = self._core.events.unfinished, self._core.events.pause_s
            unfinished |= any(member.to_delete and member.send_credits > 0 for member in members)
            busy = self._core.events.busy
        messages += self._recent_uses.messages(now)
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

    def _packet_of(self, job: Job, now: float) -> bytes | None:
        """The message for a job; None if it is too large for any mover to accept, which fails this job only."""
        packet = packet_of(_message(job, self._core.movers[job.mover].first_slot))
        if packet is None:
            self._core.events.finished(job.mover, job.id, [Outcome.FAILED] * len(job.moves), now)
        return packet

    def _check_slots(self, status: MoverStatus, slots: int) -> None:
        """Raises ValueError for more slots than any medium of this capacity has: each used one costs a byte. Where
        it is only read, there are as many as others have filled."""
        limit = MAX_SLOTS if status.reads_only else MAX_CAPACITIES * status.capacity // self._row_bytes
        limit = min(limit, slots_each(len(self.of_tier(status.tier))))
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


def _message(job: Job, first: int) -> Store | Load:
    """`first`: which slot its mover knows as 0."""
    if job.direction is Direction.LOAD:
        return Load(job.id, [Move(move.row.index, move.slot - first, move.key) for move in job.moves])
    return Store(job.id, [Move(m.row.index, m.slot - first, m.key, m.tick, m.seal, m.row.missing) for m in job.moves])


def engine_id() -> str:
    """A new ID of this engine, for its movers: HOST/PID/RANDOM. In Kubernetes the host is the pod's name."""
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"


def _configures(
    config: TiersConfig, region: HostRegion, engine: str, description: Description, times: Times
) -> list[Configure]:
    """The first message to each mover. `engine`: see StorageTier.identify."""
    geometry = region.geometry
    return [
        Configure(
            tier_to_dict(member),
            geometry.cells,
            geometry.cell_payload,
            geometry.sub_blocks,
            region.rows,
            engine=engine,
            secret_variables=member.secret_variables,
            description=description,
            movers=len(tier.members),
            replicas=config.replicas or 1,
            times=times,
        )
        for tier in config.storage
        for member in tier.members
    ]
