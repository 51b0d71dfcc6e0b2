"""A request's chain through vLLM's own look-up function: what it loads, what it waits for, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import inside

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import make_offload_key

from nixl_tiers.base.chunk import Geometry, Key, Namespace, Outcome
from nixl_tiers.config import schema
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.listing import take_all
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.manager import NixlTiersManager
from tests.support.core import put
from tests.support.file_tier import file_tier
from tests.support.vllm_lookups import TOKENS, VllmLookups, hashes

GEOMETRY = Geometry(cells=1, cell_payload=4096)
ROWS = 64
CHUNKS = 6


class Engine:
    """vLLM's look-ups over a host tier and a file tier, whose mover does what a test says. Computing a chunk takes
    `chunk_s` seconds, and time stands still. `known`: NixlTiersConnector says which groups are windowed."""

    def __init__(
        self,
        windows: Sequence[int | None] = (None,),
        chunk_s: float = 1.0,
        *,
        tier: Any = None,
        known: bool = True,
        pause_s: float = 0.0,
    ) -> None:
        tiers = [
            {"type": "cpu", "capacity": ROWS * GEOMETRY.row_bytes},
            tier or file_tier("/nonexistent/nixl-tiers", 100 * GEOMETRY.row_bytes),
        ]
        config = schema.load({"tiers": tiers, "prefill_tokens_per_s": int(TOKENS / chunk_s)})
        region = HostRegion.create(GEOMETRY, ROWS)
        self.now = 0.0
        self.coordinator = Coordinator(config, Namespace.of({"test": 1}), region, clock=lambda: self.now)
        self.core = self.coordinator._core
        take_all(self.core.events.opened(0, 100))
        self.manager = NixlTiersManager(
            self.coordinator, config, range(len(windows)), None, pause_s=pause_s, chunk_tokens=[TOKENS] * len(windows)
        )
        if known:
            self.manager.windows_are_known(dict(enumerate(windows)))
        self.vllm = VllmLookups(self.manager, windows)

    def store(self, keys: Sequence[Key], row_s: float = 0.01) -> None:
        """The file tier holds these, and has loaded rows in so many seconds each before."""
        self.core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
        for rows in (1, 10) * 20:
            self.core.tiers[0].loads.record(rows * GEOMETRY.row_bytes, rows * row_s, 0.0)

    def put(self, keys: Sequence[Key]) -> None:
        """Host memory holds these."""
        put(self.core, keys)

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


CONNECTORS = pytest.mark.parametrize("known", [False, True], ids=["OffloadingConnector", "NixlTiersConnector"])


def keys_of(chunks: Sequence[bytes], group: int = 0) -> list[Key]:
    return [make_offload_key(chunk, group) for chunk in chunks]


# Windows, of each group the chunks that are stored, those that vLLM has, those that the request asks for; of each group
# the chunks that are loaded.
LOADS: dict[str, tuple[Any, ...]] = {
    "all": ((None,), [6], 0, None, [(0, 6)]),
    "what vLLM does not have": ((None,), [6], 2, None, [(2, 6)]),
    "what it asks for": ((None,), [6], 0, 3, [(0, 3)]),
    "a window": ((None, 2), [6, 6], 0, None, [(0, 6), (4, 6)]),
    "where the window exists": ((None, 2), [6, 4], 0, None, [(0, 4), (2, 4)]),
    "nothing beyond": ((None, 2), [4, 6], 0, None, [(0, 4), (2, 4)]),
}


@CONNECTORS
@pytest.mark.parametrize("case", LOADS.values(), ids=LOADS)
def test_request_waits_for_its_whole_chain_and_loads_it(case: tuple[Any, ...], known: bool) -> None:
    """Windows that are not known show by look-ups, after the first."""
    windows, stored, local, most, loaded = case
    engine = Engine(windows, known=known)
    chunks = hashes(CHUNKS)
    engine.store([key for group, count in enumerate(stored) for key in keys_of(chunks[:count], group)])
    state = engine.vllm.request("r", chunks, **({} if most is None else {"max_load_tokens": most * TOKENS}))
    assert engine.step(state, local * TOKENS) is None
    came = engine.load_all()
    while (found := engine.step(state, local * TOKENS)) is None:
        assert not known, "the wait is one, for all groups"
        came += engine.load_all()
    assert found == (loaded[0][1] - local) * TOKENS
    expected = [key for group, (first, end) in enumerate(loaded) for key in keys_of(chunks[first:end], group)]
    assert sorted(came) == sorted(expected) if known else {*came} >= {*expected}
    engine.manager.shutdown()


def test_declined_chain_is_a_miss() -> None:
    engine = Engine(chunk_s=0.001)
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    assert engine.step(engine.vllm.request("r", chunks)) == 0
    engine.manager.shutdown()


def test_step_in_which_nothing_can_have_changed_scans_no_chain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    scans = inside.scans(engine.core, monkeypatch)
    monkeypatch.setattr(engine.core, "look_up_keys", lambda *_: pytest.fail("a key is looked up by itself"))
    state = engine.vllm.request("r", chunks)
    assert engine.step(state) is None
    monkeypatch.setattr(engine.manager._lookups.chains, "of", lambda *_: pytest.fail("its keys are read again"))
    for _ in range(2):
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


@CONNECTORS
def test_model_of_windowed_groups_only_is_looked_up_key_by_key(known: bool) -> None:
    engine = Engine(windows=(2,), known=known)
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    state = engine.vllm.request("r", chunks)
    assert engine.step(state) is None
    assert sorted(engine.load_all()) == sorted(keys_of(chunks)[-2:])
    assert engine.step(state) == CHUNKS * TOKENS
    engine.manager.shutdown()


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"nixl_tiers": {"load": "host"}}])
def test_request_that_loads_from_host_memory_only_promotes_nothing(engine: Engine, params: dict[str, Any]) -> None:
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    engine.put(keys_of(chunks)[:2])
    state = engine.vllm.request("r", chunks, **params)
    assert not engine.manager.anticipates("r")
    assert engine.step(state) == 2 * TOKENS
    assert engine.load_all() == []
    engine.manager.on_request_finished(state.req_context)
    engine.vllm.request("r", chunks)
    assert engine.manager.anticipates("r"), "another request of that name"


def test_nothing_is_promoted_beyond_what_vllm_itself_can_load(engine: Engine) -> None:
    """Groups that are not offloaded bound what of the others is of use (vLLM's `max_num_new_tokens`)."""
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    state = engine.vllm.request("r", chunks)
    for bound, loaded in ((2 * TOKENS, chunks[:2]), (4 * TOKENS, chunks[2:4])):
        engine.manager.bound_load("r", bound)
        assert engine.vllm.look_up(state, most=bound) is None
        engine.vllm.end_step()
        assert engine.load_all() == keys_of(loaded)
        assert engine.vllm.look_up(state, most=bound) == bound
        engine.vllm.end_step()
    engine.manager.on_request_finished(state.req_context)
    state = engine.vllm.request("r", chunks)
    assert engine.step(state) is None, "another request of that name is not bounded"
    assert engine.load_all() == keys_of(chunks)[4:]


def test_request_whose_local_hit_grows_beyond_what_it_may_load_waits_for_the_next_part(engine: Engine) -> None:
    """It waits for its load, and meanwhile another request computes the same prompt."""
    chunks = hashes(CHUNKS)
    engine.store(keys_of(chunks))
    state = engine.vllm.request("r", chunks, max_load_tokens=2 * TOKENS)
    assert engine.step(state) is None
    for _ in range(2):
        assert engine.step(state, 3 * TOKENS) is None
    assert engine.load_all()[-2:] == keys_of(chunks)[3:5]
    assert engine.step(state, 3 * TOKENS) == 2 * TOKENS


def test_local_hit_behind_the_end_of_a_group_of_larger_chunks(engine: Engine) -> None:
    """Such a key is looked up by itself: the chain ends where the last whole chunk of all groups does."""
    chain = Chain((Group(keys_of(hashes(5)), TOKENS), Group(keys_of(hashes(1), 1), 4 * TOKENS)))
    context = engine.vllm.request("r", hashes(5)).req_context
    chains = engine.manager._lookups.chains
    key = next(iter(context._offload_key_positions))
    assert chains.of(key, context, TOKENS) is not None
    chains.get("r").chain = chain  # type: ignore[union-attr]
    assert chains.of(key, context, 4 * TOKENS) is not None
    assert chains.of(key, context, 5 * TOKENS) is None


def test_requests_behind_the_load_of_another_are_not_scanned_at_every_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM defers them until that load has ended, to share its blocks."""
    chunks = hashes(CHUNKS)
    engine.put(keys_of(chunks))
    first, second = (engine.vllm.request(name, chunks) for name in ("first", "second"))
    assert engine.step(first) == CHUNKS * TOKENS
    engine.manager.prepare_load(keys_of(chunks), first.req_context)
    engine.vllm._side._chunks_being_loaded.update(keys_of(chunks))
    assert engine.step(second) is None
    scans = inside.scans(engine.core, monkeypatch)
    for _ in range(3):
        assert engine.step(second) is None
    assert scans == []
    engine.manager.complete_load(keys_of(chunks), first.req_context)
    engine.vllm._side._chunks_being_loaded.clear()
    assert engine.step(second) == CHUNKS * TOKENS


class Tails(Engine):
    """Recurrent states in one group, and `--prefix-match-unit`: vLLM also looks up what ends within a chunk."""

    def __init__(self, windows: Sequence[int | None], **settings: Any) -> None:
        super().__init__(windows, **settings)
        side = self.vllm._side
        groups = side.config.kv_group_configs
        for group in groups:
            group.hashes_per_chunk = 2
        side.config = SimpleNamespace(kv_group_configs=groups, supports_partial_tail=True, tokens_per_hash=TOKENS // 2)
        side._partial_tail_block_size = side._mamba_align_size = TOKENS

    def found(self, name: str, halves: Sequence[bytes], tokens: int) -> int | None:
        """What a step finds of a request of so many tokens, whose half chunks have these hashes. It ends."""
        state = self.vllm.request(name, halves[: tokens // (TOKENS // 2)], tokens)
        found = self.step(state)
        self.manager.on_request_finished(state.req_context)
        return found


@CONNECTORS
@pytest.mark.parametrize("before", [None, 12, 76])
@pytest.mark.parametrize("windows", [(1, None), (None, 1)])
def test_tails_of_chunks_do_not_tell_what_kind_a_group_is(
    windows: tuple[int | None, int | None], before: int | None, known: bool
) -> None:
    """`before`: the tokens of a prompt that nobody has stored, which is looked up first. Of one that is shorter than a
    chunk, a tail is the first look-up of all."""
    engine = Tails(windows, known=known)
    full, recurrent = windows.index(None), windows.index(1)
    halves = hashes(20)
    chunks = halves[1::2]
    engine.put([*keys_of(chunks[:8], full), *(keys_of(chunks, recurrent)[place] for place in (3, 7))])
    if before is not None:
        assert engine.found("before", hashes(20), before) == 0
    found = [engine.found(name, halves, tokens) for name, tokens in (("first", 76), ("again", 76), ("longer", 140))]
    engine.manager.shutdown()
    assert found == [4 * TOKENS, 4 * TOKENS, 8 * TOKENS]
