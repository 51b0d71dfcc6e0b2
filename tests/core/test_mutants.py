"""Mutation test of the state machine: by the steps in steps.toml each of these planted bugs violates an invariant."""

from __future__ import annotations

import secrets
import tomllib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.core import listing, manager
from nixl_tiers.core.copies import Copies, Judge
from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.health import Health
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.jobs import Jobs
from nixl_tiers.core.listing import Steps
from nixl_tiers.core.lookup import Chains
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.member import Member
from nixl_tiers.core.probes import Measurements
from nixl_tiers.core.promotion import Promotion, RequestIndex
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.requests import NO_WISHES, Request, RequestWishes
from nixl_tiers.core.retention import Retention
from nixl_tiers.core.rows import Row, RowState
from nixl_tiers.core.slots import MemberSlots, Slots
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.turn import Events
from nixl_tiers.core.types import Columns, Job, PlannedMove
from nixl_tiers.core.writeback import WriteBack
from tests.support.core import all_good
from tests.support.plain_rows import PlainTierRows
from tests.support.replay import FUZZ
from tests.support.simulation import SimulatedJob, SimulatedMover, Simulation
from tests.support.stateful import CascadeStateMachine, MemberStateMachine, TenantStateMachine
from tests.support.steps import take

pytestmark = pytest.mark.timeout(900)

STEPS: Final = tomllib.loads(Path(__file__).with_name("steps.toml").read_text())
FEW = settings(
    max_examples=12,  # a search that begins anew with another seed finds more than one that goes on
    stateful_step_count=80,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,  # the first violation is enough
    suppress_health_check=list(HealthCheck),
)


def search(machine: type[CascadeStateMachine]) -> None:
    """Raises what the first example that violates an invariant raises: with other seeds in each run."""
    first = secrets.randbits(31)
    for number in range(first, first + 400):
        run_state_machine_as_test(seed(number)(machine), settings=FEW)


def violation(machine: CascadeStateMachine, steps: str) -> str:
    """What these steps violate; empty: nothing."""
    try:
        take(machine, steps)
    except (AssertionError, KeyError) as error:
        return repr(error)
    return ""


class _OfTiers(TierManager):
    """Each tier is changed."""

    def __init__(self, *arguments, **named) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*arguments, **named)
        for tier in self.tiers:
            self.change(tier)


class BudgetOffByOne(Events):
    def opened(self, tier: int, slots: int) -> Steps:
        return super().opened(tier, slots + 1)


class RowReusedAfterReset(TierManager):
    """Rows of workers are free at once after a reset."""

    def reset(self, keep_tiers: bool, now: float = 0.0) -> None:
        for row in self.host.index.values():
            row.worker_refs = 0
        super().reset(keep_tiers, now)


class CallsRowsFlushed(Copies):
    """A call that ends after a reset releases the rows of all calls from before it, as workers' jobs do."""

    def end_call(self, name: str, judge: Judge) -> None:
        super().end_call(name, judge)
        for row in [row for rows in self._calls.values() for row in rows if row.invalidated]:
            row.call_refs = 0
            self._host.reclaim(row)


class CallEndsByKey(Copies):
    """A call from before a reset ends the rows that have the same keys after it."""

    def end_call(self, name: str, judge: Judge) -> None:
        rows = self._calls.get(name, [])
        rows[:] = [self._host.index.get(row.key, row) for row in rows]
        super().end_call(name, judge)


class InterruptedCallIsAHit(Copies):
    def end_call(self, name: str, judge: Judge) -> None:
        super().end_call(name, all_good)


class HostOnlyRowIsWritten(WriteBack):
    def write_through(self, rows: Sequence[Row], tiers: Iterable[Tier]) -> None:
        for row in rows:
            row.host_only = False
        super().write_through(rows, tiers)


class RowFreedWhileMoved(TierManager):
    def reset(self, keep_tiers: bool, now: float = 0.0) -> None:
        rows = list(self.host.index.values())
        super().reset(keep_tiers, now)
        for row in rows:
            if row.mover_refs and row.index >= 0:
                self.host._slots.release(row.index)
                row.index = -1


class _MovedRowsAreInOrder(PlainTierRows):
    def _may_go(self, row):  # type: ignore[no-untyped-def]
        return not row.evicting


class SlotFreedWhileWritten(_OfTiers):
    """A row that is still being read or written counts as evictable in its tier."""

    def change(self, tier: Tier) -> None:
        if tier.spec.physical_slots:
            tier.index.rows = _MovedRowsAreInOrder(100)


class _PinsIgnored(PlainTierRows):
    def pin(self, key: Key, /) -> tuple[int, int] | None:
        return None


class PinsIgnored(TierManager):
    """Rows of the host are evicted whatever uses them."""

    def __init__(self, *arguments, **named) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*arguments, **named)
        self.host.generation.table = _PinsIgnored(0)


class FailedLoadIsAHit(PromotionJobs):
    def load_ended(self, tier: Tier, move: PlannedMove, outcome: Outcome, now: float) -> None:
        super().load_ended(tier, move, Outcome.OK, now)


class FailedCopyIsAHit(Copies):
    def complete_store(self, keys: Iterable[Key], judge: Judge, dropped: Collection[Key] = ()) -> None:
        super().complete_store(keys, all_good, dropped)


class RequestNeverExpires(Promotion):
    def expire_if_due(self, request: Request, now: float) -> bool:
        return False


class DeadlineRearmedByARelease(Promotion):
    """A request that was released waits again with a new deadline."""

    def release(self, request: Request) -> None:
        super().release(request)
        request.deadline_s = None


class DeadlineRearmedByARetry(Chains):
    """A request whose promotion failed waits for the next tier with a new deadline."""

    def _scan(self, request, chain, start, first, now):  # type: ignore[no-untyped-def]
        if any(row.removed for row in request.pinned.values()):
            request.deadline_s = now + self._state.limits.wait_s
        return super()._scan(request, chain, start, first, now)


class DeadlineIgnoredForRowsBeingFilled(Promotion):
    def expire_if_due(self, request: Request, now: float) -> bool:
        filling = any(row.state is RowState.FILLING for row in self._state.host.index.values())
        return not filling and super().expire_if_due(request, now)


class DemotionWithoutBounds(WriteBack):
    """Demotions have no window of their own."""

    def plan_demotions(self, tier: Tier, now: float) -> list[Job]:
        self._state.demote_window = self._state.load_window = self._state.host.rows
        return super().plan_demotions(tier, now)


class DemotedRowStaysPinned(WriteBack):
    def _finish_demotion(self, tier: Tier, key: Key, written: bool) -> None:
        tier.staged.pop(key, None)
        super()._finish_demotion(tier, key, written)


class _KeepsDeadPins(Request):
    __slots__ = ()

    def pin(self, row: Row) -> None:
        if row.key not in self.pinned:
            super().pin(row)


class PinOfADeadRowStays(RequestIndex):
    """A request that has pinned a row which is invalid by now does not pin the one that took its place."""

    def get(self, name: str) -> Request:
        request = super().get(name)
        request.__class__ = _KeepsDeadPins
        return request


class BurstGoesOn(Jobs):
    """The rows of a load that has ended count as running beside others."""

    def leave_burst(self, job: Job) -> int:
        return 0


class EvictionsOfTheHostUncounted(Events):
    def plan(self, now: float) -> list:  # type: ignore[type-arg]
        self._state.host.counters.evictions = 0
        return super().plan(now)


class BadRowCountedTwice(PromotionJobs):
    """A row that a late load and then another one find corrupt is counted twice."""

    def load_ended(self, tier: Tier, move: PlannedMove, outcome: Outcome, now: float) -> None:
        before = tier.counters.corrupt
        super().load_ended(tier, move, outcome, now)
        tier.counters.corrupt = before + (outcome is Outcome.CORRUPT)


class VictimsOfBeforeAResetStay(TierManager):
    """What was to be written below before a reset is queued for nobody after it."""

    def reset(self, keep_tiers: bool, now: float = 0.0) -> None:
        for tier in self.tiers:
            tier.index.drop_victims = lambda: None  # type: ignore[method-assign]
        super().reset(keep_tiers, now)


class PinnedVictimStaysOne(HostTier):
    """A victim that is pinned when its write ends is never selected again."""

    def finish_eviction(self, row: Row) -> None:
        if self.is_evicting(row):
            self.evict(row)


class EngineHitIsWritten(Copies):
    """A request that may not write a row to storage tiers has it written by using the engine's own copy."""

    def used(self, name: str, keys: Sequence[Key]) -> None:
        super().used(name, keys)
        for key in keys:
            if (row := self._host.index.get(key)) is not None and row.host_only:
                self._writeback.allow(row)


class EngineHitsForgotten(Copies):
    """Of what the engine uses only the first chunk is noted."""

    def used(self, name: str, keys: Sequence[Key]) -> None:
        super().used(name, keys[:1])


class ResetUncounted(TierManager):
    def reset(self, keep_tiers: bool, now: float = 0.0) -> None:
        super().reset(keep_tiers, now)
        for tier in self.tiers:
            tier.counters.reset = 0


class PinForgotten(Copies):
    def complete_load(self, name: str, *arguments: float, **named: bool) -> None:
        for load in self._loads.get(name, ())[:1]:
            del load.rows[0], load.keys[0]
        super().complete_load(name, *arguments, **named)


class OldEpochSurvives(TierManager):
    def reset(self, keep_tiers: bool, now: float = 0.0) -> None:
        ready = {
            key: row for key, row in self.host.index.items() if row.state is RowState.READY and not row.worker_refs
        }
        super().reset(keep_tiers, now)
        for row in ready.values():
            if row.index < 0 and self.host.free:
                kept = self.host.insert(row.key, RowState.READY, 0)
                assert kept


class ListedRowHasTwoOwners(Events):
    """A row that is listed in a slot that is in use is added."""

    def columns_listed(self, tier: int, columns: Columns) -> Steps:
        index = self._state.tiers[tier].index
        if isinstance(index.slots, Slots):
            index.slots._map[:] = bytes(len(index.slots._map))
        return super().columns_listed(tier, columns)


class ListedSlotsStayFree(Events):
    """A slot that holds a listed row is allocated to another one."""

    def columns_listed(self, tier: int, columns: Columns) -> Steps:
        self._state.tiers[tier].index.slots.claimed = lambda count, end: None  # type: ignore[method-assign]
        return super().columns_listed(tier, columns)


class OverdueLivesOn(Health):
    """The hard deadline is off."""

    def overdue(self, now: float) -> dict[int, str]:
        return {}


class LateIsWaitedFor(Health):
    """The soft deadline is off."""

    def abandon_late_jobs(self, now: float) -> None:
        pass


class GenerationIgnored(Events):
    """A new mover's jobs have the same ids as those of the one before it."""

    def lost(self, tier: int, now: float) -> None:
        (lost,) = self._state.tiers[tier].members
        open_jobs = [*lost.jobs, *(job.id for dead in lost.dead for job in dead.to_end)]
        super().lost(tier, now)
        self._jobs.last_id = min(open_jobs, default=self._jobs.last_id + 1) - 1


class CircuitNeverCloses(Health):
    def _record(self, job: Job, good: bool, now: float) -> None:
        super()._record(job, good and job.probe_episode is None, now)


class ReusedBeforeReap(Events):
    """A killed mover is treated as reaped."""

    def killed(self, tier: int, now: float) -> None:
        super().killed(tier, now)
        super().lost(tier, now)


class ChecksAbsentKeysAgain(Events):
    def plan_checks(self, now: float) -> list:  # type: ignore[type-arg]
        for shared in self._checks.tiers.values():
            shared.absent.clear()
        return super().plan_checks(now)


class WaitsForLateChecks(TierManager):
    def look_up_keys(self, name, *arguments, **named):  # type: ignore[no-untyped-def]
        self._requests.get(name).check_deadline_s = float("inf")
        return super().look_up_keys(name, *arguments, **named)

    def look_up(self, name, *arguments, **named):  # type: ignore[no-untyped-def]
        self._requests.get(name).check_deadline_s = float("inf")
        return super().look_up(name, *arguments, **named)


class PriceForgetsDeadline(Chains):
    """A request whose wait is cheap waits for ever."""

    def scan(self, request, *arguments, **named):  # type: ignore[no-untyped-def]
        request.deadline_s = None
        return super().scan(request, *arguments, **named)


class WaitIsNotJudgedAgain(Chains):
    """A request that waits is not looked at again."""

    def _still_waits(self, request, start, now):  # type: ignore[no-untyped-def]
        return request.waiting


class HitsAreNotKept(Chains):
    """What is in host memory is not kept for the request that waits for the rest of its chain."""

    def _promote(self, request, decision, now):  # type: ignore[no-untyped-def]
        waits = super()._promote(request, decision, now)
        request.generation.unpin(request.pinned.values())
        request.pinned.clear()
        request._count()
        self._host._hits.clear()
        return waits


class FailedRowIsLoadedAtOnce(Health):
    """Nothing is set aside whose load has failed."""

    def _learn(self, tier, job, moves, outcomes, now):  # type: ignore[no-untyped-def]
        pass


class HitsOfAStepGo(HostTier):
    """Room is made of what this step has found."""

    def _order(self):  # type: ignore[no-untyped-def]
        return self.generation.table


class UnreadyIsAHit(Chains):
    """A chain's end is a hit though some of it is still being loaded."""

    def _apply(self, request, look, decision, limit, now):  # type: ignore[no-untyped-def]
        scan = super()._apply(request, look, decision, limit, now)
        return scan if scan.waits else scan._replace(end=look.chain.end)


class ChecksBadRowsAgain(PromotionJobs):
    def load_ended(self, tier, move, outcome, now):  # type: ignore[no-untyped-def]
        self._checks.mark_absent = lambda *_: None  # type: ignore[method-assign]
        super().load_ended(tier, move, outcome, now)


class KnownRowsAreSwept(Events):
    """What is known of an asked tier is forgotten when its mover is restarted, as it lists nothing."""

    def listing_ends(self, tier: int) -> Steps:
        return listing._sweep(*self._of(tier), self._state.tiers[tier].index.clears)


class GoneRowsStay(Events):
    """What others have deleted is promised to requests until it is loaded."""

    def gone_before(self, tier: int, tick: int) -> None:
        pass


class UsesMakeRowsYounger(_OfTiers):
    """The order in which an asked tier forgets rows is by their uses, of which its janitor knows nothing."""

    def change(self, tier: Tier) -> None:
        tier.index.touch = partial(_touched_late, tier)  # type: ignore[method-assign]


def _touched_late(tier: Tier, keys: Sequence[Key], tick: int) -> None:
    late = tier.spec.asked * 10**6
    tier.index.rows.touch_many([key for key in keys if not tier.index.rows.is_evicting(key)], late + tick)


class AskedTierIsToldToDelete(_OfTiers):
    """What leaves the index of an asked tier is deleted, though others may use it."""

    def change(self, tier: Tier) -> None:
        tier.index.queue_delete = partial(_queued, tier)  # type: ignore[method-assign]


def _queued(tier: Tier, slot: int, key: Key) -> None:
    tier.members[0].to_delete.append((slot, key))


class BehindAMissingRowIsLoaded(PromotionJobs):
    """A request whose chain has lost a row goes on loading what is behind it."""

    def _lose(self, tier: Tier, row: Row) -> None:
        pass


class ChecksAheadTakeAllRoom(ExistenceChecks):
    """Checks that nobody waits for leave none to requests."""

    def __init__(self, tiers, limits) -> None:  # type: ignore[no-untyped-def]
        super().__init__(tiers, limits)
        for shared in self.tiers.values():
            shared.has_room = partial(_has_room, shared.has_room)  # type: ignore[method-assign]


def _has_room(has_room, now, *, ahead=False):  # type: ignore[no-untyped-def]
    return has_room(now)


class GetsGiveUpWhenChecksAreMany(ExistenceChecks):
    def _worth(self, shared, key, request, now):  # type: ignore[no-untyped-def]
        return super()._worth(shared, key, request, now) and (shared.has_room(now) or key in shared.open)


class LaterIsNever(ExistenceChecks):
    """What was unknown while a medium was slow is never asked for."""

    def plan(self, now):  # type: ignore[no-untyped-def]
        later = {number: shared.later for number, shared in self.tiers.items()}
        for shared in self.tiers.values():
            shared.later = OrderedDict()
        planned = super().plan(now)
        for number, shared in self.tiers.items():
            later[number].update(shared.later)
            shared.later = later[number]
        return planned


class LaterWithoutBounds(ExistenceChecks):
    def should_wait(self, key, request, now):  # type: ignore[no-untyped-def]
        for shared in self.tiers.values():
            shared.ask_later = shared.later.setdefault  # type: ignore[method-assign,assignment]
        return super().should_wait(key, request, now)


class ChecksWithoutBounds(Events):
    def plan_checks(self, now: float) -> list:  # type: ignore[type-arg]
        for shared in self._checks.tiers.values():
            shared.has_room = lambda now, ahead=False: True  # type: ignore[method-assign,misc]
        return super().plan_checks(now)


class CreditsIgnored(Events):
    """A mover without send credits gets jobs."""

    def plan(self, now: float) -> list:  # type: ignore[type-arg]
        full = [tier for tier in self._state.tiers if not tier.send_credits]
        for tier in full:
            tier.members[0].send_credits = 100
        jobs = super().plan(now)
        for tier in full:
            tier.members[0].send_credits -= 100
        return jobs


class _SparesNothing(Member):
    @property
    def store_credits(self) -> int:
        return self.send_credits


class StoresOvertakeDeletes(TierManager):
    """Stores take the room that deletes need, which are to be sent before them."""

    def __init__(self, *arguments, **named) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*arguments, **named)
        for member in self.movers:
            member.__class__ = _SparesNothing


class MembersShareAState(_OfTiers):
    """What a member holds that cannot be read is loaded, as long as others can be read."""

    def change(self, tier: Tier) -> None:
        tier.index.can_read_many = lambda keys, rows=tier.index.rows: rows.has_many(keys, True)  # type: ignore[method-assign]


class StoresToAnyMember(_OfTiers):
    """A row is stored to the next member, whatever it takes."""

    def change(self, tier: Tier) -> None:
        if isinstance(slots := tier.index.slots, MemberSlots):
            slots.allocate_in = lambda rooms, take=slots.allocate_in: take([9] * len(rooms))  # type: ignore[method-assign]


class MembersDieTogether(Events):
    """What another member moves is taken for moves of the dead one."""

    def lost(self, mover: int, now: float) -> None:
        for other in self._of(mover)[0].members:
            super().lost(other.number, now)


class ListingOfOneMemberEndsAll(Events):
    """The end of a member's listing sweeps the others' rows too."""

    def listing_ends(self, mover: int) -> Steps:
        tier, _ = self._of(mover)
        for member in tier.members:
            yield from listing._sweep(tier, member, tier.index.clears)


class MissesWhileListing(TierManager):
    def arrive(self, name: str, wishes: RequestWishes = NO_WISHES) -> None:
        super().arrive(name, wishes._replace(patient=False))


class StoredOlderThanListed(WriteBack):
    """A row of a request that began before the listing ended is stored with the request's tick."""

    def start_stores(self, tier: Tier, rows: Sequence[tuple[Row, int]], rooms: list[int] | None) -> list[PlannedMove]:
        tier.index.newest_listed = 0
        return super().start_stores(tier, rows, rooms)


class StoresBesidePromotions(Events):
    """Stores do not keep out of the way of promotions."""

    def plan(self, now: float) -> list:  # type: ignore[type-arg]
        self._writeback.throttle.begin = lambda promoting, now: None  # type: ignore[method-assign]
        return super().plan(now)


class RunningPromotionsUncounted(PromotionJobs):
    """Stores keep out of the way of promotions that are queued, and not of those that run."""

    @property
    def under_way(self) -> bool:
        return any(tier.to_load for tier in self._state.tiers)


class MeasuresBesideRequests(Measurements):
    """As soon as something is declined, whether requests are alive or not."""

    def plan(self, tier: Tier, now: float) -> list[Job]:
        plan = self._plans[tier.number]
        plan.declined_s = min(plan.declined_s, now - self._state.limits.measure_busy_s)
        return super().plan(tier, now)


class MeasuresBesideLoads(Measurements):
    """While the tier loads for requests."""

    def plan(self, tier: Tier, now: float) -> list[Job]:
        (queue, tier.to_load), (loading, tier.rows_loading) = (tier.to_load, OrderedDict()), (tier.rows_loading, 0)
        try:
            return super().plan(tier, now)
        finally:
            tier.to_load = queue
            tier.rows_loading += loading


class MeasuresLongAfter(Measurements):
    """With what was declined however long ago."""

    def plan(self, tier: Tier, now: float) -> list[Job]:
        plan = self._plans[tier.number]
        plan.declined_s = max(plan.declined_s, now - self._state.limits.measure_s)
        return super().plan(tier, now)


class MeasurementEvictsUnwritten(PromotionJobs):
    def _make_room_unasked(self, count: int) -> int:
        return self._state.make_room(count)


class MeasuresIntoRowsInUse(PromotionJobs):
    """What the host has is loaded over it, and not into a row that no look-up finds."""

    def load_unasked(self, tier: Tier, keys: Sequence[Key], now: float) -> list[Job]:
        jobs = super().load_unasked(tier, keys, now)
        for move in (move for job in jobs for move in job.moves):
            if move.row.removed:
                move.row.index = self._host.index[move.key].index
        return jobs


class MeasuredRowCountsAsUnderWay(PromotionJobs):
    """A load that no request waited for holds up stores for ever."""

    def load_ended(self, tier: Tier, move: PlannedMove, outcome: Outcome, now: float) -> None:
        unasked = self._loading_for.get(move.row.order) == []
        super().load_ended(tier, move, outcome, now)
        if unasked:
            self._loading_for[move.row.order] = []


class MeasurementWithoutRoomIsWorkLeft(PromotionJobs):
    def load_unasked(self, tier: Tier, keys: Sequence[Key], now: float) -> list[Job]:
        return super().load_unasked(tier, keys, now) if self._state.take(self._state.limits.rows_per_slice) else []


class RetainsBeyondItsShare(Retention):
    @property
    def _most(self) -> int:
        return 100


class RetentionEndsEarly(Retention):
    def work(self, now: float) -> None:
        super().work(now + 2)


class PromotionsIgnoreQuotas(PromotionJobs):
    def _within_quotas(self, wanted: dict[Key, list[Request]]) -> dict[Key, list[Request]]:
        return wanted


class TiersIgnoreQuotas(WriteBack):
    def _within_quotas(self, tier: Tier, rows: Sequence[tuple[Row, int]]) -> list[tuple[Row, int]]:
        return list(rows)


OF_TENANTS: Final = (PromotionsIgnoreQuotas, TiersIgnoreQuotas)
OF_MEMBERS: Final = (MembersShareAState, StoresToAnyMember, MembersDieTogether, ListingOfOneMemberEndsAll)
_HERE: Final = [each for each in vars().copy().values() if isinstance(each, type) and each.__module__ == __name__]
MUTANTS: Final = [each for each in _HERE if not each.__name__.startswith("_")]


def machine_for(mutant: type) -> type[CascadeStateMachine]:
    members: dict[str, object] = {"core": mutant} if issubclass(mutant, TierManager) else {}
    base = TenantStateMachine if mutant in OF_TENANTS else CascadeStateMachine
    return type("Machine", (MemberStateMachine if mutant in OF_MEMBERS else base,), members)


def original_of(mutant: type) -> type:
    """The part of the core that a mutant replaces: TierManager, or one of those that it is made of."""
    (original,) = mutant.__bases__
    return original


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_planted_bug_in_the_core_is_caught(mutant: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the steps that have shown it once. `python tests/fuzz.py tests/core/test_mutants.py` searches for others."""
    if not issubclass(mutant, TierManager):
        monkeypatch.setattr(manager, original_of(mutant).__name__, mutant)
    machine = machine_for(mutant)
    late = "past its deadline" if "Deadline" in mutant.__name__ else ""
    if FUZZ:
        with pytest.raises((AssertionError, KeyError), match=late):
            search(machine)
    else:
        found = violation(machine(), STEPS["mutants"][mutant.__name__])
        assert found, "it violates nothing any more"
        assert late in found


def test_mover_that_skips_the_seal_check_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(self: Simulation, mover: SimulatedMover, work: SimulatedJob, outcome: Outcome) -> None:
        honest(self, mover, work, outcome)
        if work.done[-1] is Outcome.CORRUPT:
            work.done[-1] = Outcome.OK

    honest = Simulation._move
    monkeypatch.setattr(Simulation, "_move", unchecked)
    assert "gives" in violation(CascadeStateMachine(), "begin; traffic_hits_corrupt_row 1")


@pytest.mark.parametrize("bug", [*STEPS["mutants"], *STEPS["texts"]])
def test_steps_that_show_a_planted_bug_violate_nothing_without_it(bug: str) -> None:
    assert violation(CascadeStateMachine(), {**STEPS["mutants"], **STEPS["texts"]}[bug]) == ""
