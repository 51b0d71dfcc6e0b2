"""`store: adaptive` in the manager: what vLLM offers is stored if it is worth it, and what pays is measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from nixl_tiers.base.metrics import PREFIX
from nixl_tiers.vllm.adaptive_store import LEAST, MOST, AdaptiveStore
from nixl_tiers.vllm.own_time import OwnTime
from tests.core.test_ghost import beginning, chain
from tests.vllm.test_manager import ROWS, STEP, ManagerRig


class Rig(ManagerRig):
    """A manager with `store: adaptive`, as NixlTiersConnector uses it."""

    def __init__(self) -> None:
        super().__init__(store="adaptive")
        self.manager._groups.chunk_tokens = [64]
        adaptive = self.manager._stores.adaptive
        assert adaptive is not None
        self.adaptive: AdaptiveStore = adaptive
        self.adaptive._row_tokens = 64
        self.own = OwnTime()
        self.manager.times_are_published(512, self.own)

    def nothing_comes_back(self) -> None:
        admission = self.adaptive._admission
        admission.pays = 0.02
        admission._seen = admission._window / 2

    def numbers(self) -> dict[str, float]:
        return dict(self.adaptive.numbers())

    def counters(self) -> dict[str, float]:
        return counters_of(self)


def counters_of(rig: ManagerRig) -> dict[str, float]:
    """What is reported of chunks that are not stored, since the last call."""
    stats = rig.manager.get_stats()
    assert stats is not None
    values = stats.data["data"]
    names = ("not_stored_chunks", "computed_again_chunks")
    return {name: values[PREFIX + name][()] for name in names if PREFIX + name in values}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.manager.shutdown()


def test_what_is_not_worth_it_is_neither_stored_nor_announced(rig: Rig) -> None:
    rig.nothing_comes_back()
    keys = beginning(drawn=False, chunks=ROWS)
    context = rig.request("r", *keys)
    entered = rig.coordinator.core().entered
    output = rig.manager.prepare_store(keys, context)
    assert output.keys_to_store == []
    assert output.store_spec.rows.tolist() == []
    assert output.store_spec.counts == (0,)
    assert rig.coordinator.core().entered == entered, "it takes no lock"
    assert rig.events() == []
    assert rig.manager.lookup(keys[0], context) is LookupResult.MISS
    assert rig.numbers()["not_stored"] == ROWS


def test_what_is_computed_again_is_stored_and_a_hit(rig: Rig) -> None:
    rig.nothing_comes_back()
    keys = beginning(drawn=False, chunks=ROWS)
    assert rig.store(rig.request("first", *keys), *keys) == []
    second = rig.request("second", *keys)
    assert rig.store(second, *keys) == keys
    third = rig.request("third", *keys)
    assert rig.manager.lookup(keys[0], third) is LookupResult.HIT
    assert rig.numbers()["computed_again"] == ROWS


def test_what_is_not_stored_is_a_metric(rig: Rig) -> None:
    """With `store: adaptive` only."""
    assert rig.counters() == {"not_stored_chunks": 0, "computed_again_chunks": 0}
    rig.nothing_comes_back()
    keys = beginning(drawn=False, chunks=ROWS)
    for name in ("first", "second"):
        rig.store(rig.request(name, *keys), *keys)
    assert rig.counters() == {"not_stored_chunks": ROWS, "computed_again_chunks": ROWS}
    plain = ManagerRig()
    try:
        assert not counters_of(plain)
    finally:
        plain.manager.shutdown()


def test_only_what_is_known_is_stored_in_the_order_of_the_offer(rig: Rig) -> None:
    rig.nothing_comes_back()
    keys = beginning(drawn=False, chunks=2)
    rig.store(rig.request("first", *keys), *keys)
    more = [*keys, *beginning(drawn=False, chunks=2, after="more")]
    assert rig.store(rig.request("second", *more), *more) == keys


@pytest.mark.parametrize("into_the_third", [0, 10])
def test_what_the_engines_own_cache_has_counts_neither_way(rig: Rig, into_the_third: int) -> None:
    """Whole chunks: one of which it has a part is computed."""
    keys = chain("a", ROWS)
    context = rig.request("r", *keys)
    rig.manager.began_at("r", 2 * 64 + into_the_third)
    rig.store(context, *keys)
    assert rig.adaptive._admission._seen == ROWS - 2


def test_a_load_counts_as_what_comes_back(rig: Rig) -> None:
    keys = chain("a", ROWS)
    rig.store(rig.request("writer", *keys), *keys)
    reader = rig.request("reader", *keys)
    rig.manager.began_at("reader", 0)
    rig.manager.lookup(keys[0], reader)
    rig.manager.prepare_load(keys, reader)
    admission = rig.adaptive._admission
    assert (admission._seen, admission._known) == (2 * ROWS, ROWS)
    assert not rig.adaptive._own, "what it offers from now on is behind what it had"


def test_a_new_epoch_forgets_what_was_seen(rig: Rig) -> None:
    rig.nothing_comes_back()
    keys = beginning(drawn=False, chunks=ROWS)
    rig.store(rig.request("first", *keys), *keys)
    rig.manager.on_request_finished(ReqContext("first"))
    rig.manager.reset_cache()
    rig.nothing_comes_back()
    assert rig.store(rig.request("second", *keys), *keys) == []
    assert rig.numbers()["computed_again"] == 0


def test_nothing_is_kept_of_an_ended_request(rig: Rig) -> None:
    rig.nothing_comes_back()
    keys = beginning(drawn=False, chunks=ROWS)
    context = rig.request("r", *keys)
    rig.store(context, *keys)
    rig.manager.began_at("r", 64)
    rig.manager.on_request_finished(context)
    assert not rig.adaptive._admission._cut
    assert not rig.adaptive._own


# --- what pays -------------------------------------------------------------------------------------------------


def step_that_stores(rig: Rig, name: str, seconds: float, *, newer: bool) -> None:
    """Its plan and all else of the connector take so many seconds."""
    keys = chain(name, ROWS)
    context = rig.request(name, *keys)
    if not newer:
        rig.manager.on_schedule_end(STEP)
    output = rig.manager.prepare_store(keys, context)
    if newer:
        rig.manager.on_schedule_end(STEP)
    rig.own.seconds += seconds
    spec = output.store_spec
    for cell in (0, 1):
        rig.region.mark(spec.rows, cell, spec.store_seq, True)
    rig.manager.complete_store(set(output.keys_to_store), context)
    rig.manager.on_request_finished(context)


def learn_the_speed_of_prefill(rig: Rig) -> None:
    for _ in range(5):
        rig.coordinator.prefill.observe(1000, 500.0, 1.0)  # 64 ms a chunk


@pytest.mark.parametrize("newer", [False, True])
def test_what_pays_is_the_cost_of_storing_by_that_of_computing(rig: Rig, newer: bool) -> None:
    learn_the_speed_of_prefill(rig)
    assert rig.adaptive._admission.pays is None
    for number in range(4):
        step_that_stores(rig, str(number), ROWS * 0.64e-3, newer=newer)
    rig.manager.on_schedule_end(ScheduleEndContext(("next",), ()))
    assert rig.adaptive._admission.pays == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(("seconds", "pays"), [(0.0, LEAST), (10.0, MOST)])
def test_what_pays_is_bounded(rig: Rig, seconds: float, pays: float) -> None:
    learn_the_speed_of_prefill(rig)
    step_that_stores(rig, "a", 1e-9 + seconds, newer=False)
    rig.manager.on_schedule_end(STEP)
    assert rig.adaptive._admission.pays == pays


def test_steps_between_two_that_store_cost_storing_nothing(rig: Rig) -> None:
    learn_the_speed_of_prefill(rig)
    for number in range(3):
        step_that_stores(rig, str(number), ROWS * 0.64e-3, newer=False)
        for _ in range(10):
            rig.manager.on_schedule_end(STEP)
            rig.own.seconds += 1.0
    assert rig.adaptive._admission.pays == pytest.approx(0.01, rel=0.1)


def test_what_pays_stays_while_less_is_stored(rig: Rig) -> None:
    learn_the_speed_of_prefill(rig)
    rig.nothing_comes_back()
    keys = beginning(drawn=True, chunks=ROWS)
    rig.store(rig.request("drawn", *keys), *keys)
    rig.own.seconds += 1.0
    rig.manager.on_schedule_end(ScheduleEndContext(("next",), ()))
    assert rig.adaptive._admission.pays == 0.02


def test_with_vllms_own_connector_everything_is_stored() -> None:
    """It does not show what storing costs."""
    rig = ManagerRig(store="adaptive")
    try:
        adaptive = rig.manager._stores.adaptive
        assert adaptive is not None
        adaptive._admission._seen = adaptive._admission._window
        for number in range(4):
            keys = chain(str(number), 1)
            assert rig.store(rig.request(str(number), *keys), *keys) == keys
        assert adaptive._admission.pays is None
    finally:
        rig.manager.shutdown()


def test_all_is_stored_unless_asked(rig: Rig) -> None:
    plain = ManagerRig()
    try:
        assert plain.manager._stores.adaptive is None
        assert not plain.manager._stores.counts()
    finally:
        plain.manager.shutdown()
