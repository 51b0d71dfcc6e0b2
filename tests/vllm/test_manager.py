from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _create_req_context
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.config import schema as tiers_config
from nixl_tiers.core.chain_rows import Chain
from nixl_tiers.core.copies import LoadPlan
from nixl_tiers.core.lookup import Lookup, Scan
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.rows import CPU
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.events import EventLog
from nixl_tiers.vllm.manager import NixlTiersManager
from nixl_tiers.vllm.metrics import place_label
from nixl_tiers.vllm.pause import PAUSE_S
from tests.support.control_words import mark_partial
from tests.support.file_tier import file_tier, files_tier

GEOMETRY = Geometry(cells=2, cell_payload=8192, sub_blocks=2)
ROWS = 4
STEP = ScheduleEndContext((), ())


class ManagerRig:
    """A manager over a real coordinator, with host memory only by default; the test acts as the workers."""

    def __init__(
        self,
        groups: tuple[int, ...] = (0,),
        geometry: Geometry = GEOMETRY,
        report_s: float = 0.0,
        storage: Sequence[dict[str, Any]] = (),
        **fields: Any,
    ) -> None:
        cpu = {"type": "cpu", "capacity": ROWS * geometry.row_bytes}
        config = tiers_config.load({"tiers": [cpu, *storage], **fields})
        self.region = HostRegion.create(geometry, ROWS)
        coordinator = Coordinator.open(config, Namespace.of({"test": 1}), self.region)
        self.coordinator = coordinator
        self.manager = NixlTiersManager(coordinator, config, groups, EventLog(coordinator, 64), report_s=report_s)

    def request(self, name: str, *keys: bytes) -> ReqContext:
        context = context_of(name, *keys)
        self.manager.on_new_request(context)
        return context

    def store(self, context: ReqContext, *keys: bytes, cells: tuple[int, ...] = (0, 1)) -> list[bytes]:
        """Offer keys, and have the workers of `cells` report that they wrote every accepted row."""
        output = self.manager.prepare_store(keys, context)
        spec = output.store_spec
        for cell in cells:
            self.region.mark(spec.rows, cell, spec.store_seq, True)
        self.manager.complete_store(set(output.keys_to_store), context)
        self.manager.on_schedule_end(STEP)
        return output.keys_to_store

    def events(self) -> list[tuple[bool, list[bytes]]]:
        return [(event.removed, list(event.keys)) for event in self.manager.take_events()]


@pytest.fixture
def rig() -> Iterator[ManagerRig]:
    rig = ManagerRig()
    yield rig
    rig.manager.shutdown()


def context_of(name: str, *keys: bytes) -> ReqContext:
    """Of a request with these chunks, of 64 tokens each."""
    context = ReqContext(name)
    for index, key in enumerate(keys):
        context.set_offload_key_position(key, 64 * (index + 1))
    return context


def keys_of(count: int, group: int = 0, first: int = 0) -> list[bytes]:
    return [make_offload_key(bytes([first + number]) * 32, group) for number in range(count)]


def test_a_new_request_waits_for_its_turn(rig: ManagerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own connector announces it too."""
    queued: list[str] = []
    monkeypatch.setattr(rig.manager._coordinator._core, "arrive", lambda name, _: queued.append(name))
    rig.request("r")
    assert queued == ["r"]


QUOTAS = {"tenant-a": {"share": "50%", "salt_sha256": hashlib.sha256(b"pepper").hexdigest()}}


@pytest.mark.parametrize(("salt", "stored"), [("pepper", ROWS // 2), ("salt", ROWS), (None, ROWS)])
def test_a_request_belongs_to_the_tenant_of_its_salt(salt: str | None, stored: int) -> None:
    rig = ManagerRig(quotas=QUOTAS)
    try:
        rig.manager.times_are_published(512)
        keys = keys_of(ROWS)
        context = rig.request("r", *keys)
        rig.manager.salt_of("r", salt)
        assert rig.store(context, *keys) == keys[:stored]
    finally:
        rig.manager.shutdown()


def test_a_load_is_prepared_in_one_hold(rig: ManagerRig) -> None:
    """And vLLM is told where its keys come from without any."""
    keys = keys_of(ROWS)
    context = rig.request("r", *keys)
    rig.store(context, *keys)
    held = rig.coordinator.core().entered
    rig.manager.prepare_load(keys, context)
    assert rig.coordinator.core().entered == held + 1
    for key in keys:
        rig.manager.get_load_source(key, context)
    assert rig.coordinator.core().entered == held + 1


@pytest.mark.parametrize("connector", ["NixlTiersConnector", "OffloadingConnector"])
def test_quotas_without_salts_are_warned_of_once(connector: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = ManagerRig(quotas=QUOTAS)
    try:
        if connector == "NixlTiersConnector":
            rig.manager.times_are_published(512)
        for name in ("one", "two"):
            rig.request(name)
        assert sum("quotas have no effect" in line for line in caplog.messages) == (connector == "OffloadingConnector")
    finally:
        rig.manager.shutdown()


def test_a_chunk_written_by_every_worker_is_a_hit(rig: ManagerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = keys_of(2)
    context = rig.request("r", one, two)
    assert rig.manager.lookup(one, context) is LookupResult.MISS
    assert rig.store(context, one, two) == [one, two]
    assert rig.manager.lookup(one, context) is LookupResult.HIT
    assert rig.manager.get_load_source(one, context) is compat.CacheHitSource.HOST
    spec = rig.manager.prepare_load([two, one], context)
    assert len(set(spec.rows.tolist())) == 2
    assert spec.counts == (2,)
    with monkeypatch.context() as held:
        held.setattr(type(rig.coordinator), "core", None)
        assert rig.manager.get_load_source(two, context) is compat.CacheHitSource.HOST, "it takes no lock"
    again = rig.manager.prepare_load([one, two], context)
    assert again.rows.tolist() == spec.rows.tolist()[::-1]
    rig.manager.complete_load({one, two}, context)


def test_load_is_credited_with_the_tokens_that_it_saved(rig: ManagerRig) -> None:
    """By the prefill estimate, from the request's position and vLLM's calls alone."""
    keys = keys_of(3)
    rig.manager._groups.chunk_tokens = [64]
    rig.store(rig.request("writer", *keys), *keys)
    coordinator = rig.manager._coordinator
    for _ in range(5):
        coordinator.prefill.observe(1000, 500.0, 10.0)
    reader = rig.request("reader", *keys)
    assert [rig.manager.lookup(key, reader) for key in keys[1:]] == [LookupResult.HIT] * 2
    rig.manager.prepare_load(keys[1:], reader)
    assert coordinator.counters()["cpu"]["saved_prefill_s"] == 0
    rig.manager.complete_load(set(keys[1:]), reader)
    counters = coordinator.counters()["cpu"]
    assert counters["hit_tokens"] == 128
    assert counters["saved_prefill_s"] == pytest.approx(1.28, rel=0.1)
    assert counters["saved_first_token_s"] + counters["lost_slower_s"] > 0
    assert counters["saved_first_token_s"] < counters["saved_prefill_s"]


def test_speed_of_prefill_is_learned_from_the_times_that_workers_publish(
    rig: ManagerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(rig.manager._coordinator._core.prefill, "limit_step", limits.append)
    rig.manager.times_are_published(2048)
    assert limits == [2048]
    rig.manager.on_schedule_end(ScheduleEndContext(("r",), ()))
    rig.region.publish_step(rig.manager.scheduled([(0, 512, True)]), 2.0)
    rig.manager.get_stats()
    assert [*rig.manager._coordinator._core.prefill.samples()] == [(512, 256.0, 2.0)]


def test_a_step_that_only_decodes_takes_the_short_way(rig: ManagerRig) -> None:
    """After a forward pass no code is in a processor's cache: what counts is in how many functions it is."""
    (key,) = keys_of(1)
    rig.manager.times_are_published(2048)
    context = rig.request("r", key)

    def calls_of_a_step() -> set[str]:
        called: set[str] = set()
        sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name) if event == "call" else None)
        rig.manager.on_schedule_end(STEP)
        numbers.append(rig.manager.scheduled([]))
        sys.setprofile(None)
        return called

    numbers: list[int] = []
    short = {"on_schedule_end", "scheduled"}
    rig.manager.on_schedule_end(ScheduleEndContext(("r",), ()))
    assert calls_of_a_step() == short
    assert rig.manager.lookup(key, context) is LookupResult.MISS
    assert calls_of_a_step() > short, "its look-ups are to be ended"
    assert calls_of_a_step() == short
    rig.region.ranks.publish_weights(0, changing=True)
    assert rig.manager.lookup(key, context) is LookupResult.MISS
    assert calls_of_a_step() > short
    assert calls_of_a_step() > short, "while the weights change"
    rig.region.ranks.publish_weights(0, changing=False)
    assert calls_of_a_step() > short, "a new epoch begins"
    assert calls_of_a_step() == short
    assert numbers == list(range(1, 8)), "every step has its number"


def test_a_row_that_one_worker_did_not_write_is_a_miss(rig: ManagerRig) -> None:
    (key,) = keys_of(1)
    context = rig.request("r", key)
    rig.store(context, key, cells=(0,))
    assert rig.manager.lookup(key, context) is LookupResult.MISS
    assert rig.events() == []


def test_a_running_store_is_pending(rig: ManagerRig) -> None:
    (key,) = keys_of(1)
    context = rig.request("r", key)
    rig.manager.prepare_store([key], context)
    assert rig.manager.lookup(key, rig.request("other", key)) in (LookupResult.HIT_PENDING, LookupResult.MISS)


def test_a_chunk_that_is_present_is_not_stored_again(rig: ManagerRig) -> None:
    one, two = keys_of(2)
    context = rig.request("r", one, two)
    rig.store(context, one)
    assert rig.store(context, one, two) == [two]
    output = rig.manager.prepare_store([one, two], context)
    assert output.keys_to_store == []
    assert len(output.store_spec.rows) == 0


def test_a_full_host_tier_accepts_a_prefix_and_never_returns_none(rig: ManagerRig) -> None:
    keys = keys_of(ROWS + 2)
    context = rig.request("r", *keys)
    output = rig.manager.prepare_store(keys, context)
    assert output.keys_to_store == keys[:ROWS]
    full = rig.manager.prepare_store(keys[ROWS:], context)
    assert full is not None
    assert full.keys_to_store == []


def test_groups_keep_vllms_order_and_get_room_by_position() -> None:
    rig = ManagerRig(groups=(0, 3))
    first, second = keys_of(3, group=0), keys_of(3, group=3)
    context = rig.request("r", *first)
    for index, key in enumerate(second):
        context.set_offload_key_position(key, 64 * (index + 1))
    output = rig.manager.prepare_store([*first, *second], context)
    assert output.keys_to_store == [*first[:2], *second[:2]]
    assert output.store_spec.counts == (2, 2)
    assert len(set(output.store_spec.rows.tolist())) == ROWS
    rig.manager.shutdown()


def test_events_report_stored_and_removed_chunks(rig: ManagerRig) -> None:
    old, new = keys_of(ROWS), keys_of(2, first=100)
    context = rig.request("r", *old)
    rig.store(context, *old)
    assert [(removed, sorted(keys)) for removed, keys in rig.events()] == [(False, old)]
    rig.manager.on_request_finished(context)
    for _ in range(3):
        rig.manager.on_schedule_end(STEP)
    rig.store(rig.request("s", *new), *new)
    (came, gone) = rig.events()
    assert gone[0] is True
    assert len(gone[1]) == 2
    assert set(gone[1]) < set(old)
    assert (came[0], sorted(came[1])) == (False, new)
    rig.manager.reset_cache()
    ((removed, keys),) = rig.events()
    assert removed
    assert set(keys) == (set(old) - set(gone[1])) | set(new)
    assert rig.events() == []


def test_a_reset_forgets_everything(rig: ManagerRig) -> None:
    (key,) = keys_of(1)
    context = rig.request("r", key)
    rig.store(context, key)
    rig.manager.reset_cache()
    assert rig.manager.lookup(key, context) is LookupResult.MISS


@pytest.mark.parametrize("on_reset", ["new_epoch", "keep"])
def test_chunks_offered_again_after_a_reset_are_not_stored(on_reset: str) -> None:
    """vLLM would have the chunks of live requests copied out of blocks that others may own by now."""
    rig = ManagerRig(geometry=Geometry(cells=2, cell_payload=8192), on_reset=on_reset)
    one, two, three = keys_of(3)
    old = rig.request("old", one, two, three)
    assert rig.manager.lookup(one, old) is LookupResult.MISS
    assert rig.store(old, one) == [one]
    rig.manager.reset_cache()
    assert rig.store(old, one, two) == []
    stale = rig.request("new", one, two, three)  # hits a block of vLLM's own cache, which was not reset
    assert rig.manager.lookup(two, stale) is LookupResult.MISS
    rig.manager.on_schedule_end(ScheduleEndContext(["new"], ()))
    assert rig.store(stale, one, two, three) == ([two, three] if on_reset == "keep" else [])
    rig.manager.on_request_finished(old)
    rig.manager.on_request_finished(stale)
    rig.manager.reset_cache()
    fresh = rig.request("fresh", one, two)
    assert rig.manager.lookup(two, fresh) is LookupResult.MISS
    assert rig.store(fresh, one, two) == [one, two]
    rig.manager.reset_cache()
    rig.manager.on_schedule_end(ScheduleEndContext((), ["fresh"]))
    assert not rig.manager.in_doubt, "the reset preempted all"
    assert rig.store(fresh, one) == [], "and its blocks are still those of before"
    rig.manager.shutdown()


@pytest.mark.parametrize(("own", "part", "loads"), [(0, 0, False), (0, 64, True), (32, 32, False), (0, 16, False)])
def test_chunks_of_several_blocks_go_on_being_stored_after_a_reset(own: int, part: int, loads: bool) -> None:
    """NixlTiersConnector tells whether a request began with something of vLLM's own cache (`own` tokens, and `part` of
    them with what it loads and what is less than a block), which was not reset: half a chunk shows in no look-up."""
    rig = ManagerRig(geometry=Geometry(cells=2, cell_payload=8192, sub_blocks=2))
    rig.manager.times_are_published(512)
    one, two = keys_of(2)
    old = rig.request("old", one)
    rig.manager.began_at("old", 0)
    rig.manager.lookup(one, old)
    rig.manager.on_schedule_end(ScheduleEndContext(["old"], ()))
    rig.manager.reset_cache()
    assert rig.manager.in_doubt
    if loads:  # what was stored since
        rig.manager.began_at("since", 0)
        assert rig.store(rig.request("since", one), one) == [one]
    new = rig.request("new", one, two)
    rig.manager.began_at("new", own)
    rig.manager.lookup(one, new)
    if loads:
        rig.manager.prepare_load([one], new)
        rig.manager.on_schedule_end(STEP)
        rig.manager.complete_load([one], new)
    rig.manager.began([("new", part)])
    rig.manager.on_schedule_end(ScheduleEndContext(["new"], ()))
    assert rig.store(new, two) == ([two] if part == 0 or loads else [])
    for context in (old, new):
        rig.manager.on_request_finished(context)
    assert not rig.manager._own_hits.has_none("new"), "and is forgotten"
    rig.manager.shutdown()


def test_stats_are_differences_and_no_work_is_ever_pending(rig: ManagerRig) -> None:
    (key,) = keys_of(1)
    context = rig.request("r", key)
    rig.manager.get_stats()
    rig.store(context, key)
    values = rig.manager.get_stats().data["data"]
    assert values["nixl_tiers:added_chunks"] == {("cpu", "stored"): 1}
    (((tier, place), used),) = values["nixl_tiers:used_bytes"].items()
    assert (tier, used) == ("cpu", GEOMETRY.row_bytes)
    assert len(place) == len(place_label(""))
    assert rig.manager.get_stats() is None
    assert rig.manager.has_pending_work() is False


def test_numbers_are_reported_seldom_while_requests_run_and_always_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = ManagerRig(report_s=1e9)
    (key,) = keys_of(1)
    try:
        first = rig.request("first", key)
        second = rig.request("second", key)
        rig.manager.get_stats()
        taken: list[None] = []
        monkeypatch.setattr(rig.manager._meter, "take_published", lambda: taken.append(None))
        rig.store(first, key)
        rig.manager.scheduled([(0, 512, True)])
        rig.manager.on_request_finished(first)
        assert rig.manager.get_stats() is None
        assert taken, "the times of steps are"
        rig.manager.on_request_finished(second)
        values = rig.manager.get_stats().data["data"]
        assert values["nixl_tiers:added_chunks"] == {("cpu", "stored"): 1}, "what was not reported is not lost"
        assert rig.manager.get_stats() is None, "nothing has changed"
        assert len(taken) == 3
    finally:
        rig.manager.shutdown()


def test_a_chunk_is_a_miss_once_a_request_however_often_it_is_looked_up(rig: ManagerRig) -> None:
    one, two, three = keys_of(3)
    rig.store(rig.request("writer", one), one)
    reader = rig.request("reader", one, two, three)
    for _ in range(3):  # a request that finds no room in the engine is looked up again at every step
        assert rig.manager.lookup(one, reader) is LookupResult.HIT
        assert rig.manager.lookup(two, reader) is LookupResult.MISS
        rig.manager.on_schedule_end(STEP)
    values = rig.manager.get_stats().data["data"]
    assert values["nixl_tiers:misses"]["none", "never_stored"] == 2, "vLLM does not look up what is behind a miss"
    rig.manager.on_request_finished(reader)
    assert rig.manager.lookup(two, rig.request("reader", one, two)) is LookupResult.MISS
    assert rig.manager.get_stats().data["data"]["nixl_tiers:misses"]["none", "never_stored"] == 1


def test_misses_are_the_same_however_many_holds_it_takes_to_count_them(
    rig: ManagerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nixl_tiers.vllm.lookups.COUNT_BATCH", 2)
    keys = keys_of(ROWS)
    rig.store(rig.request("writer", *keys[1:]), *keys[1:])
    assert rig.manager.lookup(keys[0], rig.request("reader", *keys)) is LookupResult.MISS
    values = rig.manager.get_stats().data["data"]
    assert values["nixl_tiers:misses"]["none", "never_stored"] == ROWS, "what is behind a miss has its reason"


class ScriptedCoordinator:
    """A coordinator, and its core, with scripted answers, for what host memory alone cannot show."""

    def __init__(self, answer: Lookup, source: str) -> None:
        self.answer, self.where = answer, source
        self.changed = self
        self.entered = 0
        self.here = None
        self.prefill = SimpleNamespace(observe=lambda *_: None)
        self.region = SimpleNamespace(
            geometry=Geometry(cells=1, cell_payload=8192),
            ranks=SimpleNamespace(weights=(0,)),
            step_seconds=lambda step: None,
        )
        self.namespace = Namespace.of({"test": 1})
        self.restricted: dict[str, set[int]] = {}
        self.waits_s: list[float] = []
        self.copied_at_most: list[bool] = []
        self.close_timeout_s = -1.0
        self.times = PRODUCTION

    def core(self) -> ScriptedCoordinator:
        return self

    def now(self) -> float:
        return 7.0

    def look_up_keys(self, request: str, keys: Sequence[bytes], *_: Any, **__: Any) -> list[Lookup]:
        return [self.answer for _ in keys]

    def count_misses(self, request: str, keys: list[bytes], now: float, last: None) -> None:
        pass

    def look_up(self, request: str, chain: Chain, start: int, now: float, first: int) -> Scan:
        tokens = len(chain.groups[0].keys) * chain.groups[0].chunk_tokens
        return Scan(self.answer is Lookup.PENDING, start if self.answer is Lookup.MISS else tokens)

    def sources(self, keys: list[bytes]) -> list[str]:
        return [self.where for _ in keys]

    def arrive(self, request: str, wishes: RequestWishes) -> None:
        if wishes.allowed is not None:
            self.restricted[request] = {*wishes.allowed}

    def close(self, timeout_s: float) -> None:
        self.close_timeout_s = timeout_s

    def end_step(self, began: Iterable[str], preempted: Iterable[str]) -> None:
        pass

    def prepare_load(self, request: str, keys: list[bytes], *, tokens: list[int], end: int) -> LoadPlan:
        return LoadPlan(list(range(len(keys))), [CPU] * len(keys), {})

    def complete_load(self, request: str, took_s: float | None, *, at_most: bool, failed: bool) -> None:
        assert (took_s, failed) == (0.0, False)
        self.copied_at_most.append(at_most)

    def reset(self, *, changed: bool) -> None:
        pass

    def finish(self, request: str) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        self.waits_s.append(timeout_s)

    def __enter__(self) -> Self:
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("source", "named"), [("cpu", "HOST"), ("file", "DISK"), ("s3", "EXTERNAL_UNSPECIFIED")])
def test_a_hit_names_its_tier_and_waiting_is_a_pending_hit(source: str, named: str, tmp_path: Any) -> None:
    config = tiers_config.load(
        {
            "tiers": [
                {"type": "cpu", "capacity": "1MiB"},
                {"type": "s3", "bucket": "bucket", "capacity": "1MiB"},
                file_tier(tmp_path, "1MiB"),
            ]
        }
    )
    coordinator = ScriptedCoordinator(Lookup.PENDING, source)
    manager = NixlTiersManager(coordinator, config, (0,), None)  # type: ignore[arg-type]
    (key,) = keys_of(1)
    context = context_of("r", key)
    assert manager.lookup(key, context) is LookupResult.HIT_PENDING
    assert manager.get_load_source(key, context) is compat.CacheHitSource[named]
    assert list(manager.take_events()) == []
    manager.shutdown()
    assert 0 <= coordinator.close_timeout_s == PRODUCTION.shutdown_s <= 0.5


def scripted_manager(coordinator: ScriptedCoordinator, **settings: Any) -> NixlTiersManager:
    config = tiers_config.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}]})
    return NixlTiersManager(coordinator, config, (0,), None, **settings)  # type: ignore[arg-type]


class SteppingEngine:
    """What vLLM's scheduler does in a step with requests that each look up one chunk; the test says what becomes of
    them."""

    def __init__(self, *requests: str) -> None:
        self.coordinator = ScriptedCoordinator(Lookup.PENDING, "file")
        self.manager = scripted_manager(self.coordinator)
        self.manager.windows_are_known({0: 1})  # so that each look-up is answered by itself
        (self.key,) = keys_of(1)
        self.contexts = {name: context_of(name, self.key) for name in requests}
        for context in self.contexts.values():
            self.manager.on_new_request(context)

    def step(
        self, *, pending: str = "", hit: str = "", load: str = "", begin: str = "", preempted: tuple[str, ...] = ()
    ) -> bool:
        """Whether the step paused. The requests (names of one letter) whose look-up is pending, those whose look-up is
        a hit, those of them whose load is prepared, and those that run for the first time."""
        for answer, names in ((Lookup.PENDING, pending), (Lookup.HIT, hit)):
            self.coordinator.answer = answer
            for name in names:
                self.manager.lookup(self.key, self.contexts[name])
        for name in load:
            self.manager.prepare_load([self.key], self.contexts[name])
        before = len(self.coordinator.waits_s)
        self.manager.on_schedule_end(ScheduleEndContext(list(begin), preempted))
        assert len(self.coordinator.waits_s) <= before + 1
        return len(self.coordinator.waits_s) > before

    def load_ends(self, name: str) -> None:
        self.manager.complete_load([self.key], self.contexts[name])


def test_a_step_in_which_all_requests_wait_for_storage_pauses() -> None:
    """Otherwise the engine spins, and its spinning keeps movers and copies from running."""
    engine = SteppingEngine("a", "b")
    assert not engine.step(), "no request waits"
    assert engine.step(pending="ab")
    assert engine.coordinator.waits_s == [PAUSE_S]
    assert not engine.step(pending="a", begin="b"), "the other request computes"
    assert not engine.step(pending="a"), "it still does"
    engine.manager.on_request_finished(engine.contexts["b"])
    assert engine.step(pending="a")
    assert not engine.step(), "it may compute by now"


def test_a_step_pauses_while_one_request_waits_for_its_copy_and_another_for_storage() -> None:
    engine = SteppingEngine("a", "b")
    assert not engine.step(hit="a", load="a", pending="b"), "the load is submitted to the workers after this call"
    assert engine.step(pending="b")
    assert engine.step(pending="b")
    engine.load_ends("a")
    assert not engine.step(pending="b", begin="a")
    assert not engine.step(pending="b"), "a computes"


def test_a_step_pauses_while_all_requests_wait_for_their_copies() -> None:
    engine = SteppingEngine("a", "b")
    assert not engine.step(hit="ab", load="ab")
    assert engine.step()
    engine.load_ends("a")
    assert not engine.step(begin="a")
    engine.manager.on_request_finished(engine.contexts["a"])
    assert engine.step(), "b still waits for its copy"


def test_a_step_pauses_if_requests_behind_a_load_were_not_even_looked_up() -> None:
    """vLLM ends its search for requests to run at the first one that its blocks have no room for."""
    engine = SteppingEngine("a", "b", "c", "d")
    assert not engine.step(hit="a", load="a")
    assert engine.step(hit="b"), "no blocks for b while a loads, and c and d were not looked at"


def test_a_request_that_computed_before_and_was_preempted_never_pauses_a_step_in_which_it_may_compute() -> None:
    engine = SteppingEngine("a", "b")
    assert not engine.step(pending="b", begin="a")
    assert not engine.step(pending="b", preempted=("a",))
    assert not engine.step(pending="b"), "a may have been resumed"
    assert engine.step(pending="ab"), "a waits for storage again"
    assert not engine.step(pending="b", hit="a", load="a")
    assert engine.step(pending="b"), "and then for its copy"
    engine.load_ends("a")
    assert not engine.step(pending="b")


def test_a_pending_lookup_of_a_request_that_computes_nevertheless_pauses_no_step() -> None:
    """vLLM decides for windowed KV groups from several look-ups."""
    engine = SteppingEngine("a")
    assert not engine.step(pending="a", begin="a")


def test_a_reset_ends_the_loads_that_steps_pause_for() -> None:
    engine = SteppingEngine("a", "b")
    engine.step(hit="a", load="a", pending="b")
    engine.manager.reset_cache()
    assert not engine.step(), "no request is known to wait"


def test_a_copy_is_known_to_take_its_time_only_if_the_engine_computes_nothing_meanwhile() -> None:
    """vLLM reports its end when the step ends beside which it runs, however much that computes."""
    engine = SteppingEngine("a", "b", "c")
    engine.step(hit="a", load="a")
    engine.step()
    engine.load_ends("a")
    assert engine.coordinator.copied_at_most == [False]
    engine.step(hit="b", load="b", begin="a")
    engine.load_ends("b")
    engine.step(hit="c", load="c")  # a goes on, and b may begin
    engine.load_ends("c")
    assert engine.coordinator.copied_at_most[1:] == [True, True]


def test_a_pause_is_short() -> None:
    """A request that arrives meanwhile waits for its end."""
    assert PAUSE_S <= 0.001


@pytest.mark.parametrize(
    ("wish", "allowed"),
    [
        (None, None),
        ([{}], [0, 1, 2]),
        ([], []),
        ([{"medium": "CPU"}], []),
        ([{"medium": "STORAGE", "locality": "LOCAL"}], [0, 1]),
        ([{"locality": "remote"}], [1, 2]),
        ([{"medium": "storage"}], [0, 1, 2]),
    ],
)
def test_a_request_may_restrict_its_storage_tiers(
    wish: list[Any] | None, allowed: list[int] | None, tmp_path: Path
) -> None:
    config = tiers_config.load(
        {
            "tiers": [
                {"type": "cpu", "capacity": "1MiB"},
                file_tier(tmp_path / "own", "1MiB"),
                files_tier(tmp_path / "shared", "1MiB"),
                {"type": "s3", "bucket": "bucket", "capacity": "1MiB"},
            ]
        }
    )
    coordinator = ScriptedCoordinator(Lookup.MISS, "cpu")
    manager = NixlTiersManager(coordinator, config, (0,), None)  # type: ignore[arg-type]
    params = None if wish is None else {"kv_load_tiers": wish}
    manager.on_new_request(
        _create_req_context(SimpleNamespace(request_id="r", kv_transfer_params=params, kv_hints=None))
    )
    assert coordinator.restricted == ({} if allowed is None else {"r": {*allowed}})


def test_replicas_that_step_together_never_pause() -> None:
    coordinator = ScriptedCoordinator(Lookup.PENDING, "file")
    manager = scripted_manager(coordinator, pause_s=0.0)
    (key,) = keys_of(1)
    context = context_of("r", key)
    manager.on_new_request(context)
    manager.lookup(key, context)
    manager.on_schedule_end(STEP)
    assert coordinator.waits_s == []


def test_a_root_that_only_vllms_own_cache_hits_outlives_its_leaves(rig: ManagerRig) -> None:
    chain = [make_offload_key(bytes([n]) * 32, 0) for n in range(4)]
    first = rig.request("first", *chain)
    rig.store(first, *chain)
    rig.manager.on_request_finished(first)
    again = rig.request("again", *chain)
    # The engine has the first two chunks itself, and looks up only what is beyond.
    assert [rig.manager.lookup(key, again) for key in chain[2:]] == [LookupResult.HIT] * 2
    rig.manager.prepare_load(chain[2:], again)
    rig.manager.complete_load(chain[2:], again)
    rig.manager.on_request_finished(again)
    rig.manager.on_schedule_end(STEP)
    other = make_offload_key(b"x" * 32, 0)
    assert rig.store(rig.request("other", other), other) == [other]
    late = rig.request("late", *chain)
    assert [rig.manager.lookup(key, late) for key in chain] == [LookupResult.HIT] * 3 + [LookupResult.MISS]


def test_rows_whose_blocks_may_be_written_to_before_the_copy_are_no_hits(rig: ManagerRig) -> None:
    one, two, three = keys_of(3)
    context = rig.request("r", one, two, three)
    output = rig.manager.prepare_store([one, two], context)
    rig.manager.spoil([two, three])
    for cell in (0, 1):
        rig.region.mark(output.store_spec.rows, cell, output.store_spec.store_seq, True)
    rig.manager.complete_store({one, two}, context)
    rig.manager.on_schedule_end(STEP)
    later = rig.request("later", one, two, three)
    assert [rig.manager.lookup(key, later) for key in (one, two)] == [LookupResult.HIT, LookupResult.MISS]
    assert rig.store(later, two, three) == [two, three]
    again = rig.request("again", two, three)
    assert [rig.manager.lookup(key, again) for key in (two, three)] == [LookupResult.HIT, LookupResult.HIT]


def test_chunks_of_a_failed_load_are_dropped(rig: ManagerRig) -> None:
    one, two = keys_of(2)
    context = rig.request("r", one, two)
    rig.store(context, one, two)
    assert rig.manager.lookup(one, context) is LookupResult.HIT
    rig.manager.prepare_load([one], context)
    assert rig.manager.load_failed("r")
    rig.manager.complete_load({one}, context)
    rig.manager.on_schedule_end(STEP)
    assert rig.manager.lookup(two, context) is LookupResult.MISS
    other = rig.request("other", one, two)
    assert rig.manager.lookup(one, other) is LookupResult.MISS
    assert rig.manager.lookup(two, other) is LookupResult.HIT
    assert (True, [one]) in rig.events()


def test_a_failed_load_of_another_connector_is_ignored(rig: ManagerRig) -> None:
    """vLLM's MultiConnector reports to each of its connectors the requests that failed in any of them."""
    (key,) = keys_of(1)
    context = rig.request("r", key)
    rig.store(context, key)
    assert not rig.manager.load_failed("r"), "it has no open load here"
    assert rig.manager.lookup(key, context) is LookupResult.HIT
    rig.manager.prepare_load([key], context)
    rig.manager.complete_load({key}, context)
    assert not rig.manager.load_failed("r")
    assert rig.manager.lookup(key, context) is LookupResult.HIT
    assert rig.manager.lookup(key, rig.request("other", key)) is LookupResult.HIT


@pytest.mark.parametrize("end", ["reset_cache", "on_request_finished"])
def test_a_failed_load_is_forgotten_with_its_request(rig: ManagerRig, end: str) -> None:
    (key,) = keys_of(1)
    context = rig.request("r", key)
    rig.store(context, key)
    assert rig.manager.lookup(key, context) is LookupResult.HIT
    rig.manager.prepare_load([key], context)
    assert rig.manager.load_failed("r")
    if end == "reset_cache":
        rig.manager.reset_cache()
        assert not rig.manager.load_failed("r"), "vLLM completes no load of before a reset"
        assert rig.manager.lookup(key, context) is LookupResult.MISS
        rig.manager.on_schedule_end(ScheduleEndContext((), ["r"]))
    else:
        rig.manager.complete_load({key}, context)
        rig.manager.on_request_finished(context)
        rig.manager.on_schedule_end(STEP)
        context = rig.request("r", key)
    assert rig.store(context, key) == [key]
    assert rig.manager.lookup(key, context) is LookupResult.HIT
    rig.manager.prepare_load([key], context)
    rig.manager.complete_load({key}, context)
    assert rig.manager.lookup(key, context) is LookupResult.HIT


def test_an_incomplete_chunk_is_counted_as_incomplete_and_not_as_failed(rig: ManagerRig) -> None:
    first, second, third = keys_of(3)
    context = rig.request("r", first, second, third)
    spec = rig.manager.prepare_store([first, second, third], context).store_spec
    for cell in (0, 1):
        rig.region.mark(spec.rows[:1], cell, spec.store_seq, True)
        mark_partial(rig.region, spec.rows[1:2], cell, spec.store_seq, 0, whole=False)
        rig.region.mark(spec.rows[2:], cell, spec.store_seq, cell == 0)
    rig.manager.complete_store({first, second, third}, context)
    stats = rig.manager._coordinator.counters()["cpu"]
    assert [stats[name] for name in ("stored", "incomplete", "failed", "rows")] == [1, 1, 1, 1]
