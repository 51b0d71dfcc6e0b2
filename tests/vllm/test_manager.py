from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _create_req_context
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as tiers_config
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.events import EventLog
from nixl_tiers.vllm.manager import NixlTiersManager
from nixl_tiers.vllm.pause import PAUSE_S
from tests.support.file_tier import file_tier, files_tier
from tests.support.vllm_lookups import hashes
from tests.vllm.test_chains import Engine

GEOMETRY = Geometry(cells=2, cell_payload=8192, sub_blocks=2)
ROWS = 4
CPU_TIER = {"type": "cpu", "capacity": "1MiB"}
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
    entered = rig.coordinator.core().entered
    spec = rig.manager.prepare_load([two, one], context)
    assert rig.coordinator.core().entered == entered + 1
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


def test_what_is_present_and_what_finds_no_room_is_not_stored(rig: ManagerRig) -> None:
    """And vLLM never gets None."""
    keys = keys_of(ROWS + 2)
    context = rig.request("r", *keys)
    spec = rig.manager.prepare_store(keys, context).store_spec
    full = rig.manager.prepare_store(keys[ROWS:], context)
    assert (len(spec.rows), full.keys_to_store, len(full.store_spec.rows)) == (ROWS, [], 0)
    for cell in (0, 1):
        rig.region.mark(spec.rows, cell, spec.store_seq, True)
    rig.manager.complete_store(keys[:ROWS], context)
    assert rig.store(context, *keys[: ROWS - 1]) == []


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


ANSWERS = {"pending": "HIT_PENDING", "hit": "HIT"}


class SteppingEngine(Engine):
    """What vLLM's scheduler does in a step with requests that each look up one chunk, by words: a verb and requests
    (names of one letter). `pending` is in storage, `hit` in host memory; `loaded`: the load has ended."""

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        super().__init__(windows=(1,), pause_s=pause_s)
        chunks = hashes(2)
        self.keys = dict(zip(ANSWERS, [make_offload_key(each, 0) for each in chunks], strict=True))
        self.store([self.keys["pending"]])
        self.put([self.keys["hit"]])
        self.contexts = {name: self.vllm.request(name, chunks).req_context for name in "abcd"}
        self.waits_s: list[float] = []
        changed: Any = nullcontext()
        changed.wait = self.waits_s.append
        self.manager._pause._changed = changed

    def runs(self, step: str) -> bool:
        """Whether the step paused."""
        begin: list[str] = []
        preempted: list[str] = []
        for word in step.split():
            verb, _, names = word.partition(":")
            for name in names:
                context = self.contexts[name]
                match verb:
                    case "pending" | "hit":
                        assert self.manager.lookup(self.keys[verb], context) is LookupResult[ANSWERS[verb]]
                    case "load":
                        self.manager.prepare_load([self.keys["hit"]], context)
                    case "loaded":
                        self.manager.complete_load([self.keys["hit"]], context)
                    case "ends":
                        self.manager.on_request_finished(context)
                    case "begin":
                        begin.append(name)
                    case "preempted":
                        preempted.append(name)
            if verb == "reset":
                self.manager.reset_cache()
        before = len(self.waits_s)
        self.manager.on_schedule_end(ScheduleEndContext(begin, preempted))
        assert self.waits_s[before:] in ([], [PAUSE_S])
        return len(self.waits_s) > before


PAUSES = {
    "storage, until a may compute": """= 0 | pending:ab = 1 | pending:a begin:b = 0 | pending:a = 0 |
        ends:b pending:a = 1 | = 0""",
    "a copy, submitted after the step, and storage": """hit:a load:a pending:b = 0 | pending:b = 1 | pending:b = 1 |
        loaded:a pending:b begin:a = 0 | pending:b = 0""",
    "copies": "hit:ab load:ab = 0 | = 1 | loaded:a begin:a = 0 | ends:a = 1",
    "requests behind a load that vLLM does not look at": "hit:a load:a = 0 | hit:b = 1",
    "preempted": """pending:b begin:a = 0 | pending:b preempted:a = 0 | pending:b = 0 | pending:ab = 1 |
        pending:b hit:a load:a = 0 | pending:b = 1 | loaded:a pending:b = 0""",
    "a windowed group's look-up of one that computes": "pending:a begin:a = 0",
    "a reset": "hit:a load:a pending:b = 0 | reset = 0",
}


@pytest.mark.parametrize("steps", PAUSES.values(), ids=PAUSES)
def test_a_step_pauses_shortly_if_its_requests_only_wait(steps: str) -> None:
    """Otherwise the engine spins, and its spinning keeps movers and copies from running. 1: it pauses."""
    engine, together = SteppingEngine(), SteppingEngine(pause_s=0.0)
    for step, _, pauses in (line.partition("=") for line in steps.split("|")):
        assert engine.runs(step) is bool(int(pauses)), step
        assert not together.runs(step), "replicas that step together never do"
    assert PAUSE_S <= 0.001, "a request that arrives meanwhile waits for its end"
    for each in (engine, together):
        each.manager.shutdown()


def test_a_copy_is_known_to_take_its_time_only_if_the_engine_computes_nothing_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM reports its end when the step ends beside which it runs, however much that computes."""
    engine = SteppingEngine()
    at_most: list[bool] = []
    monkeypatch.setattr(engine.coordinator, "complete_load", lambda *_, **how: at_most.append(how["at_most"]))
    for step in ("hit:a load:a", "", "loaded:a hit:b load:b begin:a", "loaded:b hit:c load:c", "loaded:c"):
        engine.runs(step)
    assert at_most == [False, True, True]
    engine.manager.shutdown()


@pytest.mark.parametrize(("tier", "named"), [("file", "DISK"), ("s3", "EXTERNAL_UNSPECIFIED")])
def test_a_hit_names_its_tier(tier: str, named: str, tmp_path: Path) -> None:
    places = {"file": file_tier(tmp_path, "1MiB"), "s3": {"type": "s3", "bucket": "bucket", "capacity": "1MiB"}}
    engine = Engine(windows=(1,), tier=places[tier])
    (chunk,) = hashes(1)
    key = make_offload_key(chunk, 0)
    engine.put([key])
    engine.core.host.index[key].source = tier
    context = engine.vllm.request("r", [chunk]).req_context
    assert engine.manager.lookup(key, context) is LookupResult.HIT
    engine.manager.prepare_load([key], context)
    assert engine.manager.get_load_source(key, context) is compat.CacheHitSource[named]
    engine.manager.shutdown()


@pytest.mark.parametrize(
    ("wish", "allowed"),
    [
        (None, None),
        ([{}], {0, 1, 2}),
        ([], set()),
        ([{"medium": "CPU"}], set()),
        ([{"medium": "STORAGE", "locality": "LOCAL"}], {0, 1}),
        ([{"locality": "remote"}], {1, 2}),
        ([{"medium": "storage"}], {0, 1, 2}),
    ],
)
def test_a_request_may_restrict_its_storage_tiers(
    wish: list[Any] | None, allowed: set[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"type": "s3", "bucket": "bucket", "capacity": "1MiB"}
    tiers = [CPU_TIER, file_tier(tmp_path / "own", "1MiB"), files_tier(tmp_path / "shared", "1MiB"), shared]
    config = tiers_config.load({"tiers": tiers})
    coordinator = Coordinator(config, Namespace.of({"test": 1}), HostRegion.create(GEOMETRY, ROWS))
    wishes: list[RequestWishes] = []
    monkeypatch.setattr(coordinator._core, "arrive", lambda _, wish: wishes.append(wish))
    manager = NixlTiersManager(coordinator, config, (0,), None)
    params = None if wish is None else {"kv_load_tiers": wish}
    manager.on_new_request(
        _create_req_context(SimpleNamespace(request_id="r", kv_transfer_params=params, kv_hints=None))
    )
    assert [each.allowed for each in wishes] == [allowed]
    manager.shutdown()


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
