"""What may be found and stored after weights were changed in place: the rules, and how the manager applies them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.vllm.own_hits import OwnHits
from nixl_tiers.vllm.store_gate import WeightsGate
from tests.vllm.test_manager import STEP, ManagerRig, keys_of

HIT, MISS = LookupResult.HIT, LookupResult.MISS
CALL = "reset_prefix_cache(reset_connector=True)"


class Rules:
    """The gate, over the numbers that ranks publish. `computed`: something was, before."""

    def __init__(self, *, computed: bool = True, kept: bool = False, known: bool = True) -> None:
        self.weights = (0, 0)
        self.own = OwnHits()
        self.own.known = known
        self.gate = WeightsGate(lambda: self.weights, self.own, kept=kept)
        self.gate.computed = computed

    def change(self, *weights: int) -> WeightsGate:
        self.weights = weights
        assert self.gate.look()
        return self.gate


@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (1, 1), (2, 1)])
def test_it_is_closed_while_any_rank_changes(weights: tuple[int, int]) -> None:
    rules = Rules(computed=False)
    assert not rules.gate.look()
    assert rules.gate.may_store("a")
    gate = rules.change(*weights)
    assert (gate.closed, gate.quiet, gate.may_store("a")) == (True, False, False)
    assert not gate.look(), "it is said once"
    rules.change(2, 2)
    assert (gate.closed, gate.quiet) == (True, True), "until a new epoch begins"
    gate.opened()
    assert gate.may_store("a"), "nothing was computed, so vLLM's own cache is empty"


def test_in_doubt_only_requests_without_an_own_hit_since_the_change_are_stored() -> None:
    rules = Rules()
    rules.change(2, 2).opened()
    own, gate = rules.own, rules.gate
    for name, tokens in (("fresh", 0), ("hit", 128), ("part", 0), ("loads", 0), ("preempted", 0), ("ended", 0)):
        own.began_at(name, tokens)
    own.load_began("loads")
    # What was neither computed nor loaded came from vLLM's own cache: it reports hits in whole blocks.
    for name, tokens in (("fresh", 0), ("part", 16), ("loads", 128)):
        own.scheduled_at(name, tokens)
    own.began_at("preempted", 64)
    own.ended("ended")
    own.ended("never seen")
    names = ("fresh", "hit", "part", "loads", "preempted", "ended", "alive at the change")
    assert [name for name in names if gate.may_store(name)] == ["fresh", "loads"]
    rules.change(4, 4).opened()
    assert not gate.may_store("fresh"), "another change leaves no request fresh"
    gate.reset()
    assert gate.may_store("any")


def test_there_is_a_doubt_if_something_was_computed_since_a_reset_or_during_a_change() -> None:
    """Sleep, wake up, reload; pause, update, resume."""
    rules = Rules()
    rules.gate.reset()
    assert not rules.change(2, 2).in_doubt
    assert not rules.change(3, 3).in_doubt
    rules.gate.computed = True
    assert rules.change(4, 4).in_doubt


@pytest.mark.parametrize(("known", "what"), [(True, "only requests without a hit"), (False, "nothing is stored")])
def test_one_warning_names_the_call(caplog: pytest.LogCaptureFixture, known: bool, what: str) -> None:
    rules = Rules(kept=known, known=known)
    for weights in (2, 4):
        rules.change(weights, weights)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [what in text and CALL in text for text in said] == [False] * known + [True]
    assert ("on_reset is keep" in said[0]) is known


class WeightsRig(ManagerRig):
    """The manager over a real region whose ranks change their weights."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(geometry=Geometry(cells=2, cell_payload=8192), **fields)

    def change(self, *cells: int, ends: bool = True) -> None:
        for changing in (True, False)[: 1 + ends]:
            for cell in cells or (0, 1):
                self.region.ranks.publish_weights(cell, changing=changing)

    def begin(self, context: ReqContext) -> None:
        """The request runs for the first time."""
        self.manager.on_schedule_end(ScheduleEndContext([context.req_id], ()))

    def end(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    @property
    def epoch(self) -> int:
        return self.manager._coordinator.namespace.epoch


@pytest.fixture(params=["new_epoch", "keep"])
def rig(request: pytest.FixtureRequest) -> Iterator[WeightsRig]:
    rig = WeightsRig(on_reset=request.param)
    yield rig
    rig.manager.shutdown()


def looks_up(rig: WeightsRig, name: str, *keys: bytes) -> list[LookupResult]:
    context = rig.request(name, *keys)
    answers = [rig.manager.lookup(key, context) for key in keys]
    rig.manager.on_schedule_end(STEP)
    rig.end(context)
    return answers


def test_nothing_is_found_or_stored_during_a_change_nor_what_is_of_before_it(rig: WeightsRig) -> None:
    old, new = keys_of(2)
    rig.store(rig.request("before"), old)
    assert looks_up(rig, "a", old) == [HIT]
    rig.change(1, ends=False)
    assert looks_up(rig, "b", old) == [MISS]
    assert rig.store(rig.request("c"), new) == []
    rig.region.ranks.publish_weights(1, changing=False)
    assert looks_up(rig, "d", old) == [MISS]
    fresh = rig.request("e")
    rig.manager.began_at("e", 0)  # as others were looked up during the change, and may have computed something
    assert rig.store(fresh, new) == [new]
    assert looks_up(rig, "f", new) == [HIT]


@pytest.mark.parametrize("notice", ["look-up", "nothing"])
def test_a_copy_under_way_at_a_change_becomes_no_hit(rig: WeightsRig, notice: str) -> None:
    """Nobody knows of which weights it is. vLLM reports its end by the key alone, which must not be taken for that of
    a copy that began later."""
    (key,) = keys_of(1)
    output = rig.manager.prepare_store([key], rig.request("before"))
    rig.change()
    if notice == "look-up":
        assert looks_up(rig, "a", key) == [MISS]
        assert rig.store(rig.request("b"), key) == [], "while that copy is under way"
    for cell in (0, 1):
        rig.region.mark(output.store_spec.rows, cell, output.store_spec.store_seq, True)
    rig.manager.complete_store({key}, ReqContext("before"))
    assert looks_up(rig, "c", key) == [MISS]
    assert [keys for _, keys in rig.events()] == [], "nor is it announced"
    again = rig.manager.prepare_store([key], rig.request("d"))
    assert again.keys_to_store == [key]
    assert looks_up(rig, "e", key) == [LookupResult.HIT_PENDING]


def test_the_new_epoch_waits_for_loads_of_before(rig: WeightsRig) -> None:
    """Their rows must not be given to others: vLLM, which has not reset anything, still reads them."""
    keys = keys_of(4)
    rig.store(rig.request("before"), *keys)
    loads = rig.request("loads", *keys)
    assert {rig.manager.lookup(key, loads) for key in keys} == {HIT}
    rig.manager.prepare_load(keys, loads)
    rig.manager.on_schedule_end(STEP)
    epoch = rig.epoch
    rig.change()
    rig.manager.began_at("new", 0)
    assert rig.store(rig.request("new"), keys_of(1, first=9)[0]) == []
    assert rig.epoch == epoch
    rig.manager.complete_load(keys, loads)
    assert looks_up(rig, "after", *keys)[0] is MISS
    assert rig.epoch != epoch


def test_a_reset_of_the_connector_during_a_change_ends_it_not(rig: WeightsRig) -> None:
    (key,) = keys_of(1)
    rig.change(ends=False)
    rig.manager.reset_cache()
    assert rig.store(rig.request("a"), key) == []
    for cell in (0, 1):
        rig.region.ranks.publish_weights(cell, changing=False)
    assert rig.store(rig.request("b"), key) == [key]


@pytest.mark.parametrize("open_job", ["load", "store", "none"])
def test_a_reset_of_the_connector_begins_the_epoch_at_once(rig: WeightsRig, open_job: str) -> None:
    """vLLM completes no job of before it."""
    old, new = keys_of(2)
    context = rig.request("r", old)
    if open_job == "store":
        rig.manager.prepare_store([old], context)
    else:
        rig.store(context, old)
    if open_job == "load":
        rig.manager.lookup(old, context)
        rig.manager.prepare_load([old], context)
    epoch = rig.epoch
    rig.change()
    rig.manager.reset_cache()
    assert rig.epoch != epoch
    rig.end(context)
    after = rig.request("a", new)
    assert rig.manager.lookup(new, after) is MISS  # whether its blocks are new is StoreGate's to judge
    rig.begin(after)
    assert rig.store(after, new) == [new]


@pytest.mark.parametrize("exact", [True, False])
def test_requests_are_stored_after_a_change_by_what_their_connector_knows(
    rig: WeightsRig, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`exact`: NixlTiersConnector."""
    one, two, three, four = keys_of(4)
    if exact:
        rig.manager.times_are_published(512)
    alive = rig.request("alive", one, two)
    rig.manager.began_at("alive", 0)
    rig.manager.lookup(one, alive)
    rig.begin(alive)
    assert rig.store(alive, one) == [one]
    caplog.clear()
    rig.change()
    assert rig.store(alive, two) == [], "it was alive at the change"
    fresh, hit = rig.request("fresh", three), rig.request("hit", one, four)
    for context, own in ((fresh, 0), (hit, 64)):
        if exact:
            rig.manager.began_at(context.req_id, own)
        assert rig.manager.lookup(three if context is fresh else four, context) is MISS
        rig.begin(context)
        if exact:
            rig.manager.began([(context.req_id, own)])
    assert rig.store(hit, one, four) == []
    assert rig.store(fresh, three) == ([three] if exact else [])
    (warning,) = [record.message for record in caplog.records if CALL in record.message]
    assert ("only requests without a hit" in warning) is exact
    for context in (alive, fresh, hit):
        rig.end(context)
    rig.manager.reset_cache()
    assert rig.store(rig.request("after"), one) == [one]


def test_what_another_connector_loaded_before_a_change_is_not_stored(rig: WeightsRig) -> None:
    """P/D: an engine that has computed nothing yet, and whose first request waits for another engine's KV."""
    rig.manager.times_are_published(512)
    (key,) = keys_of(1)
    remote = rig.request("remote", key)
    rig.manager.began_at("remote", 0)
    assert rig.manager.lookup(key, remote) is MISS
    rig.manager.on_schedule_end(STEP)
    rig.change()
    rig.manager.on_schedule_end(STEP)
    rig.manager.began([("remote", 64)])
    assert rig.store(remote, key) == []


def test_after_a_change_keep_does_not_excuse_stale_hits() -> None:
    """A reset while requests hold blocks leaves vLLM's own cache as it is: with constant weights what is beyond a hit
    in it could be stored."""
    rig = WeightsRig(on_reset="keep")
    one, two = keys_of(2)
    alive = rig.request("alive", one)
    rig.manager.lookup(one, alive)
    rig.begin(alive)
    rig.change()
    rig.manager.reset_cache()
    hit = rig.request("hit", one, two)
    rig.manager.lookup(two, hit)
    rig.begin(hit)
    assert rig.store(hit, one, two) == []
    rig.manager.shutdown()


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_finds_no_more_once_another_has_seen_the_change(rig: WeightsRig, ends: bool) -> None:
    """Answers of the same step are of before."""
    one, two = keys_of(2)
    rig.store(rig.request("before"), one, two)
    first, second = rig.request("first", one, two), rig.request("second", one, two)
    assert rig.manager.lookup(one, first) is HIT
    rig.change(ends=ends)
    assert rig.manager.lookup(one, second) is MISS
    assert rig.manager.lookup(one, first) is MISS
