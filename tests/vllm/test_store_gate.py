"""What may be stored after a reset; the stress test shows the same on real engines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key

from nixl_tiers.vllm.own_hits import OwnHits
from nixl_tiers.vllm.store_gate import StoreGate

TOKENS = 32
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]


def request(name: str) -> ReqContext:
    context = ReqContext(name)
    for index, key in enumerate(KEYS):
        context.set_offload_key_position(key, TOKENS * (index + 1))
    return context


class SimulatedScheduler:
    """vLLM's part: the order in which it calls. `newer`: stores are offered before a step ends, as from 0.33 on."""

    def __init__(self, *, kept: bool = False, one_block: bool = True, newer: bool = False) -> None:
        self.own = OwnHits()
        self.gate = StoreGate(self.own, kept=kept, one_block=one_block)
        self.alive: set[str] = set()
        self._newer = newer

    def step(
        self,
        looked_up: Sequence[tuple[ReqContext, int]] = (),
        new: Sequence[ReqContext] = (),
        preempted: Sequence[ReqContext] = (),
        offer: ReqContext | None = None,
    ) -> list[int]:
        """One step: look-ups begin at those chunks; `offer` offers all of its chunks. Which of them are stored."""
        for context, chunk in looked_up:
            self.alive.add(context.req_id)
            self.gate.looked_up(context, TOKENS * (chunk + 1))
        self.alive.update(context.req_id for context in new)
        end = ScheduleEndContext([r.req_id for r in new], {r.req_id for r in preempted})
        if not self._newer:
            self.gate.end_step(end)
        stored = [] if offer is None else self.gate.allowed(KEYS, offer)
        if self._newer:
            self.gate.end_step(end)
        return [KEYS.index(key) for key in stored]

    def begin(self, context: ReqContext, chunk: int = 0, preempted: Sequence[ReqContext] = ()) -> list[int]:
        """A step in which a request is looked up from `chunk` on, scheduled for the first time, and offers all."""
        return self.step([(context, chunk)], new=[context], preempted=preempted, offer=context)

    def reset(self, loading: Sequence[str] = ()) -> None:
        self.gate.reset(self.alive, loading)

    def end(self, context: ReqContext) -> None:
        self.alive.discard(context.req_id)
        self.gate.ended(context.req_id)


@pytest.fixture(params=[False, True], ids=["before 0.33", "0.33"])
def newer(request: pytest.FixtureRequest) -> bool:
    value: bool = request.param
    return value


ALL = [0, 1, 2, 3]


def test_without_a_reset_everything_is_stored(newer: bool) -> None:
    engine = SimulatedScheduler(newer=newer)
    assert engine.begin(request("a")) == ALL
    assert engine.begin(request("b"), 2) == ALL
    assert not engine.gate.shut


def test_requests_alive_at_a_reset_store_nothing_until_they_end(newer: bool) -> None:
    engine = SimulatedScheduler(newer=newer)
    old = request("old")
    engine.begin(old)
    engine.reset()
    assert engine.step(offer=old) == []
    assert engine.begin(request("new")) == ALL, "and other requests are not affected"
    assert engine.step(offer=old) == []
    engine.end(old)
    again = request("old")
    assert engine.begin(again) == ALL


def test_requests_preempted_by_the_reset_store_after_a_new_lookup(newer: bool) -> None:
    engine = SimulatedScheduler(newer=newer)
    old, other = request("old"), request("other")
    engine.begin(old)
    engine.begin(other)
    engine.reset()
    assert engine.step([(old, 0)], preempted=[old, other], offer=old) == ALL
    assert engine.step(offer=other) == [], "its blocks are still those of before"
    assert engine.step([(other, 2)], offer=other) == ALL, "vLLM's own cache was empty after the reset"
    assert not engine.gate.shut


def test_waiting_requests_without_blocks_leave_the_cache_clean(newer: bool) -> None:
    engine = SimulatedScheduler(newer=newer)
    engine.alive.add("waiting")
    engine.reset()
    assert engine.begin(request("new"), 2) == ALL
    assert engine.begin(request("waiting"), 2) == ALL


def test_chunks_computed_from_stale_blocks_are_not_stored(newer: bool) -> None:
    engine = SimulatedScheduler(newer=newer)
    old = request("old")
    engine.begin(old)
    engine.reset()
    hit = request("hit")
    assert engine.begin(hit, 1) == []
    assert engine.step(offer=hit) == []
    assert engine.begin(request("from nothing")) == ALL


def test_with_constant_weights_only_the_hit_itself_is_not_stored(newer: bool) -> None:
    engine = SimulatedScheduler(kept=True, newer=newer)
    old = request("old")
    engine.begin(old)
    engine.reset()
    assert engine.step(offer=old) == []
    assert engine.begin(request("hit"), 2) == [2, 3]


def test_nothing_is_stored_where_a_hit_cannot_be_seen(newer: bool) -> None:
    """A hit of less than a chunk of several blocks."""
    engine = SimulatedScheduler(one_block=False, newer=newer)
    engine.begin(request("old"))
    engine.reset()
    assert engine.begin(request("new")) == []


@pytest.mark.parametrize("late", [True, False])
def test_a_reset_without_requests_leaves_the_cache_clean(late: bool, newer: bool) -> None:
    engine = SimulatedScheduler(newer=newer)
    old, hit = request("old"), request("hit")
    engine.begin(old)
    engine.reset()
    if late:
        assert engine.begin(hit, 2) == []
        engine.end(hit)
    engine.end(old)
    engine.reset()
    assert not engine.gate.shut
    assert engine.begin(request("new"), 2) == ALL


def test_a_request_that_ended_while_loading_still_holds_blocks(newer: bool) -> None:
    engine = SimulatedScheduler(newer=newer)
    old = request("old")
    engine.begin(old)
    engine.end(old)
    engine.reset(loading=["old"])
    assert engine.begin(request("new"), 2) == []


def test_a_lookup_counts_only_if_the_request_is_scheduled_in_its_step(newer: bool) -> None:
    """vLLM looks for its own blocks in every step, and does not look up what it has itself almost wholly."""
    engine = SimulatedScheduler(newer=newer)
    engine.begin(request("old"))
    engine.reset()
    late = request("late")
    assert engine.step([(late, 0)]) == []
    assert engine.step(new=[late], offer=late) == []
    preempted = request("preempted")
    assert engine.begin(preempted) == ALL
    assert engine.step(preempted=[preempted]) == []
    assert engine.step(offer=preempted) == []


def test_a_preemption_without_a_reset_leaves_the_cache_stale(newer: bool) -> None:
    engine = SimulatedScheduler(newer=newer)
    one, two = request("one"), request("two")
    engine.begin(one)
    engine.begin(two)
    engine.reset()
    assert engine.step(preempted=[two]) == []
    assert engine.step(preempted=[one, two]) == []
    assert engine.begin(request("hit"), 1) == []


@pytest.mark.parametrize("one_block", [True, False])
def test_a_reset_that_preempts_leaves_the_cache_clean_despite_waiting_requests(one_block: bool, newer: bool) -> None:
    """A server under load always has requests that wait, for storage or for room, or again since a preemption."""
    engine = SimulatedScheduler(one_block=one_block, newer=newer)
    old, waiting, waits_again = request("old"), request("waiting"), request("waits again")
    engine.begin(waits_again)
    engine.begin(old)
    engine.step(preempted=[waits_again])
    engine.step([(waiting, 0)])
    engine.reset()
    engine.step([(old, 0)], preempted=[old])
    assert not engine.gate._stale_cache
    assert engine.begin(request("hit"), 2) == ALL
    assert engine.step([(waiting, 0)], new=[waiting], offer=waiting) == ALL


def test_requests_that_only_waited_are_cleared_by_their_next_lookup(newer: bool) -> None:
    engine = SimulatedScheduler(newer=newer)
    one, two = request("one"), request("two")
    engine.step([(one, 0), (two, 0)])
    engine.reset()
    engine.step([(one, 0)])
    assert engine.begin(request("hit"), 2) == [], "who knows about the other"
    engine.step([(two, 0)])
    assert engine.begin(request("late hit"), 2) == ALL


@pytest.mark.parametrize("end", ["preempted", "ended"])
def test_a_request_that_ran_without_a_lookup_leaves_the_cache_stale(end: str, newer: bool) -> None:
    """vLLM does not report resumed requests, and the next step may preempt others for lack of blocks."""
    engine = SimulatedScheduler(newer=newer)
    old, again = request("old"), request("again")
    engine.begin(again)
    engine.step(preempted=[again])
    engine.begin(old)
    engine.reset()
    engine.step(preempted=[old])
    assert engine.begin(request("hit"), 2) == []
    if end == "preempted":
        engine.step(preempted=[again])
        engine.step([(again, 0)])
    else:
        engine.end(again)
        engine.step()
    engine.step([(old, 0)])
    assert engine.begin(request("late hit"), 2) == []
    assert engine.gate._unsettled is None, "and that is known"


@pytest.mark.parametrize("how", ["loads", "has loaded", "runs"])
def test_a_request_that_held_blocks_leaves_the_cache_stale(how: str, newer: bool) -> None:
    """A reset that should preempt all fails while a request loads; another one may follow that preempts no request."""
    engine = SimulatedScheduler(newer=newer)
    old, holder = request("old"), request("holder")
    engine.begin(old)
    engine.step([(holder, 0)])
    if how == "runs":
        engine.step(new=[holder])
    else:
        engine.gate.load_began("holder")
    engine.reset(["holder"] if how == "loads" else [])
    engine.step([(old, 0)], preempted=[old])
    assert engine.begin(request("hit"), 2) == []
    engine.step([(holder, 0)])  # its load failed
    assert engine.begin(request("late hit"), 2) == []


def test_ended_requests_are_forgotten() -> None:
    engine = SimulatedScheduler()
    contexts = [request(f"r{number}") for number in range(8)]
    for context in contexts:
        engine.begin(context)
    engine.reset()
    for context in contexts:
        engine.step([(context, 0)], new=[context])
        engine.end(context)
    gate = engine.gate
    kept = [gate.holding, gate._allocated, gate._blocked, gate._from, gate._looked_up, gate._first_end]
    assert [len(things) for things in kept] == [0] * 6


class TestWithNixlTiersConnector:
    """It reports what each request begins with, and the first step of each: chunks of several blocks can be judged."""

    @staticmethod
    def after_a_reset(*, kept: bool = False, newer: bool) -> SimulatedScheduler:
        engine = SimulatedScheduler(kept=kept, one_block=False, newer=newer)
        engine.own.known = True
        engine.begin(request("old"))
        engine.reset()
        return engine

    @pytest.mark.parametrize(("own", "stored"), [(0, ALL), (TOKENS // 2, []), (TOKENS, [])])
    def test_a_request_without_an_own_hit_is_stored_and_one_with_half_a_chunk_is_not(
        self, own: int, stored: list[int], newer: bool
    ) -> None:
        engine = self.after_a_reset(newer=newer)
        new = request("new")
        engine.own.began_at("new", own)
        assert engine.begin(new, own // TOKENS) == stored
        assert engine.step(offer=new) == stored

    def test_so_is_one_that_is_not_looked_up_as_it_has_less_than_a_chunk(self, newer: bool) -> None:
        engine = self.after_a_reset(newer=newer)
        new = request("new")
        engine.own.began_at("new", 0)
        assert engine.step(new=[new], offer=new) == ALL

    def test_what_an_attempt_to_begin_has_shown_is_replaced_by_the_next(self, newer: bool) -> None:
        engine = self.after_a_reset(newer=newer)
        late = request("late")
        engine.own.began_at("late", 0)
        engine.step([(late, 0)])
        engine.own.began_at("late", TOKENS // 2)  # others have computed it meanwhile, upon old blocks
        assert engine.begin(late) == []

    def test_a_part_of_a_block_is_an_own_hit(self, newer: bool) -> None:
        engine = self.after_a_reset(newer=newer)
        engine.own.began_at("new", 0)
        engine.own.scheduled_at("new", 8)
        assert engine.begin(request("new")) == []

    def test_requests_alive_at_a_reset_store_nothing_whatever_they_began_with(self, newer: bool) -> None:
        engine = self.after_a_reset(newer=newer)
        second = request("second")
        engine.own.began_at("second", 0)
        assert engine.begin(second) == ALL
        engine.reset()
        assert engine.step(offer=second) == []
        engine.own.began_at("second", TOKENS)  # preempted meanwhile
        assert engine.step([(second, 1)], offer=second) == []

    def test_with_constant_weights_all_but_the_hit_is_stored(self, newer: bool) -> None:
        engine = self.after_a_reset(kept=True, newer=newer)
        engine.own.began_at("hit", 2 * TOKENS)
        assert engine.begin(request("hit"), 2) == [2, 3]

    @pytest.mark.parametrize(("known", "what"), [(True, "only requests without a hit"), (False, "NixlTiersConnector")])
    def test_the_warning_says_what_is_stored(self, caplog: pytest.LogCaptureFixture, known: bool, what: str) -> None:
        engine = SimulatedScheduler(one_block=False)
        engine.own.known = known
        engine.begin(request("old"))
        engine.reset()
        engine.begin(request("new"))
        assert [what in record.message for record in caplog.records] == [True]
