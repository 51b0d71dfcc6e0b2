"""A router that follows what is announced knows where every chunk is, whatever happens to the tiers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.announced import KEYS_A_HOLD, Announced, What
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.rows import RowState
from nixl_tiers.core.types import TierSpec, TierState
from tests.support.core import opened, put
from tests.support.replay import examples
from tests.support.simulation import Prompt, Simulation, require
from tests.support.stateful import ROWS, SLOTS, WRITES, CascadeStateMachine

pytestmark = pytest.mark.timeout(900)
MANY = 1 << 20
STORED, REMOVED, PASSED = What.STORED, What.REMOVED, What.PASSED


class Router:
    """What a router, and before it vLLM, makes of the changes. `known`: chunks whose tokens vLLM has since a request
    found or stored them, and the tiers that must lose them before it forgets: host memory, and those told of."""

    def __init__(self) -> None:
        self.tiers: dict[Key, set[int | None]] = {}
        self.known: dict[Key, set[int | None]] = {}

    def follow(self, announced: Announced) -> None:
        while announced.due:
            lost = []
            for what, tier, keys in announced.take():
                require(bool(keys), "a change of nothing")
                for key in keys:
                    require(key in self.known, f"{key!r} is told of, and nobody knows what it is")
                    told, removed = self.tiers.setdefault(key, set()), what is not What.STORED
                    if what is not What.PASSED:
                        require((tier in told) == removed, f"{key!r} is told twice to be in {tier}, or to have left it")
                        told ^= {tier}
                    if removed:
                        self.known[key].discard(tier)
                        lost.append(key)
                    else:
                        self.known[key].add(tier)
            for key in lost:
                if not self.known.get(key, True):
                    del self.known[key], self.tiers[key]

    def check(self, core: TierManager, now: float, *, all_known: bool) -> None:
        require(all(told == self.tiers.get(key) for key, told in self.known.items()), "tokens are kept for ever")
        for key in {*self.known, *self.tiers}:
            row = core.host.index.get(key)
            here = {tier.number for tier in core.tiers if tier.index.rows.is_stored(key)}
            there: set[int | None] = {*here, *([None] if row is not None and row.state is RowState.READY else [])}
            told = self.tiers.get(key, set())
            require(told <= there, f"{key!r} is told to be in {told}, and is in {there}")
            unlisted = {tier.number for tier in core.tiers if tier.state is not TierState.UP}  # told once all is listed
            if all_known:
                require(there - told <= unlisted, f"{key!r} is told to be in {told} only, and is in {there}")
            if all_known and told == there:
                readable = [tier for tier in core.tiers if tier.number in told and tier.can_load(key)]
                first = "cpu" if None in told else next((tier.spec.name for tier in readable), None)
                require(core.where([key])[0] == first, f"{key!r} is located in another tier than {first}")


class FollowedSimulation(Simulation):
    """One that a router follows."""

    most_stored = MANY
    always = False  # it takes what there is after every turn
    router: Router
    announced: Announced

    def tick(self) -> None:
        super().tick()
        if self.always:
            self.publish()

    def publish(self) -> None:
        self.router.follow(self.announced)
        self.router.check(self.core, self.now, all_known=self.most_stored == MANY)
        stored = sum(bool(tiers - {None}) for tiers in self.router.tiers.values())
        require(stored <= self.most_stored, f"{stored} keys are told to be in storage")

    def _start(self) -> TierManager:
        core = super()._start()
        self.router, self.announced = Router(), core.announce(self.most_stored)
        note = self.announced.seen

        def seen(key: Key) -> None:
            if key in self.core.host.index:
                self.router.known.setdefault(key, set()).add(None)
                note(key)

        self.announced.seen = seen  # type: ignore[method-assign]
        return core

    def _look_up(self, name: str, prompt: Prompt) -> list[Key] | None:
        found = super()._look_up(name, prompt)
        for key in found or ():
            self.announced.seen(key)
        return found

    def reset(self, *, keep: bool = False) -> None:
        """As NixlTiersConnector does it: vLLM forgets all chunks at the end."""
        self.announced.reset()
        self.router.follow(self.announced)
        require(not self.router.tiers, "a reset leaves something")
        super().reset(keep=keep)
        require(not self.announced.due, "a reset is told twice")
        self.router.known.clear()


class OfFewKeys(FollowedSimulation):
    most_stored = 2


class FollowedStateMachine(CascadeStateMachine):
    simulated = FollowedSimulation
    simulation: FollowedSimulation

    @initialize(
        writes=st.sampled_from(WRITES),
        listed=st.sampled_from([None, 0, 2]),
        rows=st.sampled_from(ROWS),
        slots=st.sampled_from(SLOTS),
        few=st.booleans(),
        always=st.booleans(),
    )
    def begin(  # type: ignore[override]
        self,
        writes: tuple[Write, Write],
        listed: int | None,
        *,
        rows: int = 6,
        slots: tuple[int, int] = (6, 12),
        few: bool = False,
        always: bool = True,
    ) -> None:
        self.simulated = OfFewKeys if few else FollowedSimulation
        super().begin(writes, listed, 2, rows=rows, slots=slots)
        self.simulation.always = always

    @rule()
    def publish(self) -> None:
        """The engine's step ends."""
        self.simulation.publish()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.publish()
        super().teardown()
        if hasattr(self, "simulation"):
            self.simulation.publish()


TestFollowed = FollowedStateMachine.TestCase
TestFollowed.settings = settings(
    max_examples=examples(60), stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)


# --- one at a time -------------------------------------------------------------------------------------------------


class Followed:
    """A core with a file tier and one that is asked, and what it tells."""

    def __init__(self, rows: int = 4, most_stored: int = MANY) -> None:
        specs = [
            TierSpec("file", Write.THROUGH, physical_slots=True),
            TierSpec("s3", Write.THROUGH, physical_slots=False, asked=True),
        ]
        self.core = TierManager(rows, 4096, specs)
        self.announced = self.core.announce(most_stored)
        for tier in range(len(specs)):
            opened(self.core, tier, 100)
            self.list(tier, [], last=True)

    def list(self, tier: int, rows: Sequence[tuple[int, Key, int]], *, last: bool = False) -> None:
        self.core.events.listed(tier, rows, last)

    def told(self) -> list[tuple[What, int | None, list[Key]]]:
        return [tuple(change) for change in self.announced.take()]  # type: ignore[misc]


A, B, C = b"a", b"ab", b"abc"


def test_a_row_that_others_wrote_is_told_when_the_chunk_leaves_host_memory() -> None:
    followed = Followed()
    put(followed.core, [A])
    assert followed.told() == [(STORED, None, [A])]
    followed.list(0, [(0, A, 1)])
    followed.core.host.invalidate(followed.core.host.index[A])
    assert followed.told() == [(STORED, 0, [A]), (REMOVED, None, [A])]
    followed.list(0, [(-1, A, 1)])
    assert followed.told() == [(REMOVED, 0, [A])]
    followed.list(0, [(0, A, 1)])
    assert followed.told() == [], "nobody knows what it is by now"
    put(followed.core, [B])
    followed.list(0, [(1, B, 1)])
    assert followed.told() == [(STORED, None, [B]), (STORED, 0, [B])]
    followed.core.host.invalidate(followed.core.host.index[B])
    assert followed.told() == [(REMOVED, None, [B])]


def test_a_withdrawal_spares_what_is_about_to_be_looked_at() -> None:
    """Its tokens, which a removal would have forgotten, are needed again."""
    keys = [b"%04d" % number for number in range(KEYS_A_HOLD + 1)]
    followed = Followed(rows=2 * len(keys), most_stored=1)
    followed.list(0, [(0, A, 1), (1, B, 1)])
    put(followed.core, [A])
    followed.told()
    followed.core.host.invalidate(followed.core.host.index[A])
    followed.told()
    put(followed.core, [B, *keys[1:], A])
    stored, *others = followed.told()
    assert A not in stored[2]
    assert (REMOVED, 0, [A]) not in others
    assert followed.told() == [(STORED, None, [keys[-1], A]), (REMOVED, 0, [B])]
