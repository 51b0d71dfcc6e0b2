"""A request's chain through vLLM's own look-up function: what it loads, what it waits for, and what that costs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import make_offload_key

from bench.lookups import TOKENS, VllmLookups, hashes
from nixl_tiers.cascade.cold_table import take_all
from nixl_tiers.chunk import Geometry, Key, Namespace, Outcome
from nixl_tiers.config import schema
from nixl_tiers.coordinator import Coordinator
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.vllm.manager import NixlTiersManager, _publish
from tests.support.file_tier import file_tier

GEOMETRY = Geometry(cells=1, cell_payload=4096)
ROWS = 64
CHUNKS = 6


class Engine:
    """vLLM's look-ups over a host tier and a file tier, whose mover does what a test says. Computing a chunk takes
    `chunk_s` seconds, and time stands still."""

    def __init__(self, windows: Sequence[int | None] = (None,), chunk_s: float = 1.0) -> None:
        tiers = [
            {"type": "cpu", "capacity": ROWS * GEOMETRY.row_bytes},
            file_tier("/nonexistent/nixl-tiers", 100 * GEOMETRY.row_bytes),
        ]
        config = schema.load({"tiers": tiers, "prefill_tokens_per_s": int(TOKENS / chunk_s)})
        region = HostRegion.create(GEOMETRY, ROWS)
        self.now = 0.0
        self.coordinator = Coordinator(config, Namespace.of({"test": 1}), region, clock=lambda: self.now)
        self.core = self.coordinator._core
        take_all(self.core.events.opened(0, 100))
        self.manager = NixlTiersManager(self.coordinator, config, range(len(windows)), None, pause_s=0.0)
        self.vllm = VllmLookups(self.manager, windows)

    def store(self, keys: Sequence[Key], row_s: float = 0.01) -> None:
        """The file tier holds these, and has loaded rows in so many seconds each before."""
        self.core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
        for rows in (1, 10) * 20:
            self.core.tiers[0].loads.record(rows * GEOMETRY.row_bytes, rows * row_s, 0.0)

    def load_all(self) -> list[Key]:
        loaded = []
        while jobs := self.core.turn(self.now, self.now):
            for job in jobs:
                loaded += [move.key for move in job.moves]
                self.core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), self.now)
        return loaded

    def step(self, state: object, local_tokens: int = 0) -> int | None:
        tokens = self.vllm.look_up(state, local_tokens)
        self.vllm.end_step()
        return tokens


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.manager.shutdown()


def keys_of(chunks: Sequence[bytes], group: int = 0) -> list[Key]:
    return [make_offload_key(chunk, group) for chunk in chunks]


def test_request_waits_for_its_whole_chain_and_loads_it(engine: Engine) -> None:
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    state = engine.vllm.request("r", chunks)
    assert engine.step(state) is None
    assert engine.load_all() == keys_of(chunks)
    assert engine.step(state) == CHUNKS * TOKENS


def test_only_what_vllm_does_not_have_is_promoted(engine: Engine) -> None:
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    state = engine.vllm.request("r", chunks)
    assert engine.step(state, 2 * TOKENS) is None
    assert engine.load_all() == keys_of(chunks)[2:]
    assert engine.step(state, 2 * TOKENS) == (CHUNKS - 2) * TOKENS


def test_declined_chain_is_a_miss() -> None:
    engine = Engine(chunk_s=0.001)
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    assert engine.step(engine.vllm.request("r", chunks)) == 0
    engine.manager.shutdown()


def test_step_in_which_nothing_can_have_changed_scans_no_chain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    scans: list[str] = []
    scan = engine.coordinator.scan
    monkeypatch.setattr(engine.coordinator, "scan", lambda name, *rest: (scans.append(name), scan(name, *rest))[1])
    monkeypatch.setattr(engine.coordinator, "lookup", lambda *_: pytest.fail("a key is looked up by itself"))
    state = engine.vllm.request("r", chunks)
    for _ in range(3):
        assert engine.step(state) is None
    engine.load_all()
    assert engine.step(state) == CHUNKS * TOKENS
    assert scans == ["r"] * 3, "at first, to judge the wait, and when all has come"


def test_what_has_come_is_loaded_when_the_wait_ends(engine: Engine) -> None:
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks)[:3])
    state = engine.vllm.request("first", chunks[:3])
    engine.step(state)
    engine.load_all()
    engine.store(keys_of(chunks))
    state = engine.vllm.request("r", chunks)
    assert engine.step(state) is None
    engine.now = 3.5
    assert engine.step(state) == 3 * TOKENS


def test_windowed_group_loads_its_window_at_the_end_of_the_load() -> None:
    engine = Engine(windows=(None, 2))
    chunks = hashes(CHUNKS)
    engine.store([*keys_of(chunks), *keys_of(chunks, 1)])
    for name in ("first", "second"):  # the first request shows which group is windowed
        state = engine.vllm.request(name, chunks)
        assert engine.step(state) is None
        loaded = engine.load_all()
        assert sorted(loaded) == sorted([*keys_of(chunks), *keys_of(chunks, 1)[-2:]])
        assert engine.step(state) == CHUNKS * TOKENS
        engine.manager.on_request_finished(state.req_context)
        engine.core.reset(keep_tiers=True)
    engine.manager.shutdown()


def test_load_ends_where_the_window_exists() -> None:
    engine = Engine(windows=(None, 2))
    chunks = hashes(CHUNKS)
    engine.store([*keys_of(chunks), *keys_of(chunks, 1)[:4]])
    for name in ("first", "second"):
        state = engine.vllm.request(name, chunks)
        tokens = engine.step(state)
        while tokens is None and engine.load_all():
            tokens = engine.step(state)
        assert tokens == 4 * TOKENS
        engine.manager.on_request_finished(state.req_context)
    engine.manager.shutdown()


def test_windowed_group_promotes_nothing_beyond_the_end_of_the_load() -> None:
    engine = Engine(windows=(None, 2))
    chunks = hashes(CHUNKS)
    engine.store([*keys_of(chunks)[:4], *keys_of(chunks, 1)])
    for name in ("first", "second"):  # the first request shows which group is windowed
        state = engine.vllm.request(name, chunks)
        loaded: list[Key] = []
        while (tokens := engine.step(state)) is None:
            loaded += engine.load_all()
        assert tokens == 4 * TOKENS
        engine.manager.on_request_finished(state.req_context)
        engine.core.reset(keep_tiers=True)
    assert sorted(loaded) == sorted([*keys_of(chunks)[:4], *keys_of(chunks, 1)[2:4]])
    engine.manager.shutdown()


def test_model_of_windowed_groups_only_is_looked_up_key_by_key() -> None:
    engine = Engine(windows=(2,))
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    for name in ("first", "second"):
        state = engine.vllm.request(name, chunks)
        assert engine.step(state) is None
        assert sorted(engine.load_all()) == sorted(keys_of(chunks)[-2:])
        assert engine.step(state) == CHUNKS * TOKENS
        engine.manager.on_request_finished(state.req_context)
        engine.core.reset(keep_tiers=True)
    engine.manager.shutdown()


def test_request_loads_no_more_than_it_asks_for(engine: Engine) -> None:
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    state = engine.vllm.request("r", chunks, max_load_tokens=3 * TOKENS)
    assert engine.step(state) is None
    assert engine.load_all() == keys_of(chunks)[:3]
    assert engine.step(state) == 3 * TOKENS


def test_local_hit_within_a_chunk_does_not_make_a_group_windowed(engine: Engine) -> None:
    """With `max_load_tokens`, vLLM looks up one chunk more than the chain has then."""
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    state = engine.vllm.request("r", chunks, max_load_tokens=TOKENS * 5 // 4)
    for _ in range(3):
        engine.step(state, TOKENS * 3 // 4)
        engine.load_all()
    other = engine.vllm.request("other", chunks)
    engine.step(other)
    engine.load_all()
    assert engine.step(other) == CHUNKS * TOKENS
    assert engine.manager._look_ups.chains.get("other") is not None, "resolved at once"


def test_waiting_request_whose_local_hit_has_grown_still_waits(engine: Engine) -> None:
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    state = engine.vllm.request("r", chunks)
    assert engine.step(state) is None
    assert engine.step(state, TOKENS) is None
    engine.load_all()
    assert engine.step(state, TOKENS) == (CHUNKS - 1) * TOKENS


def test_error_of_gauges_ends_no_mover(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def due(self) -> bool:
            raise RuntimeError("torn file")

    engine.manager._live = Broken()  # type: ignore[assignment]
    alive = weakref.ref(engine.manager)
    for _ in range(2):
        _publish(alive)
    assert len([record for record in caplog.records if "gauges" in record.message]) == 1
