"""A simulation around one TierManager: workers, movers, media, a region and a clock of its own.

`Content` stands for bytes: which key's chunk, of which weights. Workers and movers are as faulty as real ones: they
write garbage before they write the content, go on writing after a reset, die half-way through a job, and their media
tear, lose and flip bytes. The simulation checks invariants at the moment they matter: a row or slot that is allocated
has no other user, and what is read is what was stored.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.existence import ExistenceCheck
from nixl_tiers.core.listing import Steps, take_all
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.member import UNLIMITED
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.pricing import ENOUGH
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.rows import Found, Row, RowState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import BreakerLimits, BreakerState, Direction, Job, Limits, PlannedMove, TierSpec, TierState
from tests.support import inside
from tests.support.columns import PlainColumns
from tests.support.core import all_failed, all_good, expire, look_up_key, rows_of
from tests.support.judges import HoldJudge, MeasurementJudge

ROW_BYTES = 4096
MANY_TURNS = 1000
TOKENS = 16  # of a chunk
WINDOW_CHUNKS = 2
WINDOWED = b"w"  # before a key of a hybrid model's windowed group
LONG_AGO_S = 1000.0
RETAINED_S = 20.0  # the longest that anything is retained or put off
SOME_ROOM = 6  # the fewest messages a turn with which nothing stands still
LIMITS = Limits(
    wait_s=5.0,
    pin_s=10.0,
    soft_deadline_min_s=2.0,
    hard_deadline_min_s=10.0,
    hard_deadline_max_s=20.0,
    retry_s=3.0,
    aside_s=12.0,
    moves_per_job=3,
    rows_per_slice=3,
    listed_per_step=2,
    deletes_per_batch=3,
    deletes_per_turn=6,
    check_timeout_s=0.5,
    max_checks=2,
    distant_checks=2,
    keys_per_check=4,
    keys_at_once=2,
    later_keys=3,
    absent_s=8.0,
    store_hold_s=0.5,
    hold_share=0.5,
    measure_s=2.0,
    retain_share=0.4,
    measure_time=0.5,  # so that a tier that takes seconds for a row is measured often
    reserve_share=0.5,  # so that demotion has a queue in a tier of a few rows
    breaker=BreakerLimits(max_backoff_s=20.0),
)
ROUNDING_S = 1e-9  # a deadline less the time from which it was counted differs from its span in the last digit


class Content(NamedTuple):
    """What a row holds: `key`'s chunk, computed with the weights of `epoch`."""

    key: Key
    epoch: int


GARBAGE = Content(b"garbage", -1)


class BrokenInvariant(AssertionError):
    """The core violated an invariant."""


def require(kept: bool, what: str) -> None:
    if not kept:
        raise BrokenInvariant(what)


class Scan(Enum):
    """In which order a request's keys are looked up, and where that stops."""

    PREFIX = "prefix"  # a full-attention group: up to the first miss
    WINDOW = "window"  # a windowed group: from its end
    CHAIN = "chain"  # a full-attention group whose chain is resolved at once
    HYBRID = "hybrid"  # the same, and then a windowed group of two chunks from its end, of the same chunks
    EACH = "each"  # a store's get: all keys, without positions


@dataclass(frozen=True)
class Prompt:
    """A request's chunks. One that `stays` is not finished after its store: it may be preempted."""

    chain: list[Key]
    scan: Scan
    stays: bool


@dataclass
class WorkerJob:
    """A store (GPU -> rows) or a load (rows -> GPU) that workers have been given; or a put or get of a thread that uses
    the store without an engine. That one uses its rows until it ends itself, whatever is reset meanwhile."""

    store: bool
    keys: list[Key]
    rows: list[int]
    epoch: int
    request: str
    stale: bool = False  # prepared before the last reset: it is never reported as complete


@dataclass
class SimulatedJob:
    """A job as it was sent: row and slot numbers do not change with the core's objects. `told`: how many of its moves
    were reported while others went on; `heard`: and how many of these reports have arrived."""

    job: Job
    epoch: int
    done: list[Outcome] = field(default_factory=list)
    first: int = 0  # which slot its mover knows as 0
    told: int = 0
    heard: int = 0
    moves: list[PlannedMove] = field(init=False)
    rows: list[int] = field(init=False)
    slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.moves = [*self.job.moves]
        self.rows = [move.row.index for move in self.moves]
        self.slots = [move.slot - self.first for move in self.moves]


@dataclass
class RowsReport:
    """A mover's report of those moves of a job that have ended, from one on to before another, while others go on."""

    work: SimulatedJob
    first: int
    last: int


@dataclass
class Answer:
    """A mover's answer to an existence check: the keys that it found, when they were written, and those that are
    absent."""

    probe: int
    epoch: int
    found: list[tuple[Key, int]]
    absent: list[Key]


Sent = SimulatedJob | list[tuple[int, Key]] | int | ExistenceCheck


@dataclass
class SimulatedMover:
    """One mover process and the medium that survives it: by epoch, by place, the key according to the journal (or the
    object's name) and the content. `inbox`: what it was sent and has not done yet. Of a medium that is asked `ticks`
    are the times of writing, and `oldest` is that before which others have deleted all."""

    physical: bool
    slots: int
    medium: dict[int, dict[object, tuple[Key, Content]]] = field(default_factory=dict)
    ticks: dict[tuple[int, object], int] = field(default_factory=dict)  # (epoch, place) -> its row's, by the journal
    oldest: int = 0
    told: int = 0  # `oldest`, as the engine knows it,
    told_ticks: dict[Key, int] = field(default_factory=dict)  # and times of writing
    newest: int = 0  # tick of the last listing,
    listed_after: int = 0  # and the last job that was planned before it
    alive: bool = True
    epoch: int = 0
    stuck: bool = False  # alive, and does nothing
    dying: bool = False  # killed, and not dead yet: it may still write its current row
    inbox: deque[Sent] = field(default_factory=deque)
    finished: deque[SimulatedJob | RowsReport | Answer] = field(default_factory=deque)
    reported_absent: dict[Key, float] = field(default_factory=dict)  # when the engine heard of it
    listing: deque[list[tuple[int, Key, int]] | PlainColumns] = field(default_factory=deque)  # not delivered yet
    unreported: deque[SimulatedJob] = field(default_factory=deque)  # finished by a dead mover, never reported

    def place(self, slot: int, key: Key) -> object:
        return slot if self.physical else key

    @property
    def here(self) -> dict[object, tuple[Key, Content]]:
        return self.medium.setdefault(self.epoch, {})


class Simulation:
    """Drives one TierManager. Every method is one event; the invariants must hold after any order of events."""

    core: TierManager
    retained: list[tuple[Row, float]]  # and until when each is not to be evicted
    _steps: Steps | None  # what the supervisor's thread takes one a turn, and does nothing else

    def __init__(
        self,
        rows: int = 6,
        slots: Sequence[int] = (6, 12),
        core: Callable[..., TierManager] = TierManager,
        writes: Sequence[Write] = (Write.THROUGH, Write.THROUGH),
        *,
        listed: int | None = None,
        tokens_per_s: float | None = None,
        quotas: tuple[float, ...] = (),
        members: int = 1,
    ) -> None:
        """`members`: of the first tier, which share its slots.
        `quotas`: of the tenants whose prompts begin with "a", with "b" and so on. `listed`: so many rows that a tier
        held before are listed one by one; the others in columns of a few, as `deliver` comes to them. None: all at
        once. `tokens_per_s`: of prefill, None if that is not known."""
        self.room = UNLIMITED  # messages that a mover takes a turn
        self.turns = MANY_TURNS  # how many the supervisor takes before another event; more where work is left
        self.limits = LIMITS
        self.rows = rows
        self.now = 0.0
        self.listed = listed
        self._make = core
        self._tokens_per_s = tokens_per_s
        self._epochs = 0
        # Slots of the odd tiers are no places: other engines store there too, and they are asked.
        self.specs = [
            TierSpec(
                f"tier{i}",
                write,
                i % 2 == 0,
                i % 2 == 1,
                quotas=() if i % 2 else quotas,
                members=1 if i else members,
            )
            for i, write in enumerate(writes)
        ]
        self.quotas = quotas
        self.movers = [
            SimulatedMover(spec.physical_slots, max(1, count // spec.members))
            for spec, count in zip(self.specs, slots, strict=True)
            for _ in range(spec.members)
        ]
        self.allowed: set[Key] = set()  # some request or call that has them may write them to storage tiers
        self._requests = 0
        self._load_failed: set[str] = set()  # requests a load of which has failed: everything is a miss to them
        self._begin()

    # --- the engine --------------------------------------------------------------------------------------------

    def request(
        self,
        chain: Sequence[Key],
        scan: Scan = Scan.PREFIX,
        *,
        stays: bool = False,
        host_only: bool = False,
        low: bool = False,
    ) -> str:
        """A new request whose prompt is `chain`; returns its name. It runs at once unless it waits, and finishes unless
        it `stays`. Of one that is `host_only` nothing may be written to storage tiers; what one of `low` priority
        stores is evicted first."""
        patient = scan is Scan.EACH
        wishes = RequestWishes(host_only=host_only, evict_first=low, patient=patient)
        name = self._name("request", chain, wishes)
        if not host_only:
            self.allowed.update([*chain, *(WINDOWED + key for key in chain)])
        self._run(name, Prompt(list(chain), scan, stays and not patient))  # nobody preempts a store's get
        return name

    def engine_uses(self, chain: Sequence[Key], own: int, *, host_only: bool = False) -> None:
        """A new request of which the engine has the first `own` chunks in its own memory: it looks up the others."""
        name = self._name("request", chain, RequestWishes(host_only=host_only))
        if not host_only:
            self.allowed.update(chain)
        used = chain[:own]
        self.core.used(name, used)
        rows = [row for key in used if (row := self.core.host.index.get(key)) is not None]
        self._uses.append((inside.state(self.core).tick - 1, rows))
        if own < len(chain):
            self._run(name, Prompt(list(chain[own:]), Scan.CHAIN, stays=False))
        else:
            self._finish(name)
            self.tick()

    def queue(self, chain: Sequence[Key], rank: float = 0.0) -> str:
        """A new request whose turn comes later (`turn`); returns its name."""
        name = self._name("request", chain, RequestWishes())
        self.allowed.update(chain)
        self.core.anticipate(name, chain, (rank,))
        self.queued[name] = Prompt(list(chain), Scan.PREFIX, stays=False)
        self.tick()
        return name

    def look_up_in_vain(self, chain: Sequence[Key]) -> None:
        """A request that is aborted before it has computed or loaded anything."""
        name = self._name("request", chain)
        self.allowed.update(chain)
        self._look_up(name, Prompt(list(chain), Scan.CHAIN, stays=False))
        self._finish(name)
        self.tick()

    def turn(self, name: str) -> None:
        self._run(name, self.queued.pop(name))

    def prefetch(self, chain: Sequence[Key], after_s: float | None = None) -> None:
        if after_s is None:
            self.core.prefetch(chain)
        else:
            self.core.prefetch(chain, self.now + after_s, self._tenant_of(chain[0]))
        self.tick()

    def retain(self, chain: Sequence[Key], seconds: float) -> None:
        """A request has ended that had these chunks, and they are to stay for a while."""
        until_s = self.now + seconds
        rows = [row for key in chain if (row := self.core.host.index.get(key)) is not None]
        before = [row.retained_until >= until_s for row in rows]
        whole = self.core.retain(chain, until_s)
        kept = [row.retained_until >= until_s for row in rows]
        front = [*kept, False].index(False)
        require(kept[front:] == before[front:], "what is retained is not the front of a prefix")
        host, share = self.core.host, self.limits.retain_share
        full = inside.retained(self.core) >= int(share * self.rows)
        full |= any(host.retained_of[tenant] >= int(share * quota) for tenant, quota in enumerate(host.quotas, 1))
        require(whole == all(kept) and (whole or full), "less is retained than there is room for")
        self.retained += [(row, until_s) for row, is_kept in zip(rows, kept, strict=True) if is_kept]
        self.tick()

    def again(self, name: str) -> None:
        """The scheduler comes back to a waiting request: in another step, as it looks up each of them once a step."""
        request = inside.requests(self.core).by_name.get(name)
        if request is not None and request.scan.step == self.core.host.step:
            self.core.end_step()
        self._run(name, self.waiting.pop(name))

    def preempt(self, name: str) -> None:
        """A running request loses its KV and is looked up again, unless workers still use its rows."""
        if all(job.request != name for job in self.workers):
            self.core.end_step(preempted=[name])
            self._since.pop(name, None)
            self._run(name, self.running.pop(name))

    def abort(self, name: str) -> None:
        next(kind for kind in (self.queued, self.waiting, self.running) if name in kind).pop(name)
        self._finish(name)

    def abort_all(self) -> None:
        """No request is alive any more; calls go on."""
        for name in [*self.queued, *self.waiting, *self.running]:
            self.abort(name)
        self.tick()

    def end_step(self) -> None:
        self.core.end_step()
        self.tick()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def tick(self) -> None:
        """What the supervisor does, as often as it has time for: at once again where work is left."""
        for _ in range(self.turns):
            supervised = self._steps is None
            self._turn()
            if not (self.core.events.unfinished or self.core.garbage or self._steps):
                if supervised:
                    self._check_gone()
                return
        require(self.turns < MANY_TURNS, "work is left for ever")

    def _turn(self) -> None:
        """One of the supervisor's thread."""
        if self._steps is not None:
            self._take_step()
        else:
            self._supervise()
        self.check()

    def _take_step(self) -> None:
        assert self._steps is not None
        if next(self._steps, self) is self:
            self._steps = None

    def _end_steps(self) -> None:
        """The supervisor's thread comes to something else, of which this is the first."""
        while self._steps is not None:
            self._take_step()

    def _supervise(self) -> None:
        """Expire, plan, send; kill what is overdue."""
        self._told_s = self.now
        expire(self.core, self.now)
        for number in self.core.health.overdue(self.now):
            self.send_kill(number)
        for member in self.core.movers:
            member.send_credits = self.room
        jobs = sorted(self.core.events.plan(self.now), key=lambda job: job.direction is Direction.STORE)
        self._hold.planned()
        loads = sum(job.direction is Direction.LOAD for job in jobs)
        self._send_jobs(jobs[:loads])
        for member in self.core.movers:
            for batch in member.delete_batches(self.limits.deletes_per_batch):
                self._send(member.number, batch)
            self.core.garbage.drop(4)
            require(member.send_credits >= 0, "more is sent than there is room for")
            stores = any(job.mover == member.number for job in jobs[loads:])
            require(not (stores and member.to_delete), "a store overtakes what goes before it")
        self._send_jobs(jobs[loads:])
        for probe in self.core.events.plan_checks(self.now):
            self._check_probe(probe)
            self._send(self._first(probe.tier), probe)

    def _send_jobs(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            for move in job.moves:
                failed_s = self._failed.get((job.tier, self._place(job.tier, move)), -self.limits.retry_s)
                require(self.now >= failed_s + self.limits.retry_s, "what has just failed is moved again")
                reads = job.direction is Direction.STORE
                self._check_row(move.row.index, writing=not reads, beside=(job.mover, job.id))
                if not reads:
                    requests = inside.loading_for(self.core, move.row)
                    lost = [move.key in self._lost.get((request.name, job.tier), ()) for request in requests]
                    require(not lost or not all(lost), "a row is loaded behind one that is missing")
            sent = SimulatedJob(job, self.movers[job.mover].epoch, first=self.core.movers[job.mover].first_slot)
            self._check_slots(sent)
            self._send(job.mover, sent)

    def _queued_keys(self) -> set[Key]:
        """Those that are to be loaded."""
        return {key for tier in self.core.tiers for keys in tier.to_load.values() for key in keys}

    def _first(self, tier: int) -> int:
        """The number of the tier's first mover."""
        return self.core.tiers[tier].members[0].number

    def reset(self, *, keep: bool = False) -> None:
        """Other weights from now on, or the same (`keep`). Open jobs go on; waiting requests come back, with the
        deadlines they have."""
        for job in self.workers:
            job.stale = True
        self._uses.clear()
        self._lost.clear()
        if not keep:
            self._failed.clear()
        for mover in self.movers:
            mover.reported_absent.clear()
            mover.told_ticks.clear()
        self.retained.clear()
        self.core.reset(keep_tiers=keep, now=self.now)
        if not keep:
            self._epochs += 1
            self.epoch = self._epochs
            for tier, mover in enumerate(self.movers):
                mover.listing.clear()
                self._send(tier, self.epoch)
        self.check()

    def crash(self) -> None:
        """The engine dies with its movers and comes back with the weights of epoch 0; the media survive."""
        self.movers = [
            SimulatedMover(each.physical, each.slots, each.medium, each.ticks, each.oldest) for each in self.movers
        ]
        self._begin()

    # --- workers -----------------------------------------------------------------------------------------------

    def worker_finishes(self, number: int, good: bool = True) -> None:
        job = self.workers[number]
        if not job.stale:
            # The engine flushes what was open at a reset ahead of what came after it.
            for old in [other for other in self.workers if other.stale]:
                self._work(old, good=True)
        self._work(job, good)

    def _work(self, job: WorkerJob, good: bool) -> None:
        self.workers.remove(job)
        for row in job.rows if job.store else ():
            self.region[row] = GARBAGE
        self._copy(job, len(job.rows) if good else 0)
        if job.stale:
            return
        if job.store:
            self.core.complete_store(set(job.keys), all_good if good else all_failed)
        else:
            if not good:
                self._load_failed.add(job.request)
            self.core.complete_load(job.request, self.now, failed=not good)
        self.tick()

    def _copy(self, job: WorkerJob, filled: int) -> None:
        """Into the first `filled` rows, or out of all of them."""
        for place, (key, row) in enumerate(zip(job.keys, job.rows, strict=True)):
            if not job.store:
                require(self.region[row] == Content(key, job.epoch), f"{self.region[row]} is loaded as {key!r}")
            elif place < filled:
                self.region[row] = Content(key, job.epoch)

    # --- threads without an engine -----------------------------------------------------------------------------

    def put(self, chain: Sequence[Key]) -> None:
        """A thread begins to put `chain`; `call_ends` ends it."""
        name = self._name("call", chain)
        self.allowed.update(chain)
        plan = self.core.prepare_store(name, chain, call=True)
        self._call_begins(WorkerJob(True, plan.keys, plan.rows, self.epoch, name))

    def get(self, chain: Sequence[Key]) -> None:
        """A thread begins to get `chain`; it waits (`get_again`), or reads what it has found until `call_ends`."""
        self.allowed.update(chain)
        name = self._name("call", chain, RequestWishes(patient=True))
        self._get(name, Prompt(list(chain), Scan.EACH, stays=False))

    def get_again(self, name: str) -> None:
        self._get(name, self.getting.pop(name))

    def call_ends(self, number: int, good: bool = True) -> None:
        """A call ends; if not `good`, it is interrupted: only the first half of a put's rows was filled."""
        call = self.calls.pop(number)
        self._copy(call, len(call.rows) if good else len(call.rows) // 2)
        self.core.end_call(call.request, all_good if good else all_failed)
        self.tick()

    def _get(self, name: str, prompt: Prompt) -> None:
        found = self._look_up(name, prompt)
        if found is None:
            self.getting[name] = prompt
            self.core.end_step()
            self.tick()
            return
        self._since.pop(name, None)
        rows = self.core.prepare_load(name, found, 0.0, call=True).rows
        self.core.end_step()
        self._call_begins(WorkerJob(False, found, rows, self.epoch, name))

    def _call_begins(self, call: WorkerJob) -> None:
        for row in call.rows:
            self._check_row(row, writing=call.store)
            if call.store:
                self.region[row] = GARBAGE
        self.calls.append(call)
        self.tick()

    # --- movers ------------------------------------------------------------------------------------------------

    def other_stores(self, chain: Sequence[Key], epoch: int = 0) -> None:
        """Another engine, with the weights of `epoch`, writes these chunks to the media that are shared."""
        self.allowed.update(chain)
        for mover in self.movers:
            if not mover.physical:
                mover.medium.setdefault(epoch, {}).update({key: (key, Content(key, epoch)) for key in chain})
                mover.ticks.update({(epoch, key): self._time for key in chain})

    def others_delete(self, tier: int, count: int) -> None:
        """The janitor of a medium that is asked, which may be another engine's, deletes the rows that were written
        first, of whatever weights. `heartbeat` reports it."""
        mover = self.movers[tier]
        rows = [(epoch, key) for epoch, held in mover.medium.items() for key in held if isinstance(key, bytes)]
        rows.sort(key=lambda row: (mover.ticks[row], row))
        for epoch, key in rows[:count]:
            del mover.medium[epoch][key]
        if rows:
            mover.oldest = mover.ticks[rows[min(count, len(rows) - 1)]]

    def heartbeat(self, tier: int) -> None:
        mover = self.movers[tier]
        if mover.alive and not (mover.stuck or mover.dying):
            self.core.events.gone_before(tier, mover.oldest)
            mover.told = mover.oldest
            self.tick()

    def _tell(self, tier: int, key: Key, tick: int) -> None:
        """The engine hears that a row is there, and when it was written."""
        self.core.events.listed(tier, [(0, key, tick)], last=False)
        mover = self.movers[tier]
        mover.told_ticks[key] = max(tick, mover.told, mover.told_ticks.get(key, 0))

    @property
    def _time(self) -> int:
        """By the clock of a medium."""
        return 1 + int(10 * self.now)

    def mover_works(self, tier: int, outcome: Outcome = Outcome.OK) -> None:
        """The tier's mover does its next step: one move of a job, a batch of deletes, a check, a change of namespace.

        A check whose outcome is not OK gets a wrong answer (FAILED: the contrary of the truth), or none (NO_SPACE).
        """
        mover = self.movers[tier]
        if not mover.alive or mover.stuck or not mover.inbox:
            return
        head = mover.inbox[0]
        if isinstance(head, int):
            mover.inbox.popleft()
            mover.epoch = head
            self._announce(tier)
        elif isinstance(head, list):
            mover.inbox.popleft()
            for slot, key in head:
                place = mover.place(slot, key)
                if place in mover.here and mover.here[place][0] == key:
                    del mover.here[place]
        elif isinstance(head, ExistenceCheck):
            mover.inbox.popleft()
            if outcome is not Outcome.NO_SPACE:
                mover.finished.append(self._answer(mover, head, outcome is Outcome.OK))
        else:
            self._move(mover, head, outcome)
            if len(head.done) == len(head.moves):
                (mover.unreported if mover.dying else mover.finished).append(head)
                mover.inbox.popleft()

    def mover_reports(self, tier: int) -> None:
        """The mover reports what has ended of the job at which it works, while that goes on."""
        mover = self.movers[tier]
        head = mover.inbox[0] if mover.inbox else None
        idle = mover.stuck or mover.dying or not mover.alive
        if isinstance(head, SimulatedJob) and head.told < len(head.done) and not idle:
            mover.finished.append(RowsReport(head, head.told, len(head.done)))
            head.told = len(head.done)

    def deliver(self, tier: int) -> None:
        """The core gets the mover's oldest report, or the next part of its listing."""
        mover = self.movers[tier]
        if mover.dying:
            return
        self._end_steps()
        if mover.listing:
            self._list_part(tier)
            self.tick()
        elif mover.finished:
            ended = mover.finished.popleft()
            if isinstance(ended, Answer):
                if ended.epoch == self.epoch:
                    for key, tick in ended.found:
                        self._tell(tier, key, tick)
                asked = self.core.checks.tiers[self._tier(tier).number].open.values()
                if ended.probe in {check.id for check in asked}:  # who is given up on is not listened to
                    mover.reported_absent.update(dict.fromkeys(ended.absent, self.now))
                self.core.events.existence_checked(tier, ended.probe, ended.absent, self.now)
            elif isinstance(ended, RowsReport):
                work, first, last = ended.work, ended.first, ended.last
                self._before_report(tier, work, first, last)
                self.core.events.rows_ended(tier, work.job.id, work.rows[first:last], work.done[first:last], self.now)
                work.heard = last
            else:
                self._before_report(tier, ended, ended.told, len(ended.moves))
                self.core.events.finished(tier, ended.job.id, ended.done[ended.told :], self.now)
            self.tick()

    def _place(self, tier: int, move: PlannedMove) -> int | Key:
        """What a tier sets aside: a slot, or a key where slots only count."""
        return move.slot if self.core.tiers[tier].spec.physical_slots else move.key

    def _before_report(self, tier: int, ended: SimulatedJob, first: int, last: int) -> None:
        """Note what it says of these moves; it tells before when rows were written, and which were missing, of which
        chains."""
        mover, moves = self.movers[tier], list(zip(ended.moves, ended.done, strict=False))[first:last]
        if ended.epoch == self.epoch and ended.job.direction is Direction.LOAD:
            bad = (Outcome.CORRUPT, Outcome.MISSING)
            mover.reported_absent.update({move.key: self.now for move, done in moves if done in bad})
        index, is_load = self.core.tiers[ended.job.tier].index, ended.job.direction is Direction.LOAD
        for move, done in moves:
            place = ended.job.tier, self._place(ended.job.tier, move)
            if done in (Outcome.OK, Outcome.FOUND):
                self._failed.pop(place, None)
            elif done is Outcome.FAILED and is_load and index.has(move.key, move.id):
                self._failed[place] = self.now
        for move, done in () if mover.physical else moves:
            if ended.job.direction is Direction.STORE:
                if ended.epoch == self.epoch and done in (Outcome.OK, Outcome.FOUND):
                    self._tell(tier, move.key, self.movers[tier].ticks[ended.epoch, move.key])
            elif done is Outcome.MISSING and self._tier(tier).index.has(move.key, move.id):
                for request in inside.loading_for(self.core, move.row):
                    if request.scan.ascending and request.pinned.get(move.key) is move.row:
                        self._lost.setdefault((request.name, self._tier(tier).number), set()).update(request.wanted)

    def kill(self, tier: int) -> None:
        """The mover dies in the middle of its job, is reaped, and another one opens the same medium."""
        while self.movers[tier].finished and not self.movers[tier].dying:
            self.deliver(tier)
        self._reap_and_restart(tier)

    def hang(self, tier: int) -> None:
        """The mover does nothing any more, until the medium heals or it is killed."""
        self.movers[tier].stuck = True

    def send_kill(self, tier: int) -> None:
        """The mover is killed; until it is reaped, it may still write its current row, and reports nothing."""
        mover = self.movers[tier]
        if not mover.dying:
            self._end_steps()
            mover.dying = True
            mover.stuck = False
            mover.unreported.extend(job for job in mover.finished if isinstance(job, SimulatedJob))
            mover.finished.clear()
            mover.listing.clear()
            self.core.events.killed(tier, self.now)

    def reap(self, tier: int) -> None:
        if self.movers[tier].dying:
            self._reap_and_restart(tier)

    def deliver_stale_result(self, tier: int) -> None:
        """A result of a dead mover arrives."""
        mover = self.movers[tier]
        if mover.unreported and not mover.dying:
            self._end_steps()
            stale = mover.unreported.popleft()
            self.core.events.finished(tier, stale.job.id, stale.done[stale.told :], self.now)
            self.tick()

    def _reap_and_restart(self, tier: int) -> None:
        self._end_steps()
        mover = self.movers[tier]
        for head in list(mover.inbox)[:1]:
            if isinstance(head, SimulatedJob) and len(head.done) < len(head.moves):
                self._move(mover, head, Outcome.FAILED)  # half of a row
        mover.inbox.clear()
        mover.listing.clear()
        mover.alive = True
        mover.dying = mover.stuck = False
        self.core.events.lost(tier, self.now)
        mover.epoch = self.epoch
        self._announce(tier)

    def fail(self, tier: int) -> None:
        """The medium does not answer (the mover says Down)."""
        self._end_steps()
        self.core.events.down(tier, self.now)
        self.movers[tier].alive = False
        self.movers[tier].listing.clear()
        self.check()

    def heal(self, tier: int) -> None:
        mover = self.movers[tier]
        mover.alive = True
        mover.stuck = False
        if mover.dying:
            return
        if self.core.movers[tier].state is TierState.DOWN and mover.epoch == self.epoch:
            self._announce(tier)

    def rot(self, tier: int, pick: int) -> None:
        """One row on the medium is corrupted: a bit flip, a swapped file, a replaced object."""
        held = self.movers[tier].here
        if held:
            place = sorted(held, key=repr)[pick % len(held)]
            held[place] = (held[place][0], GARBAGE)

    def rot_all(self, tier: int) -> None:
        """All rows on the medium are corrupted."""
        held = self.movers[tier].here
        held.update({place: (key, GARBAGE) for place, (key, _) in held.items()})

    def slow_down(self, tier: int, row_s: float) -> None:
        """The tier's last loads, some time ago, took so long a row."""
        for number in range(ENOUGH + 1):  # one after the other
            self.core.tiers[tier].loads.record(ROW_BYTES, row_s, self.now - LONG_AGO_S + number * row_s)

    def held_below(self, tier: int) -> list[Key]:
        """Rows that the tier can load, and that the host lacks: of one tenant, as a request is."""
        held = self.core.tiers[tier]
        keys = sorted(rows_of(held))
        keys = [key for key in keys if held.can_load(key) and key not in self.core.host.index]
        return [key for key in keys if self._tenant_of(key) == self._tenant_of(keys[0])]

    # --- invariants --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every event."""
        self._check_host()
        by_tier = [rows_of(tier) for tier in self.core.tiers]
        for tier, rows in zip(self.core.tiers, by_tier, strict=True):
            self._check_tier(tier, rows)
        self._check_victims(by_tier)
        self._check_pins()
        self._check_uses()
        for request in inside.waiting(self.core).values():
            for key, row in request.pinned.items():
                coming = self.core.host.index.get(key, row)
                kept = coming is row or request not in inside.loading_for(self.core, coming)
                require(kept, "a request does not pin the row that comes up in a dead one's place")
        for shared in self.core.checks.tiers.values():
            require(len(shared.open) <= self.limits.max_checks, "too many open checks")
            ahead = sum(not check.requests for check in shared.open.values())
            require(ahead <= max(1, self.limits.max_checks // 2), "requests find no room for their checks")
            require(len(shared.later) <= self.limits.later_keys, "too many keys are to be asked for later")

    def _check_host(self) -> None:
        host, share = self.core.host, self.limits.retain_share
        rows = host.index.values()
        require(len({row.index for row in rows}) == len(rows), "two keys in one row")
        ready = sum(row.state is RowState.READY for row in rows)
        require(host.counters.rows == ready, f"the host holds {ready} rows, and {host.counters.rows} are counted")
        for tenant, quota in enumerate(host.quotas, 1):
            own = [row for row in rows if row.tenant == tenant]
            require(len(own) <= quota, "a tenant has more of the host than its quota")
            require(all(self._tenant_of(row.key) == tenant for row in own), "a row counts against another's quota")
            retained = sum(row.retained_until > 0 for row in own)
            require(retained <= int(share * quota), "a tenant retains more than a share of its quota")
        retained = sum(row.retained_until > 0 for row in rows)
        require(retained <= int(share * self.rows), "more is retained than the share of the host")
        self.retained = [(row, until_s) for row, until_s in self.retained if until_s > self.now]
        kept = all(row.retained_until >= until_s for row, until_s in self.retained)
        require(kept, "a row is retained for less than was asked for")
        held = sum(place.held for place in inside.promotion(self.core).prefetch_queue._holding)
        require(held <= int(self.limits.line_share * self.rows), "requests that wait for their turn hold too much")

    def _check_tier(self, tier: Tier, rows: dict[Key, Found]) -> None:
        movers, slots = [self.movers[member.number] for member in tier.members], tier.index.slots
        held = sum(row.stored for row in rows.values())
        require(tier.counters.rows == held, f"a tier holds {held} rows, and {tier.counters.rows} are counted")
        for tenant, share in enumerate(tier.spec.quotas, 1):
            count = sum(row.tenant == tenant for row in rows.values())
            require(count <= max(1, share * slots.limit), "a tenant has more of a tier than its quota")
        places = {row.slot for row in rows.values()}
        require(not tier.spec.physical_slots or len(places) == len(rows), "two keys in one slot")
        if self._steps is None or tier is not self._tier(self._stepping):
            require(len(rows) == len(slots) <= max(slots.limit, 0), "slots leak, or above the budget")
        fits = all(len(mover.here) <= mover.slots or not mover.physical for mover in movers)
        require(fits, "more on the medium than it may hold")
        staged = [row for row in tier.staged.values() if not row.invalidated]
        require(len(staged) <= max(1, self.rows // 4), "demotion pins too much of the host")
        if (burst := tier.burst) is not None:
            loading = sum(len(job.moves) for job in self._jobs(tier) if job.burst is burst)
            require(burst.rows == loading, f"{loading} rows of a burst run, and {burst.rows} are counted")
        for job in tier.jobs:
            dying, waited_s = self.movers[job.mover].dying, self._told_s - job.started_s
            in_time = dying or waited_s <= self.limits.hard_deadline_max_s
            require(in_time, "a mover whose job never ends is not killed")
            waits = job.direction is Direction.LOAD and any(not move.row.invalidated for move in job.moves)
            patient = not waits or self.core.events.unfinished
            in_time = patient or waited_s <= self.limits.wait_s + ROUNDING_S
            require(in_time, "requests wait for a job after its soft deadline")

    def _jobs(self, tier: Tier) -> list[Job]:
        """Those of dead movers too."""
        return [*tier.jobs, *(job for member in tier.members for dead in member.dead for job in dead.to_end)]

    def _check_gone(self) -> None:
        """Nothing that others have deleted, as far as this engine was told, is promised to requests."""
        for tier in self.core.tiers:
            mover = self.movers[self._first(tier.number)]
            for key, row in rows_of(tier).items() if mover.told else ():
                idle = row.stored and not (row.pins or row.evicting)
                gone = mover.told_ticks.get(key, mover.told) < mover.told
                require(not (idle and gone), "a row is promised that others have deleted")

    def _check_victims(self, by_tier: list[dict[Key, Found]]) -> None:
        """Each victim that waits to be written below is on its way there, or back to the order."""
        core = self.core
        for tier in (None, *core.tiers):
            below = inside.state(core).below_host if tier is None else inside.state(core).below(tier)
            table = core.host.generation.table if tier is None else tier.index.rows
            written = set()
            if below is not None:
                written |= {*below.to_store, *below.waiting_for_seal}
                stores = [job for job in self._jobs(below) if job.direction is Direction.STORE]
                written |= {move.key for job in stores for move in job.moves}
            if tier is not None:
                written |= {*tier.to_demote, *tier.staged}
            rows = core.host.index if tier is None else by_tier[tier.number]
            evicting = {key for key in rows if table.is_evicting(key)}
            require(written >= evicting, "a victim waits for ever for its write")

    def _check_pins(self) -> None:
        """A row of the host is kept from eviction as often as something has a reason to, and not once more."""
        core, reasons = self.core, Counter[int]()  # by the row's order
        line = inside.promotion(core).prefetch_queue
        requests = [*inside.requests(core).by_name.values(), *(place.request for place in line._places)]
        held = [request.pinned.values() for request in {id(each): each for each in requests}.values()]
        for rows in (*held, core.host._pinned_hits, *(tier.staged.values() for tier in core.tiers)):
            reasons.update(row.order for row in rows)
        for key, row in core.host.index.items():
            used = row.worker_refs + row.call_refs + row.mover_refs if row.state is RowState.READY else 0
            wanted = reasons[row.order] + used + (row.retained_until > 0)
            require(inside.pins(core, key) == wanted, f"a row has {inside.pins(core, key)} pins instead of {wanted}")

    def _check_uses(self) -> None:
        """All that the engine used from its own memory has been noted."""
        for tick, rows in self._uses:
            for row in rows:
                gone = row.invalidated or self.core.host.index.get(row.key) is not row
                require(gone or row.tick >= tick, "a use by the engine is never noted")
        self._uses.clear()

    def quiesce(self) -> None:
        """Let everything that can end, end; then nothing may be pinned, queued or pending."""
        self.room = max(self.room, SOME_ROOM)
        self.turns = MANY_TURNS
        for number in range(len(self.movers)):
            self.heal(number)
            self.reap(number)
        for name in list(self.queued):
            self.turn(name)
        self._run_out()
        for name in list(self.running):
            self.abort(name)
        self.core.flushed()
        self.advance(max(self.limits.wait_s + self.limits.pin_s, self.limits.hard_deadline_min_s) + 1)
        self._run_out()
        rows = self.core.host.index.values()
        require(not any(row.referenced for row in rows), "a row stays in use for ever")
        self.advance(RETAINED_S + 1)
        self._run_out()
        self.end_step()
        self._run_out()  # a probe may have found room now
        core = self.core
        require(core.host.used == len(rows), "a row is lost")
        left = {
            "a retention": core.host.retained or inside.retention_waits(core),
            "a pin": inside.pinned(core) or any(row.pins for tier in core.tiers for row in rows_of(tier).values()),
            "a check": core.checks.busy,
            "a demotion": any(tier.staged for tier in core.tiers),
            "a delete": any(member.to_delete for member in core.movers),
            "the wait for a turn": inside.requests(core).before_turn,
            "a job": core.writeback.backlog() or any(map(self._jobs, core.tiers)),
            "a quarantine": any(tier.quarantined for tier in core.tiers),
        }
        never = [what for what, is_left in left.items() if is_left]
        require(not never, f"{never} never ends")
        self._measuring.ended()
        self._recover()
        for _ in self.core.checks.tiers:
            self.advance(self.limits.retry_s + self.limits.hard_deadline_min_s)
            self._run_out()
        later = any(shared.later for shared in self.core.checks.tiers.values() if shared.tier.readable)
        require(not later, "what was unknown while a medium was slow is never asked for")

    def _recover(self) -> None:
        """All media work: so all circuits must close soon, once there are rows to probe with."""
        for number in range(20):
            tiers = [tier for tier in self.core.tiers if tier.circuit is not BreakerState.CLOSED]
            if not tiers:
                return
            held = [keys for tier in tiers if (keys := self._loadable(tier))]
            self.request([b"recover%d" % number])
            self._run_out()  # a promotion may need its row, in a host of two
            for keys in held:
                self.request([keys[number % len(keys)]])
            for _ in range(4):
                self._run_out()
                self.advance(self.limits.breaker.max_backoff_s / 2)
        require(False, "a circuit never closes")

    def _loadable(self, tier: Tier) -> list[Key]:
        """Good rows that the host lacks, of members whose circuits are not closed."""
        movers = [self.movers[member.number] for member in tier.members if member.circuit is not BreakerState.CLOSED]
        held = [row for mover in movers for row in mover.here.values()]
        good = [key for key, content in held if content == Content(key, self.epoch)]
        return sorted(key for key in good if key in tier.index.rows and key not in self.core.host.index)

    def _run_out(self) -> None:
        for _ in range(300):
            if self.workers:
                self.worker_finishes(0)
            if self.calls:
                self.call_ends(0)
            for name in list(self.waiting):
                self.again(name)
            for name in list(self.getting):
                self.get_again(name)
            self.end_step()
            for tier in range(len(self.movers)):
                self.mover_works(tier)
                self.deliver(tier)
            busy = self._steps or any(m.inbox or m.finished or m.listing for m in self.movers)
            if not (busy or self.workers or self.waiting or self.calls or self.getting):
                return

    # --- inside ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A new engine."""
        self.epoch = 0
        self.region = [GARBAGE] * self.rows
        self.workers: list[WorkerJob] = []
        self.queued: dict[str, Prompt] = {}  # wait for their turn
        self.waiting: dict[str, Prompt] = {}
        self.running: dict[str, Prompt] = {}  # have loaded and stored what they could, and may be preempted
        self._since: dict[str, float] = {}  # request -> when it was first put off, since it last loaded anything
        self._failed: dict[tuple[int, int | Key], float] = {}  # places of tiers that a load has failed at, and when
        self._lost: dict[tuple[str, int], set[Key]] = {}  # by request and tier: what is behind a row that was missing
        self.calls: list[WorkerJob] = []
        self.getting: dict[str, Prompt] = {}  # calls that wait
        self._uses: list[tuple[int, list[Row]]] = []  # by the engine at a tick, of rows of the host, not noted yet
        self.retained = []
        self._told_s = self.now  # the time of the supervisor's last turn that did not go to `_steps`
        self._steps = None
        self._stepping = 0  # the mover that they are of
        self.core = self._start()
        self._hold = HoldJudge(self.core, require)
        self._measuring = MeasurementJudge(self.core, require)
        for tier in range(len(self.movers)):
            self._announce(tier)

    def _start(self) -> TierManager:
        quotas = {"quotas": self.quotas} if self.quotas else {}
        prefill = PrefillEstimate(self._tokens_per_s)
        return self._make(self.rows, ROW_BYTES, self.specs, self.limits, prefill=prefill, **quotas)

    def _name(self, kind: str, chain: Sequence[Key], wishes: RequestWishes | None = None) -> str:
        """Of a new request, or call, that arrives with these wishes if there are any."""
        self._requests += 1
        name = f"{kind}-{self._requests}"
        if wishes is not None:
            self.core.arrive(name, wishes)
        if self.quotas and chain:
            self.core.set_tenant(name, self._tenant_of(chain[0]))
        return name

    def _tenant_of(self, key: Key) -> int:
        tenant = key.removeprefix(WINDOWED)[0] - ord("a") + 1
        return tenant if tenant <= len(self.quotas) else 0

    def _announce(self, tier: int) -> None:
        mover = self.movers[tier]
        if mover.epoch != self.epoch:
            return
        self._end_steps()
        self._take_steps(tier, self.core.events.opened(tier, mover.slots))
        places = sorted(mover.here.items(), key=lambda item: (mover.ticks.get((mover.epoch, item[0]), 0), repr(item)))
        if not mover.physical:
            places = []  # it is asked
        held = [
            (place if isinstance(place, int) else number, key, mover.ticks.get((mover.epoch, place), 0))
            for number, (place, (key, _)) in enumerate(places)
        ]
        mover.listed_after = inside.jobs(self.core).last_id
        mover.newest = max((tick for _, _, tick in held), default=0)
        listed = len(held) if self.listed is None else self.listed
        mover.listing = deque([held[:listed]])
        mover.listing += [PlainColumns(held[start : start + 3]) for start in range(listed, len(held), 3)]
        mover.listing.append([])
        while mover.listing and self.listed is None:
            self._list_part(tier)
            self._end_steps()
        self.check()

    def _tier(self, mover: int) -> Tier:
        return self.core.tiers[self.core.movers[mover].tier]

    def _take_steps(self, tier: int, steps: Steps) -> None:
        """The first one now, the others at the next turns."""
        self._steps, self._stepping = steps, tier
        self._take_step()

    def _list_part(self, tier: int) -> None:
        listing = self.movers[tier].listing
        self._end_steps()
        piece = listing.popleft()
        if isinstance(piece, PlainColumns):
            self._take_steps(tier, self.core.events.columns_listed(tier, piece))
        else:
            self._take_steps(tier, self._listed(tier, piece, last=not listing))

    def _listed(self, tier: int, rows: list[tuple[int, Key, int]], last: bool) -> Steps:
        epoch = self.epoch
        if last and not self.movers[tier].physical:
            before = set(rows_of(self._tier(tier)))
            take_all(self.core.events.listing_ends(tier))
            require(before == set(rows_of(self._tier(tier))), "what is known of an asked tier is forgotten")
        elif last:
            yield from self.core.events.listing_ends(tier)
        if self.epoch == epoch:
            self.core.events.listed(tier, rows, last)

    def _look_up(self, name: str, prompt: Prompt) -> list[Key] | None:
        """One step's look-ups of a request: the hits that it is going to load, or None if it must wait."""
        hits: list[Key] = []
        put_off = False
        places = list(enumerate(prompt.chain))
        if prompt.scan in {Scan.CHAIN, Scan.HYBRID}:
            return self._scan(name, prompt)
        # Its first look-up is told whether any of these is missing.
        waits_for = prompt.chain if name in self._since else []
        for position, key in reversed(places) if prompt.scan is Scan.WINDOW else places:
            answer = look_up_key(self.core, key, name, None if prompt.scan is Scan.EACH else position, self.now)
            if answer is Lookup.PENDING:
                put_off = True
                self._check_wait(name, [key, *waits_for], prompt.scan is Scan.EACH)
                waits_for = []
            elif answer is Lookup.HIT:
                self._check_hits([key])
                hits.append(key)
            else:
                given_up = self.now > self._since.get(name, self.now) + self.limits.wait_s
                patient = prompt.scan is Scan.EACH and not given_up and name not in self._load_failed
                require(not (patient and self._yet_to_be_listed(key)), "a miss while a tier is about to list the key")
                first = patient and name not in self._since
                require(not (first and self._may_be_found(key)), "a get gives up a key that nobody was asked for")
                if prompt.scan is Scan.PREFIX:
                    break
        return None if put_off else hits

    def _scan(self, name: str, prompt: Prompt) -> list[Key] | None:
        """The same for a chain, of TOKENS tokens a chunk. The windowed group of a hybrid model has keys of its own."""
        groups = [Group(prompt.chain, TOKENS)]
        own = [WINDOWED + key for key in prompt.chain]
        if prompt.scan is Scan.HYBRID:
            groups.append(Group(own, TOKENS, WINDOW_CHUNKS))
        chain = Chain(tuple(groups))
        shares = inside.shares(self.core, name, chain)
        loads = any(prompt.chain[0] in job.keys for job in self.workers if not (job.store or job.stale))
        require(loads or not shares, "a request is kept back for a load that nobody makes")
        scan = self.core.look_up(name, chain, 0, self.now)
        chunks = scan.end // TOKENS
        hits = [] if scan.waits else prompt.chain[:chunks]
        waits = scan.waits
        run: list[Key] = []
        if prompt.scan is Scan.HYBRID and chunks:
            for place in reversed(range(chunks)):
                answer = look_up_key(self.core, own[place], name, TOKENS * (place + 1), self.now)
                waits |= answer is Lookup.PENDING
                run = [] if answer is Lookup.MISS else [own[place], *run]
                if len(run) == min(WINDOW_CHUNKS, chunks):
                    hits = hits[: place + len(run)]
                    break
            if not run:
                hits = []
        self._check_hits([*hits, *(() if waits else run)])
        if not waits:
            return [*hits, *run]
        if not shares:  # else it ends with that load, which has no deadline here
            self._check_wait(name, [*prompt.chain, *own])
        return None

    def _check_wait(self, name: str, keys: list[Key], each: bool = False) -> None:
        """The request waits for some of these, of `each` of which it is told."""
        since = self._since.setdefault(name, self.now)
        require(self.now <= since + self.limits.wait_s, "a request waits past its deadline")
        known = any(key in self.core.host.index for key in keys)
        known |= any(key in tier.index for tier in self.core.tiers for key in keys)
        known |= not self._queued_keys().isdisjoint(keys)
        known |= each and (self._listing() or self._is_asked(name))
        known |= self.core.events.unfinished
        asks = self.now <= since + self.limits.check_timeout_s + ROUNDING_S
        require(known or asks, "a request waits too long for a check")

    def _check_hits(self, keys: list[Key]) -> None:
        for key in keys:
            row = self.core.host.index[key].index
            require(self.region[row] == Content(key, self.epoch), f"a hit on {key!r} gives {self.region[row]}")

    def _listing(self) -> bool:
        return any(tier.state is TierState.LISTING for tier in self.core.tiers)

    def _is_asked(self, name: str) -> bool:
        """Whether checks are still to say something about what this request waits for."""
        request = inside.requests(self.core).by_name[name]
        return any(request in shared.askers for shared in self.core.checks.tiers.values())

    def _may_be_found(self, key: Key) -> bool:
        """Whether a tier that is asked, and is in time, might be found to hold a key that nobody knows of."""
        absent = self.limits.absent_s
        return key not in self.core.host.index and any(
            shared.tier.readable
            and not shared.slow
            and key not in shared.tier.index
            and self.now >= self.movers[self._first(number)].reported_absent.get(key, -absent) + absent
            for number, shared in self.core.checks.tiers.items()
        )

    def _yet_to_be_listed(self, key: Key) -> bool:
        """Whether a serving tier is still going to list `key`."""
        return any(
            key in {row[1] for row in (piece if isinstance(piece, list) else piece.rows)}
            for member, mover in zip(self.core.movers, self.movers, strict=True)
            if member.readable and member.state is TierState.LISTING
            for piece in (mover.listing if key not in self.core.tiers[member.tier].index else ())
        )

    def _run(self, name: str, prompt: Prompt) -> None:
        hits = self._look_up(name, prompt)
        if hits is None:
            self.waiting[name] = prompt
            self.tick()
            return
        if hits:
            for tier in range(len(self.movers)):
                self.deliver(tier)  # the supervisor's thread does not wait for the scheduler's step to end
            self.tick()
            rows = self.core.prepare_load(name, hits, self.now).rows
            self._since.pop(name, None)
            self._loaded(name)
            for row in rows:
                self._check_row(row, writing=False)
            self.workers.append(WorkerJob(False, hits, rows, self.epoch, name))
        self.core.end_step()
        own = [WINDOWED + key for key in prompt.chain] if prompt.scan is Scan.HYBRID else []
        plan = self.core.prepare_store(name, [key for key in [*prompt.chain, *own] if key not in hits])
        for row in plan.rows:
            self._check_row(row, writing=True)
            self.region[row] = GARBAGE
        if plan.keys:
            self.workers.append(WorkerJob(True, plan.keys, plan.rows, self.epoch, name))
        if prompt.stays:
            self.running[name] = prompt
        else:
            self._finish(name)
        self.tick()

    def _loaded(self, name: str) -> None:
        """What it lacks by now it may ask for anew."""
        for tier in range(len(self.movers)):
            self._lost.pop((name, tier), None)

    def _finish(self, name: str) -> None:
        self._since.pop(name, None)
        self._loaded(name)
        self.core.finish(name)

    def _check_probe(self, probe: ExistenceCheck) -> None:
        mover, limits = self.movers[self._first(probe.tier)], self.limits
        require(0 < len(probe.keys) <= limits.keys_per_check, "an existence check without bounds")
        known = [
            key for key in probe.keys if self.now < mover.reported_absent.get(key, -limits.absent_s) + limits.absent_s
        ]
        require(not known, "a key is checked again that was absent a moment ago")

    def _answer(self, mover: SimulatedMover, probe: ExistenceCheck, honest: bool) -> Answer:
        there = [(key in mover.here) is honest for key in probe.keys]
        if probe.chain:
            reach = there.index(False) if False in there else len(there)
            found, absent = probe.keys[:reach], probe.keys[reach : reach + 1]
        else:
            found = [key for key, is_there in zip(probe.keys, there, strict=True) if is_there]
            absent = [key for key in probe.keys if key not in found]
        ticks = [mover.ticks.get((mover.epoch, key), self._time) for key in found]
        return Answer(probe.id, mover.epoch, list(zip(found, ticks, strict=True)), absent)

    def _send(self, tier: int, message: Sent) -> None:
        require(self.movers[tier].physical or not isinstance(message, list), "an asked tier is told to delete")
        if not self.movers[tier].dying:
            self.movers[tier].inbox.append(message)

    def _open_moves(self) -> list[tuple[int, SimulatedJob]]:
        sent = [(number, each) for number, mover in enumerate(self.movers) for each in (*mover.inbox, *mover.finished)]
        return [(number, each) for number, each in sent if isinstance(each, SimulatedJob)]

    def _check_row(self, row: int, writing: bool, beside: tuple[int, int] | None = None) -> None:
        """Nothing else writes this row; and if it is to be written, nothing else reads it either."""
        for job in (*self.workers, *self.calls):
            if row in job.rows:
                require(not job.store and not writing, "a row is allocated while a worker or a call uses it")
        for tier, open_job in self._open_moves():
            if (tier, open_job.job.id) == beside:
                continue
            if row in open_job.rows[open_job.heard :]:
                reads = open_job.job.direction is Direction.STORE
                require(reads and not writing, "a row is allocated while a mover uses it")

    def _check_slots(self, sent: SimulatedJob) -> None:
        job, mover = sent.job, self.movers[sent.job.mover]
        if not mover.physical:
            return
        require(all(0 <= slot < mover.slots for slot in sent.slots), "a mover is sent a slot that it has not")
        for number, other in self._open_moves():
            if number == job.mover and other.job.id != job.id and other.epoch == self.epoch:
                shared = set(sent.slots) & set(other.slots[other.heard :])
                both_read = job.direction is other.job.direction is Direction.LOAD
                require(not shared or both_read, "a slot is allocated while a mover reads or writes it")

    def _move(self, mover: SimulatedMover, work: SimulatedJob, outcome: Outcome) -> None:
        number = len(work.done)
        move, row, slot = work.moves[number], work.rows[number], work.slots[number]
        medium = mover.medium.setdefault(work.epoch, {})
        place = mover.place(slot, move.key)
        if work.job.direction is Direction.STORE:
            content = self.region[row]
            require(move.key in self.allowed, "a row is written that is to stay in host memory")
            if outcome is Outcome.OK and not mover.physical and place in medium:
                outcome = Outcome.FOUND
            elif outcome is Outcome.OK:
                stale = work.epoch != self.epoch
                require(stale or content == Content(move.key, work.epoch), f"{content} is sealed as {move.key!r}")
                medium[place] = (move.key, content)
                mover.ticks[work.epoch, place] = move.tick if mover.physical else self._time
                if mover.physical:
                    earlier = stale or work.job.id <= mover.listed_after
                    require(earlier or move.tick >= mover.newest, "a row stored now is older than one that was listed")
            elif mover.physical and place in medium:
                # Torn, and the journal still has the old key; an object is put whole or not at all.
                medium[place] = (medium[place][0], GARBAGE)
        else:
            content = medium.get(place, (b"", GARBAGE))[1]
            if outcome is Outcome.OK and content != Content(move.key, work.epoch):
                outcome = Outcome.CORRUPT if place in medium else Outcome.MISSING
                if not mover.physical:
                    medium.pop(place, None)  # by its mover: nobody else is to load it
            self.region[row] = content if outcome is Outcome.OK else GARBAGE
        work.done.append(outcome)
