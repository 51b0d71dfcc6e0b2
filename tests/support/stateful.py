"""A hypothesis state machine over a simulated TierManager: every event may follow every other."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core import rows as table
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.member import UNLIMITED
from nixl_tiers.core.rows import MAX_VICTIMS
from tests.support.simulation import MANY_TURNS, RETAINED_S, SOME_ROOM, Scan, Simulation

TIERS = st.integers(0, 1)
PICK = st.integers(0, 31)
# Prompts share prefixes, as prompts do: chunk n of a prompt is named by all of the prompt up to it.
PROMPTS = st.text(alphabet="ab", min_size=1, max_size=5)
WRITES = [(Write.THROUGH, Write.THROUGH), (Write.THROUGH, Write.ON_EVICT), (Write.ON_EVICT, Write.ON_EVICT)]
# Of a host of two rows one is free, or about to be; and a tier of one slot is full while anything is stored there.
ROWS = [6, 6, 6, 2, 3, 4, 12]
SLOTS = [(6, 12), (6, 12), (1, 12), (2, 2), (6, 1)]
QUOTAS = [(), (), (0.5,), (0.34, 0.7)]
SCANS = st.sampled_from([Scan.CHAIN, Scan.CHAIN, Scan.CHAIN, Scan.HYBRID, Scan.PREFIX, Scan.WINDOW, Scan.EACH])
RARELY = st.sampled_from([False, False, False, False, True])
OUTCOMES = st.sampled_from([Outcome.OK, Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.NO_SPACE])

BEGIN: dict[str, Any] = {
    "writes": st.sampled_from(WRITES),
    "listed": st.sampled_from([None, 0, 2]),
    "victims": st.sampled_from([MAX_VICTIMS, 1, 2]),
    "tokens_per_s": st.sampled_from([None, None, 5.0, 100.0]),
    "rows": st.sampled_from(ROWS),
    "slots": st.sampled_from(SLOTS),
}


def chain_of(prompt: str) -> list[Key]:
    return [prompt[: end + 1].encode() for end in range(len(prompt))]


def picked(names: Collection[str], pick: int) -> list[str]:
    """One of them, if there is any."""
    return [sorted(names)[pick % len(names)]] if names else []


class CascadeStateMachine(RuleBasedStateMachine):
    """Subclass and set `core` to test another TierManager (a planted bug, say), `simulated` to note what happens."""

    core: type[TierManager] = TierManager
    simulated: type[Simulation] = Simulation
    simulation: Simulation
    _turns = 0

    @initialize(**BEGIN)
    def begin(
        self,
        writes: tuple[Write, Write],
        listed: int | None,
        victims: int,
        tokens_per_s: float | None = None,
        *,
        rows: int = 6,
        slots: tuple[int, int] = (6, 12),
        quotas: tuple[float, ...] = (),
        members: int = 1,
    ) -> None:
        """`victims`: so many rows of a table are being evicted at a time."""
        table.MAX_VICTIMS = victims  # type: ignore[misc]
        self.simulation = self.simulated(
            rows,
            slots,
            core=self.core,
            writes=writes,
            listed=listed,
            tokens_per_s=tokens_per_s,
            quotas=quotas,
            members=members,
        )

    @rule(prompt=PROMPTS, scan=SCANS, stays=RARELY, host_only=RARELY)
    def request(self, prompt: str, scan: Scan = Scan.CHAIN, stays: bool = False, host_only: bool = False) -> None:
        self.simulation.request(chain_of(prompt), scan, stays=stays, host_only=host_only)

    @rule(prompt=PROMPTS, stays=RARELY)
    def request_of_low_priority(self, prompt: str, stays: bool) -> None:
        self.simulation.request(chain_of(prompt), stays=stays, low=True)

    @rule(prompt=PROMPTS, own=st.integers(1, 5), host_only=RARELY)
    def engine_has_the_beginning(self, prompt: str, own: int, host_only: bool) -> None:
        """Where `host_only`, another such request has stored it."""
        if host_only:
            self.traffic([prompt], host_only=True)
        self.simulation.engine_uses(chain_of(prompt), own, host_only=host_only)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3), ranks=st.lists(st.integers(0, 2), min_size=3, max_size=3))
    def arrive(self, prompts: list[str], ranks: list[int]) -> None:
        """Requests whose turn comes later."""
        for prompt, rank in zip(prompts, ranks, strict=False):
            self.simulation.queue(chain_of(prompt), rank)

    @rule(pick=PICK, abort=RARELY)
    def turn_comes(self, pick: int, abort: bool) -> None:
        for name in picked(self.simulation.queued, pick):
            if abort:
                self.simulation.abort(name)
            else:
                self.simulation.turn(name)

    @rule(prompt=PROMPTS)
    def prefetch(self, prompt: str) -> None:
        self.simulation.prefetch(chain_of(prompt))

    @rule(prompt=PROMPTS, after_s=st.sampled_from([0.5, 3.0, RETAINED_S]))
    def prefetch_later(self, prompt: str, after_s: float) -> None:
        self.simulation.prefetch(chain_of(prompt), after_s)

    @rule(prompt=PROMPTS, ttl_s=st.sampled_from([0.5, 3.0, RETAINED_S]))
    def retain(self, prompt: str, ttl_s: float) -> None:
        self.simulation.retain(chain_of(prompt), ttl_s)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4))
    def traffic(self, prompts: list[str], host_only: bool = False) -> None:
        """Requests that run to their end, on media that keep up: fills the tiers."""
        for prompt in prompts:
            self.request(prompt, host_only=host_only)
            self.catch_up()
            self._all_come_back()
            self.catch_up()

    @rule()
    def catch_up(self) -> None:
        while self.simulation.workers:
            self.simulation.worker_finishes(0)
        while self.simulation.calls:
            self.simulation.call_ends(0)
        for _ in range(8):
            for tier in range(len(self.simulation.movers)):
                self.simulation.mover_works(tier)
                self.simulation.deliver(tier)

    @rule(pick=PICK, abort=st.booleans())
    def come_back(self, pick: int, abort: bool) -> None:
        for name in picked(self.simulation.waiting, pick):
            if abort and pick % 4 == 0:
                self.simulation.abort(name)
            else:
                self.simulation.again(name)

    @rule(pick=PICK, abort=RARELY)
    def running_request_is_preempted(self, pick: int, abort: bool) -> None:
        for name in picked(self.simulation.running, pick):
            if abort:
                self.simulation.abort(name)
            else:
                self.simulation.preempt(name)

    @rule(pick=PICK, good=st.sampled_from([True, True, True, False]))
    def worker_finishes(self, pick: int, good: bool) -> None:
        if self.simulation.workers:
            self.simulation.worker_finishes(pick % len(self.simulation.workers), good)

    @rule(prompt=PROMPTS, store=st.booleans())
    def call(self, prompt: str, store: bool) -> None:
        """A thread without an engine begins to put or get the chunks of a prompt."""
        (self.simulation.put if store else self.simulation.get)(chain_of(prompt))

    @rule(pick=PICK, good=st.sampled_from([True, True, True, False]))
    def call_ends(self, pick: int, good: bool) -> None:
        if self.simulation.calls:
            self.simulation.call_ends(pick % len(self.simulation.calls), good)

    @rule(pick=PICK)
    def call_comes_back(self, pick: int) -> None:
        for name in picked(self.simulation.getting, pick):
            self.simulation.get_again(name)

    @rule(
        before=st.lists(PROMPTS, min_size=1, max_size=2),
        after=st.lists(PROMPTS, min_size=1, max_size=2),
        ends=PICK,
        good=st.sampled_from([True, True, True, False]),
    )
    def reset_among_calls(self, before: list[str], after: list[str], ends: int, good: bool) -> None:
        """Calls from before a reset end among later ones, in any order."""
        for prompt in before:
            self.call(prompt, store=True)
        self.simulation.reset()
        for prompt in after:
            self.call(prompt, store=True)
        for _ in range(len(after)):
            self.simulation.call_ends(ends % len(self.simulation.calls), good)
        for prompt in after:
            self.call(prompt, store=False)

    @rule(tier=TIERS, outcome=OUTCOMES, steps=st.integers(1, 4))
    def mover_works(self, tier: int, outcome: Outcome, steps: int) -> None:
        mover = self._mover(tier)
        for _ in range(steps):
            self.simulation.mover_works(mover, outcome)

    @rule(tier=TIERS, outcome=OUTCOMES, steps=st.integers(1, 3), delivered=st.booleans())
    def mover_reports(self, tier: int, outcome: Outcome, steps: int, delivered: bool) -> None:
        """Some rows of a job that goes on."""
        self.mover_works(tier, outcome, steps)
        mover = self._mover(tier)
        self.simulation.mover_reports(mover)
        if delivered:
            self.simulation.deliver(mover)

    @rule(prompt=PROMPTS, chunks=st.integers(1, 5), stale=RARELY)
    def another_engine_stores(self, prompt: str, chunks: int, stale: bool) -> None:
        """The front of a prompt, or, where `stale`, only its last chunk: the chain has a hole."""
        chain = chain_of(prompt)
        self.simulation.other_stores(chain[-1:] if stale else chain[:chunks])

    @rule(tier=TIERS, count=st.integers(1, 4), told=st.booleans())
    def others_delete(self, tier: int, count: int, told: bool) -> None:
        """Of a medium that engines share, what was written first."""
        mover = self._mover(tier)
        self.simulation.others_delete(mover, count)
        if told:
            self.simulation.heartbeat(mover)

    @rule(prompt=PROMPTS, count=st.integers(1, 4), wait_s=st.sampled_from([0.1, 1.0, 9.0]), told=st.booleans())
    def chain_vanishes(self, prompt: str, count: int, wait_s: float, told: bool) -> None:
        """Another engine's chain is found, and others delete its beginning before it is loaded."""
        self.simulation.other_stores(chain_of(prompt))
        self.request(prompt)
        for mover in range(len(self.simulation.movers)):
            self.simulation.mover_works(mover)
            self.simulation.deliver(mover)
        self._all_come_back()
        self.simulation.advance(wait_s)
        for tier in range(len(self.simulation.core.tiers)):
            self.others_delete(tier, count, told)

    @rule(room=st.sampled_from([0, 1, SOME_ROOM, UNLIMITED]))
    def movers_read(self, room: int) -> None:
        """Movers take so many messages a turn from now on (back-pressure)."""
        self.simulation.room = room

    @rule(turns=st.sampled_from([1, 2, MANY_TURNS]))
    def supervisor_turns(self, turns: int) -> None:
        """So many slices of work are done from now on before another event comes."""
        self.simulation.turns = turns

    @rule(tier=TIERS)
    def deliver(self, tier: int) -> None:
        self.simulation.deliver(self._mover(tier))

    @rule()
    def end_step(self) -> None:
        self.simulation.end_step()

    @rule(seconds=st.sampled_from([0.1, 0.4, 1.0, 6.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.simulation.advance(seconds)

    @rule(tier=TIERS, really=RARELY)
    def mover_dies(self, tier: int, really: bool) -> None:
        if really:
            self.simulation.kill(self._mover(tier))

    @rule(tier=TIERS, really=RARELY)
    def mover_hangs(self, tier: int, really: bool) -> None:
        if really:
            self.simulation.hang(self._mover(tier))

    @rule(
        tier=TIERS,
        prompts=st.lists(PROMPTS, min_size=1, max_size=2),
        seconds=st.sampled_from([1.0, 6.0, 12.0]),
        rots=RARELY,
    )
    def medium_stalls(self, tier: int, prompts: list[str], seconds: float, rots: bool) -> None:
        """Its jobs do not end for a while, and then perhaps they do."""
        mover = self._mover(tier)
        self.simulation.hang(mover)
        if rots:
            self.simulation.rot_all(mover)
        for prompt in prompts:
            self.request(prompt)
        self.simulation.advance(seconds)
        self._all_come_back()
        self.simulation.heal(mover)

    @rule(tier=TIERS, really=RARELY, steps=st.integers(0, 2))
    def mover_is_killed(self, tier: int, really: bool, steps: int) -> None:
        mover = self._mover(tier)
        if really:
            self.simulation.send_kill(mover)
            for _ in range(steps):
                self.simulation.mover_works(mover)

    @rule(tier=TIERS)
    def mover_is_reaped(self, tier: int) -> None:
        self.simulation.reap(self._mover(tier))

    @rule(tier=TIERS)
    def dead_mover_reports(self, tier: int) -> None:
        self.simulation.deliver_stale_result(self._mover(tier))

    @rule(tier=TIERS, before=PROMPTS, after=PROMPTS, steps=st.integers(1, 3))
    def work_of_dead_mover_arrives(self, tier: int, before: str, after: str, steps: int) -> None:
        """A killed mover's result arrives when the next one is running."""
        mover = self._mover(tier)
        for prompt in (before, after):
            self.request(prompt)
            while self.simulation.workers:
                self.simulation.worker_finishes(0)
            if prompt is before:
                for _ in range(steps):
                    self.simulation.mover_works(mover)
                self.simulation.send_kill(mover)
                self.simulation.reap(mover)
        self.simulation.deliver_stale_result(mover)

    @rule(tier=TIERS, really=RARELY)
    def medium_fails(self, tier: int, really: bool) -> None:
        if really:
            self.simulation.fail(self._mover(tier))

    @rule(tier=TIERS)
    def medium_heals(self, tier: int) -> None:
        self.simulation.heal(self._mover(tier))

    @rule(tier=TIERS, prompt=PROMPTS)
    def traffic_hits_corrupt_row(self, tier: int, prompt: str) -> None:
        """A corrupt row, of another engine too, fails its promotion and is requested again."""
        mover = self._mover(tier)
        self.another_engine_stores(prompt, len(prompt), stale=False)
        self.simulation.rot_all(mover)
        self.request(prompt)
        self.catch_up()
        self._all_come_back()
        self.request(prompt)

    @rule(
        tier=TIERS,
        row_s=st.sampled_from([4.0, 8.0]),
        keys=st.integers(1, 3),
        ends=st.sampled_from(["aborted", "finished", "lives"]),
        beside=RARELY,
        wait_s=st.sampled_from([0.4, 1.5, 1.5, 6.0]),
    )
    def slow_tier_is_declined(
        self, tier: int, row_s: float, keys: int, *, ends: str, beside: bool, wait_s: float
    ) -> None:
        """A request computes what a tier holds that has become slow, which is measured when it disturbs least; `beside`
        another request, perhaps, which is not priced and waits for the tier."""
        self.simulation.slow_down(tier, row_s)
        if held := self.simulation.held_below(tier)[:keys]:
            if ends == "aborted":
                self.simulation.look_up_in_vain(held)
            else:
                self.simulation.request(held, Scan.CHAIN, stays=ends == "lives")
            self.catch_up()
            if ends != "lives":
                self.simulation.abort_all()
            if beside:
                self.simulation.request(self.simulation.held_below(tier)[-1:] or held, Scan.PREFIX)
            self.simulation.advance(wait_s)

    @rule(tier=TIERS, pick=PICK)
    def medium_rots(self, tier: int, pick: int) -> None:
        self.simulation.rot(self._mover(tier), pick)

    @rule(really=RARELY, keep=st.booleans())
    def reset(self, really: bool, keep: bool) -> None:
        if really:
            self.simulation.reset(keep=keep)

    @rule(really=RARELY)
    def engine_crashes(self, really: bool) -> None:
        if really:
            self.simulation.crash()

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=2), really=RARELY)
    def engine_comes_back(self, prompts: list[str], really: bool) -> None:
        """Calls that ask for rows while the tiers that hold them are still being listed."""
        if really:
            self.traffic(prompts)
            self.simulation.crash()
            for prompt in prompts:
                self.call(prompt, store=False)

    def _all_come_back(self) -> None:
        for name in sorted(self.simulation.waiting):
            self.simulation.again(name)

    def _mover(self, tier: int) -> int:
        """One of the tier's, each in its turn."""
        members = self.simulation.core.tiers[tier].members
        self._turns += 1
        return members[self._turns % len(members)].number

    def check_invariants(self, *_: object) -> None:
        """As an @invariant, but not in the steps of a failing example, which it would double."""
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        try:
            # After a violation others follow from it, which would be reported in its place.
            if hasattr(self, "simulation") and sys.exc_info()[0] is None:
                self.simulation.quiesce()
        finally:
            table.MAX_VICTIMS = MAX_VICTIMS  # type: ignore[misc]


class TenantStateMachine(CascadeStateMachine):
    """The same with tenants that have quotas, half of the time. Planted bugs that have nothing to do with these are
    sought without."""

    @initialize(**BEGIN, quotas=st.sampled_from(QUOTAS))
    def begin(self, *given: Any, **named: Any) -> None:
        super().begin(*given, **named)


class MemberStateMachine(CascadeStateMachine):
    """The same where the first tier has several movers."""

    @initialize(**{**BEGIN, "slots": st.sampled_from([(6, 12), (8, 12), (3, 12), (4, 1)])}, members=st.integers(2, 3))
    def begin(self, *given: Any, **named: Any) -> None:
        super().begin(*given, **named)
