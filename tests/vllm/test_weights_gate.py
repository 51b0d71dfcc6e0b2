"""What may be found and stored after weights were changed in place: the rules, and how the manager applies them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.core import locate

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.vllm.own_hits import OwnHits
from nixl_tiers.vllm.store_gate import WeightsGate
from tests.vllm.test_manager import STEP, ManagerRig, ScriptedCoordinator, keys_of, scripted_manager

HIT, MISS = LookupResult.HIT, LookupResult.MISS
CALL = "reset_prefix_cache(reset_connector=True)"


class Ranks:
    """The numbers that ranks publish."""

    def __init__(self) -> None:
        self.weights = (0, 0)

    def __call__(self) -> tuple[int, ...]:
        return self.weights


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def own() -> OwnHits:
    own = OwnHits()
    own.known = True
    return own


def gate_in_doubt(ranks: Ranks, own: OwnHits) -> WeightsGate:
    gate = WeightsGate(ranks, own, kept=False)
    gate.computed = True
    ranks.weights = (2, 2)
    assert gate.look()
    gate.opened()
    return gate


class TestRules:
    @pytest.mark.parametrize("weights", [(1, 0), (0, 1), (1, 1), (2, 1)])
    def test_it_is_closed_while_any_rank_changes(self, ranks: Ranks, own: OwnHits, weights: tuple[int, int]) -> None:
        gate = WeightsGate(ranks, own, kept=False)
        assert not gate.look()
        assert gate.may_store("a")
        ranks.weights = weights
        assert gate.look()
        assert gate.closed
        assert not gate.quiet
        assert not gate.may_store("a")
        assert not gate.look(), "it is said once"
        ranks.weights = (2, 2)
        assert gate.look()
        assert gate.quiet
        assert gate.closed, "until a new epoch begins"
        gate.opened()
        assert gate.may_store("a"), "nothing was computed, so vLLM's own cache is empty"

    def test_in_doubt_only_requests_without_an_own_hit_since_the_change_are_stored(
        self, ranks: Ranks, own: OwnHits
    ) -> None:
        gate = gate_in_doubt(ranks, own)
        own.began_at("fresh", 0)
        own.began_at("hit", 128)
        stored = [name for name in ("fresh", "hit", "alive at the change") if gate.may_store(name)]
        assert stored == ["fresh"]
        own.began_at("fresh", 64)  # preempted meanwhile
        assert not gate.may_store("fresh")

    def test_another_change_leaves_no_request_fresh(self, ranks: Ranks, own: OwnHits) -> None:
        gate = gate_in_doubt(ranks, own)
        own.began_at("a", 0)
        ranks.weights = (4, 4)
        assert gate.look()
        gate.opened()
        assert not gate.may_store("a")

    @pytest.mark.parametrize(("loads", "tokens", "stored"), [(False, 0, True), (False, 16, False), (True, 128, True)])
    def test_what_was_neither_computed_nor_loaded_came_from_the_own_cache(
        self, ranks: Ranks, own: OwnHits, loads: bool, tokens: int, stored: bool
    ) -> None:
        """vLLM reports its own hits in whole blocks, and may also use a part of one."""
        gate = gate_in_doubt(ranks, own)
        own.began_at("a", 0)
        if loads:
            own.load_began("a")
        own.scheduled_at("a", tokens)
        assert gate.may_store("a") is stored

    def test_a_reset_ends_the_doubt(self, ranks: Ranks, own: OwnHits) -> None:
        gate = gate_in_doubt(ranks, own)
        gate.reset()
        assert gate.may_store("any")

    @pytest.mark.parametrize("reset", [True, False])
    def test_there_is_no_doubt_if_nothing_was_computed_since_a_reset(
        self, ranks: Ranks, own: OwnHits, reset: bool
    ) -> None:
        """Sleep, wake up, reload; pause, update, resume."""
        gate = WeightsGate(ranks, own, kept=False)
        gate.computed = True
        if reset:
            gate.reset()
        ranks.weights = (2, 2)
        gate.look()
        assert gate.in_doubt is not reset

    def test_what_is_computed_during_a_change_leaves_a_doubt(self, ranks: Ranks, own: OwnHits) -> None:
        gate = WeightsGate(ranks, own, kept=False)
        ranks.weights = (1, 1)
        gate.look()
        gate.computed = True
        assert not gate.in_doubt
        ranks.weights = (2, 2)
        gate.look()
        assert gate.in_doubt

    def test_ended_requests_are_forgotten(self, ranks: Ranks, own: OwnHits) -> None:
        gate = gate_in_doubt(ranks, own)
        own.began_at("a", 0)
        own.ended("a")
        own.ended("never seen")
        assert not gate.may_store("a")

    @pytest.mark.parametrize(("knows", "what"), [(True, "only requests without a hit"), (False, "nothing is stored")])
    def test_one_warning_names_the_call(
        self, ranks: Ranks, own: OwnHits, caplog: pytest.LogCaptureFixture, knows: bool, what: str
    ) -> None:
        with caplog.at_level(logging.WARNING):
            own.known = knows
            gate = gate_in_doubt(ranks, own)
            ranks.weights = (4, 4)
            gate.look()
        assert [what in record.message and CALL in record.message for record in caplog.records] == [True]

    @pytest.mark.parametrize("kept", [True, False])
    def test_a_configuration_that_says_otherwise_is_a_warning(
        self, ranks: Ranks, own: OwnHits, caplog: pytest.LogCaptureFixture, kept: bool
    ) -> None:
        gate = WeightsGate(ranks, own, kept=kept)
        ranks.weights = (1, 0)
        with caplog.at_level(logging.INFO):
            gate.look()
        assert [record.levelno for record in caplog.records] == [logging.WARNING if kept else logging.INFO]
        assert ("on_reset is keep" in caplog.text) is kept


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


def test_each_quiet_interval_has_one_epoch_of_its_own(rig: WeightsRig) -> None:
    epochs = [rig.epoch]
    for _ in range(3):
        rig.change()
        for name in ("a", "b"):
            looks_up(rig, name, *keys_of(1))
        rig.change(0, ends=False)
        looks_up(rig, "c", *keys_of(1))
        rig.change()
        looks_up(rig, "d", *keys_of(1))
        epochs.append(rig.epoch)
        looks_up(rig, "e", *keys_of(1))
        assert rig.epoch == epochs[-1]
    assert len(set(epochs)) == len(epochs)


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


def test_what_is_computed_upon_a_load_of_the_new_epoch_is_stored(rig: WeightsRig) -> None:
    rig.manager.times_are_published(512)
    one, two = keys_of(2)
    rig.begin(rig.request("before"))
    rig.change()
    first = rig.request("first", one)
    rig.manager.began_at("first", 0)  # which is the first to see the change
    assert rig.store(first, one) == [one]
    rig.end(first)
    second = rig.request("second", one, two)
    rig.manager.began_at("second", 0)
    assert [rig.manager.lookup(key, second) for key in (one, two)] == [HIT, MISS]
    rig.manager.prepare_load([one], second)
    rig.manager.on_schedule_end(STEP)
    rig.manager.complete_load([one], second)
    rig.manager.began([("second", 64)])
    assert rig.store(second, two) == [two]
    rig.end(second)
    assert not rig.manager._own_hits._none


def test_a_copy_that_ends_after_a_change_is_not_written_below(rig: WeightsRig) -> None:
    """While others of before are under way, so that the new epoch has not begun."""
    keys = keys_of(2)
    outputs = [rig.manager.prepare_store([key], rig.request(name)) for key, name in zip(keys, "ab", strict=True)]
    spec = outputs[0].store_spec
    rig.change()
    for cell in (0, 1):
        rig.region.mark(spec.rows, cell, spec.store_seq, True)
    rig.manager.complete_store({keys[0]}, ReqContext("a"))
    host = rig.manager._coordinator.counters()["cpu"]
    assert (host["stored"], host["used_bytes"]) == (0, rig.region.geometry.row_bytes), "and its row is free"
    assert locate(rig.manager._coordinator, keys) == [None, None]


def test_a_part_of_a_block_is_an_own_hit(rig: WeightsRig) -> None:
    rig.manager.times_are_published(512)
    (key,) = keys_of(1)
    rig.begin(rig.request("before"))
    rig.change()
    context = rig.request("r", key)
    rig.manager.began_at("r", 0)
    rig.manager.lookup(key, context)
    rig.manager.began([("r", 16)])
    assert rig.store(context, key) == []


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
def test_requests_that_wait_for_storage_wait_no_longer(ends: bool) -> None:
    coordinator = ScriptedCoordinator(Lookup.PENDING, "file")
    coordinator.reset = lambda **_: None  # type: ignore[assignment]
    manager = scripted_manager(coordinator)
    (key,) = keys_of(1)
    context = ReqContext("r")
    context.set_offload_key_position(key, 64)
    manager.on_new_request(context)
    assert manager.lookup(key, context) is LookupResult.HIT_PENDING
    manager.on_schedule_end(STEP)
    coordinator.region.ranks.weights = (1,)
    assert manager.lookup(key, context) is MISS
    manager.on_schedule_end(STEP)
    if ends:
        coordinator.region.ranks.weights = (2,)
        coordinator.answer = Lookup.MISS
        assert manager.lookup(key, context) is MISS


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


def test_looking_takes_one_reading_a_request_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = WeightsRig()
    keys = keys_of(4)
    rig.store(rig.request("before"), *keys)
    context = rig.request("r", *keys)
    looks: list[int] = []
    look: Callable[[], bool] = rig.manager.weights.look
    monkeypatch.setattr(rig.manager.weights, "look", lambda: (looks.append(1), look())[1])
    assert [rig.manager.lookup(key, context) for key in keys] == [HIT] * 4
    assert len(looks) == 1
    rig.manager.shutdown()
