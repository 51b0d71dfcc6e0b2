"""How long the connector itself keeps the engine's thread: in steps, and before first tokens."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm.chains import Arrivals
from nixl_tiers.vllm.compat import ScheduleEndContext
from nixl_tiers.vllm.connector import NixlTiersConnector, OffloadingConnector
from nixl_tiers.vllm.own_time import FirstTokens
from tests.support.vllm_scheduler import BLOCK, ConnectorScheduler
from tests.vllm.test_manager import ManagerRig, keys_of

HASHES = [bytes([number]) * 32 for number in range(2)]
TOKENS = len(HASHES) * BLOCK + 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def output(
    new: dict[str, int] | None = None,
    scheduled: dict[str, int] | None = None,
    preempted: Any = None,
    finished: Any = (),
) -> Any:
    """A vLLM SchedulerOutput: of new requests the tokens that they have, of all what is computed."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=tokens, block_ids=([1, 2, 3],))
            for name, tokens in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens=scheduled or {},
        preempted_req_ids=preempted,
        finished_req_ids=finished,
        kv_cache_block_copies=None,
        kv_connector_block_state=None,
    )


META = SimpleNamespace(step=7, load_jobs={}, store_jobs={}, jobs_to_flush=None)
TIMED = {
    "handle_preemptions": (META,),
    "wait_for_save": (),
    "start_load_kv": (None,),
    "get_transfer_results": (set(),),
    "on_new_request": (SimpleNamespace(request_id="r"),),
    "get_num_new_matched_tokens": (SimpleNamespace(request_id="r"), 0),
    "update_state_after_alloc": (None, None, 16),
    "get_external_cache_hit_sources": (SimpleNamespace(request_id="r"), 16),
    "build_connector_meta": (output(),),
    "update_connector_output": (SimpleNamespace(failed_recving=None),),
    "take_events": (),
}


@pytest.mark.parametrize("name", TIMED)
def test_what_vllms_part_takes_counts_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    clock = Clock()
    monkeypatch.setattr("nixl_tiers.vllm.connector.perf_counter", clock)
    loads = SimpleNamespace(failed_recving=set(), finished_recving=set())
    results = {"get_transfer_results": loads, "take_events": (), "build_connector_meta": SimpleNamespace()}.get(name)

    def takes(*_: object, **__: object) -> Any:
        clock.now += 0.25
        return results

    if not hasattr(OffloadingConnector, name):
        pytest.skip(f"this vLLM has no {name}")
    monkeypatch.setattr(OffloadingConnector, name, takes)
    connector: Any = object.__new__(NixlTiersConnector)
    connector._connector_metadata = META
    connector._loading, connector._withdrawn, connector._anticipates = {}, [], False
    connector._arrivals = Arrivals()
    nothing = SimpleNamespace(begin=lambda step: None, end=lambda: None)
    connector._worker = SimpleNamespace(step_clock=nothing, flush=lambda: None, take_failed_loads=set)
    connector._manager = SimpleNamespace(
        in_doubt=False,
        only_source=lambda *_: None,
        salt_of=lambda *_: None,
        began_at=lambda *_: None,
        scheduled=lambda _: 7,
    )
    for _ in range(2):
        getattr(connector, name)(*TIMED[name])
        clock.now += 1000.0
    assert connector._own_time.seconds == 0.5


@pytest.mark.parametrize("behind", [0, 1], ids=["synchronous", "the worker is a step behind"])
def test_the_time_before_a_first_token_ends_with_the_step_that_computes_the_prompts_last_token(behind: int) -> None:
    tokens = FirstTokens()
    tokens.arrived("a", 100, 1.0)
    tokens.arrived("b", 10, 2.0)
    tokens.scheduled(output({"a": 20}, {"a": 50}), 7)
    assert not tokens.ending
    tokens.scheduled(output({"b": 0}, {"a": 30, "b": 10}), 8)
    assert tokens.ending
    assert tokens.ended(7, 5.0) == []
    tokens.scheduled(output({}, {"b": 1}), 9)
    assert tokens.ended(8 + behind, 6.0) == [5.0, 4.0]
    tokens.scheduled(output({}, {"a": 1, "b": 1}), 10)
    assert not tokens.ending


@pytest.mark.parametrize("how", ["finished", "preempted"])
def test_a_request_without_a_first_token_leaves_nothing_behind(how: str) -> None:
    tokens = FirstTokens()
    for name in ("queued", "begun"):
        tokens.arrived(name, 100, 1.0)
    tokens.scheduled(output({"begun": 0}, {"begun": 50}), 0)
    tokens.scheduled(output(**{how: {"queued", "begun"}}), 1)
    assert (tokens.open, tokens._computing) == ({}, {})
    tokens.scheduled(output({"begun": 0}, {"begun": 100}), 2)
    assert not tokens.ending


@pytest.fixture
def rig() -> Iterator[ManagerRig]:
    rig = ManagerRig()
    yield rig
    rig.manager.shutdown()


def test_what_the_connector_takes_is_a_metric(rig: ManagerRig) -> None:
    """Both ends of a NixlTiersConnector, without an engine between them."""
    scheduler: Any = object.__new__(NixlTiersConnector)
    scheduler.connector_scheduler = ConnectorScheduler(rig.manager, 2).scheduler
    scheduler.connector_worker = scheduler._kv_cache_manager = None
    scheduler._bounding_group_ids, scheduler._anticipates, scheduler._arrivals = (), False, Arrivals()
    scheduler._own_times = rig.manager.times_are_published(512, scheduler._own_time)
    worker: Any = object.__new__(NixlTiersConnector)
    worker._worker = SimpleNamespace(publish_own_time=rig.region.publish_own_time)
    worker._own_time.seconds = 0.25

    def metrics() -> dict[str, Any]:
        stats = scheduler.get_kv_connector_stats()
        return {} if stats is None else {name.removeprefix("nixl_tiers:"): v for name, v in stats.data["data"].items()}

    first = metrics()
    assert first["connector_steps"] == {(): 0.0}
    assert first["connector_seconds"][("worker",)] == 0.0
    assert first["connector_first_token_seconds"] == {(): []}
    request = ConnectorScheduler.make("r", HASHES)
    scheduler.on_new_request(request)
    meta = scheduler.build_connector_meta(output({"r": 0}, {"r": TOKENS}))
    assert "connector_first_token_seconds" not in metrics(), "the workers have not ended the step"
    worker._connector_metadata = meta
    worker.clear_connector_metadata()
    assert worker._connector_metadata is None
    last = metrics()
    assert last["connector_steps"] == {(): 1.0}
    assert last["connector_seconds"][("worker",)] == 0.25
    assert last["connector_seconds"][("scheduler",)] > 0.0
    (sample,) = last["connector_first_token_seconds"][()]
    assert 0.25 < sample < 0.25 + scheduler._own_time.seconds


def test_a_pause_is_not_the_connectors_time(rig: ManagerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    own = rig.manager.times_are_published(512).scheduler
    clock = Clock()
    monkeypatch.setattr("nixl_tiers.vllm.pause.time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(rig.manager._pause, "can_only_wait", lambda: True)

    def pause(_: float) -> None:
        clock.now += 0.5

    monkeypatch.setattr(rig.coordinator.changed, "wait", pause)
    rig.request("r", *keys_of(1))
    rig.manager.on_schedule_end(ScheduleEndContext((), ()))
    assert own.seconds == -0.5, "and the connector adds what the whole call took"
