"""Which requests may be answered before their rows have come, and what vLLM and routers are told of such loads."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from nixl_tiers.core.chain_rows import Chain
from nixl_tiers.core.key_lookup import Lookup
from nixl_tiers.core.lookup import Scan
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.compat import LookupResult, ReqContext
from nixl_tiers.vllm.streams import MOST_WAITING, SHARE, Streams, Unit
from tests.support.vllm_scheduler import BLOCK, ConnectorScheduler
from tests.vllm.test_manager import ScriptedCoordinator, keys_of, scripted_manager

CHUNK = 2 * BLOCK


@dataclass
class Request:
    """What of vLLM's Request is looked at."""

    request_id: str
    block_hashes: list[bytes]
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    finished: bool = False

    def is_finished(self) -> bool:
        return self.finished


@dataclass
class Pool:
    free: int = 400
    num_gpu_blocks: int = 400

    def get_num_free_blocks(self) -> int:
        return self.free


@dataclass
class Rig:
    recompute: bool = True
    seen: list[bytes] = field(default_factory=list)
    nothing: list[str] = field(default_factory=list)
    pool: Pool = field(default_factory=Pool)

    def __post_init__(self) -> None:
        self.streams = Streams(lambda: self.recompute, self.seen.append, self.nothing.append)
        self.streams.possible(Unit(CHUNK, BLOCK, BLOCK))
        self.streams.pool = self.pool

    def arrives(self, name: str, blocks: int = 8, first: int = 0) -> Request:
        """Of so many blocks, the first of which are the same for all."""
        hashes = [b"shared" if n < first else f"{name}{n}".encode() for n in range(blocks)]
        request = Request(name, hashes)
        self.streams.arrived(request)
        return request

    def may(self, name: str, first: int = 0, end: int = 8 * BLOCK) -> bool:
        return self.streams.end_of(name, first) >= end

    def loads(self, name: str, first: int = 0, end: int = 8 * BLOCK) -> None:
        """It is answered early, and vLLM begins the load."""
        assert self.may(name, first, end)
        self.streams.answered(name, first, end)
        self.streams.began(name, end)
        self.streams.end_step((), ())


@pytest.fixture
def rig() -> Rig:
    return Rig()


# --- which requests ---------------------------------------------------------------------------------------------


def test_a_request_alone_may_be_answered_early(rig: Rig) -> None:
    rig.arrives("r")
    assert rig.may("r")


def test_not_before_all_workers_have_said_that_vllm_recomputes(rig: Rig) -> None:
    rig.recompute = False
    rig.arrives("r")
    assert not rig.may("r")
    rig.recompute = True
    assert rig.may("r")


def test_not_where_a_load_may_not_end_with_a_gap_or_vllm_does_not_show_its_blocks(rig: Rig) -> None:
    other = Streams(lambda: True, None, rig.nothing.append)
    other.pool = rig.pool
    other.arrived(Request("r", [b""]))
    assert not other.end_of("r", 0)
    rig.arrives("r")
    rig.streams.pool = None
    assert not rig.may("r")


def test_a_quarter_of_the_blocks_belongs_to_streams_at_most(rig: Rig) -> None:
    rig.pool.num_gpu_blocks = 4 * 16
    for name in "abc":
        rig.arrives(name)
    rig.loads("a")
    rig.loads("b")
    assert not rig.may("c")
    rig.streams.load_ended("a")
    assert rig.may("c")


def test_a_tenth_of_the_blocks_stays_free_behind_a_stream(rig: Rig) -> None:
    rig.arrives("r")
    rig.pool.free = 40 + 8
    assert rig.may("r")
    rig.pool.free -= 1
    assert not rig.may("r")


def test_a_request_whose_first_chunk_another_one_waits_for_is_answered_the_ordinary_way(rig: Rig) -> None:
    """vLLM would keep the other one back until the load has ended."""
    rig.arrives("r", first=4)
    other = rig.arrives("other", first=4)
    assert not rig.may("r")
    assert rig.may("r", first=4 * BLOCK), "what they share is in vLLM's own cache"
    assert not rig.may("r", first=2 * BLOCK), "the second chunk"
    rig.streams.end_step([other.request_id], ())
    assert rig.may("r"), "it computes, and has its blocks"
    rig.streams.end_step((), [other.request_id])
    assert not rig.may("r"), "it waits again"
    rig.streams.ended(other.request_id)
    assert rig.may("r")


def test_a_request_that_shares_only_a_part_of_the_first_chunk_is_not_kept_back(rig: Rig) -> None:
    rig.arrives("r", first=1)
    rig.arrives("other", first=1)
    assert rig.may("r")


def test_beside_a_long_queue_none_is_answered_early(rig: Rig) -> None:
    for number in range(MOST_WAITING):
        rig.arrives(f"r{number}")
    assert rig.may("r0")
    rig.arrives("last")
    assert not rig.may("r0")


def test_each_request_is_answered_early_once(rig: Rig) -> None:
    for name, begins in (("loads", True), ("finds no blocks", False)):
        rig.arrives(name)
        rig.streams.answered(name, 0, CHUNK)
        if begins:
            rig.streams.began(name, CHUNK)
        rig.streams.end_step((), ())
        rig.streams.load_ended(name)
        assert not rig.may(name)


def test_a_preempted_request_is_not(rig: Rig) -> None:
    """After a reset without the connector vLLM 0.32 would look it up in the step in which it flushes its stores."""
    rig.arrives("r").num_preemptions = 1
    assert not rig.may("r")


# --- what becomes of an answer ----------------------------------------------------------------------------------


def test_an_answer_without_a_load_holds_no_blocks(rig: Rig) -> None:
    rig.pool.num_gpu_blocks = 4 * 8
    rig.arrives("r")
    rig.arrives("next")
    rig.streams.answered("r", 0, 8 * BLOCK)
    assert not rig.may("next")
    rig.streams.end_step((), ())
    assert rig.may("next")
    assert rig.streams.load_ended("r") is None, "vLLM loads it the ordinary way, later"


def test_routers_hear_of_what_was_found_when_the_load_has_ended(rig: Rig) -> None:
    rig.arrives("r")
    assert not rig.streams.found("r", b"ordinary")
    rig.loads("r")
    assert rig.streams.found("r", b"1")
    assert rig.streams.found("r", b"2")
    assert rig.seen == []
    rig.streams.load_ended("r")
    assert rig.seen == [b"1", b"2"]


def test_routers_hear_of_what_was_found_and_is_not_loaded(rig: Rig) -> None:
    """vLLM keeps what such a chunk is until it is told that it is gone."""
    rig.arrives("r")
    rig.streams.answered("r", 0, CHUNK)
    rig.streams.found("r", b"1")
    rig.streams.end_step((), ())
    assert rig.seen == [b"1"]


def test_a_whole_load_leaves_nothing_behind(rig: Rig) -> None:
    request = rig.arrives("r")
    rig.loads("r")
    request.num_computed_tokens = 8 * BLOCK
    assert rig.streams.load_ended("r") == 4
    assert rig.streams.load_ended("r") is None
    assert (rig.streams.gaps, rig.nothing) == ({}, [])


@pytest.mark.parametrize(("first", "has", "loaded"), [(0, CHUNK, 1), (CHUNK, 3 * CHUNK, 2), (BLOCK, CHUNK, 1)])
def test_the_chunks_before_a_gap_are_counted(rig: Rig, first: int, has: int, loaded: int) -> None:
    request = rig.arrives("r")
    rig.loads("r", first)
    request.num_computed_tokens = has
    assert rig.streams.load_ended("r") == loaded
    assert rig.nothing == []


def test_chunks_behind_a_gap_are_offered_again_once_all_of_them_are_computed(rig: Rig) -> None:
    """Not before: of a request that ends with an error vLLM would store blocks that were never computed."""
    request = rig.arrives("r")
    rig.loads("r")
    request.num_computed_tokens = CHUNK
    rig.streams.load_ended("r")
    assert list(rig.streams.computed({"other": 1000})) == []
    assert list(rig.streams.computed({"r": 7 * BLOCK - CHUNK})) == [], "less than all"
    request.num_computed_tokens += 7 * BLOCK - CHUNK
    assert list(rig.streams.computed({"r": BLOCK})) == [("r", 1)]
    assert list(rig.streams.computed({"r": 1})) == [], "once"


def test_a_gap_at_the_first_block_has_the_request_find_nothing(rig: Rig) -> None:
    rig.arrives("r")
    rig.loads("r")
    assert rig.streams.load_ended("r") == 0
    assert rig.nothing == ["r"]
    assert rig.streams.gaps["r"].chunk == 0


def test_a_gap_at_the_first_block_behind_vllms_own_hit_does_not(rig: Rig) -> None:
    request = rig.arrives("r")
    rig.loads("r", CHUNK)
    request.num_computed_tokens = CHUNK
    assert rig.streams.load_ended("r") == 0
    assert rig.nothing == []
    assert rig.streams.gaps["r"].chunk == 1


def test_of_an_aborted_request_nothing_is_loaded_nor_stored_again(rig: Rig) -> None:
    request = rig.arrives("r")
    rig.loads("r")
    request.num_computed_tokens, request.finished = CHUNK, True
    rig.streams.ended("r")
    assert rig.streams.load_ended("r") == 0
    assert (rig.streams.gaps, rig.nothing) == ({}, [])


def test_after_a_reset_a_request_that_loads_finds_nothing(rig: Rig) -> None:
    """vLLM does not say how its load ended: with a gap at its first block it would be looked up, and load, again."""
    gap = rig.arrives("gap")
    rig.loads("gap")
    gap.num_computed_tokens = CHUNK
    rig.streams.load_ended("gap")
    rig.arrives("loads")
    rig.loads("loads")
    rig.streams.reset()
    assert rig.nothing == ["loads"]
    assert rig.streams.gaps == {}, "vLLM offers all chunks again"
    assert rig.streams.load_ended("loads") is None


# --- vLLM's own part --------------------------------------------------------------------------------------------


def test_vllm_offers_chunks_again_from_a_gap_on_and_never_fewer() -> None:
    manager = SimpleNamespace(on_new_request=lambda context: None, lock=nullcontext())
    schedulers = ConnectorScheduler(manager)  # type: ignore[arg-type]
    schedulers.request("r", [bytes([n]) * 32 for n in range(8)])
    (state,) = schedulers.scheduler._req_status["r"].group_states
    state.next_stored_chunk_idx = 8
    compat.offer_again(schedulers.scheduler, "r", 3)
    assert state.next_stored_chunk_idx == 3
    compat.offer_again(schedulers.scheduler, "r", 5)
    assert state.next_stored_chunk_idx == 3, "after a reset it may be lower"


def test_token_counts_and_where_no_load_may_have_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: (0, 32))
    scheduler: Any = ConnectorScheduler(SimpleNamespace(), 2).scheduler  # type: ignore[arg-type]
    one, two = SimpleNamespace(kv_cache_groups=[0]), SimpleNamespace(kv_cache_groups=[0, 1])
    assert compat.token_counts(scheduler) == (CHUNK, BLOCK, BLOCK)
    assert compat.no_gaps(scheduler, one) is None
    assert "several KV cache groups" in (compat.no_gaps(scheduler, two) or "")
    (group,) = scheduler.config.kv_group_configs
    windowed = (group._replace(sliding_window_size_in_chunks=2),)
    scheduler.config = scheduler.config._replace(kv_group_configs=windowed)
    assert "a window only" in (compat.no_gaps(scheduler, one) or "")
    monkeypatch.setattr(compat, "version", lambda: (0, 31))
    assert "0.32 or newer is needed" in (compat.no_gaps(scheduler, one) or "")


# --- in the manager ---------------------------------------------------------------------------------------------


class Early(ScriptedCoordinator):
    """Whatever may be to come is."""

    def __init__(self) -> None:
        super().__init__(Lookup.HIT, "file")
        self.region.ranks.all_recompute = True
        self.earlies: list[int] = []

    def scan(self, request: str, chain: Chain, start: int, now: float, first: int, *, early: int) -> Scan:
        self.earlies.append(early)
        return Scan(False, chain.end, coming=int(early >= chain.end))


@pytest.fixture
def early() -> Early:
    return Early()


def load(early: Early, *, reset: bool = False) -> None:
    manager = scripted_manager(early)  # type: ignore[arg-type]
    manager.streams.possible(Unit(64, 32, 32))
    manager.streams.pool = Pool()
    request = Request("r", [b"1", b"2"], num_computed_tokens=64)
    manager.streams.arrived(request)
    (key,), context = keys_of(1), ReqContext("r")
    context.set_offload_key_position(key, 64)
    manager.on_new_request(context)
    if reset:
        manager._gate.load_began("other")
        manager.reset_cache()
    assert manager.lookup(key, context) is LookupResult.HIT
    manager.prepare_load([key], context)
    manager.complete_load([key], context)


def test_a_stream_does_not_teach_what_copies_take(early: Early) -> None:
    """Its end says when its rows came."""
    load(early)
    assert (early.earlies, early.copied_rows) == ([Pool.num_gpu_blocks // SHARE * 32], [])


def test_while_a_reset_is_judged_no_request_is_answered_early(early: Early) -> None:
    early.reset = lambda **_: None  # type: ignore[assignment]
    load(early, reset=True)
    assert (early.earlies, early.copied_rows) == ([0], [(1, False)])
