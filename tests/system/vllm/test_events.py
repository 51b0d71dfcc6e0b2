"""KV events: what routers are told of a manager's tiers, and what one that subscribes makes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingEvent, get_offload_block_hash

from nixl_tiers.store import TieredStore
from nixl_tiers.vllm import events
from nixl_tiers.vllm.connector import NixlTiersConnector
from tests.support.file_tier import file_tier
from tests.support.router import Router
from tests.support.vllm_scheduler import ConnectorScheduler
from tests.support.waiting import until, until_up
from tests.vllm.test_manager import GEOMETRY, ROWS, STEP, ManagerRig, keys_of

HOST, FILE = (Medium.CPU, None, None), (Medium.STORAGE, "file", Locality.LOCAL)
WIRE_HOST, WIRE_FILE = ("CPU", None, None), ("STORAGE", "file", "LOCAL")


class FileRig(ManagerRig):
    """With a file tier, whose writes a test waits for."""

    def __init__(self, folder: Path, rows: int = 64, **fields: Any) -> None:
        super().__init__(storage=[file_tier(folder, rows * GEOMETRY.row_bytes)], **fields)
        until(lambda: self.coordinator.wait_ready(1.0), "the file tier")

    def told(self) -> list[tuple[tuple[Medium, str | None, Locality | None], bool, list[bytes]]]:
        taken = list(self.manager.take_events())
        assert all(event.removal_expected for event in taken), "vLLM would forget the tokens before the removal"
        return [((each.medium, each.ownership, each.locality), each.removed, each.keys) for each in taken]

    def flush(self) -> None:
        until(lambda: self.coordinator.flush(1.0), "writes")

    def find(self, name: str, *keys: bytes) -> None:
        """A request that comes back until it has found these keys."""
        context = self.request(name, *keys)

        def found() -> bool:
            answers = [self.manager.lookup(key, context) for key in keys]
            if answers == [LookupResult.HIT] * len(keys):
                return True
            self.manager.on_schedule_end(STEP)
            return False

        until(found, "hits")
        self.manager.on_schedule_end(STEP)
        self.manager.on_request_finished(context)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FileRig]:
    rig = FileRig(tmp_path / "kv")
    yield rig
    rig.manager.shutdown()


def test_a_chunk_is_announced_once_in_each_tier_and_removed_once(rig: FileRig) -> None:
    old, new = keys_of(ROWS), keys_of(ROWS, first=100)
    rig.store(rig.request("r", *old), *old)
    rig.flush()
    assert rig.told() == [(HOST, False, old), (FILE, False, old)]
    rig.find("again", *old)
    assert rig.told() == []
    rig.store(rig.request("s", *new), *new)
    rig.flush()
    stored, on_disk, (place, removed, gone) = rig.told()
    assert (stored, on_disk) == ((HOST, False, new), (FILE, False, new))
    assert (place, removed, set(gone)) == (HOST, True, set(old))
    rig.find("found", old[0])
    assert (HOST, False, [old[0]]) in rig.told()


def test_what_was_stored_before_the_start_is_announced_when_it_is_found(rig: FileRig, tmp_path: Path) -> None:
    keys = keys_of(2)
    rig.store(rig.request("r", *keys), *keys)
    rig.flush()
    rig.manager.shutdown()
    again = FileRig(tmp_path / "kv")
    assert again.told() == []
    again.find("r", *keys)
    assert again.told() == [(HOST, False, keys), (FILE, False, keys)]
    again.manager.shutdown()


@pytest.mark.parametrize("on_reset", ["new_epoch", "keep"])
def test_a_reset_removes_all_and_what_stays_is_announced_anew(tmp_path: Path, on_reset: str) -> None:
    rig = FileRig(tmp_path / "kv", on_reset=on_reset)
    keys = keys_of(2)
    rig.store(rig.request("r", *keys), *keys)
    rig.flush()
    rig.told()
    rig.manager.reset_cache()
    assert rig.told() == [(HOST, True, keys), (FILE, True, keys)]
    if on_reset == "keep":
        rig.find("later", *keys)
        assert rig.told() == [(HOST, False, keys), (FILE, False, keys)]
    rig.manager.shutdown()


def test_connector_takes_removals_before_vllm_forgets_what_the_chunks_are(
    rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(2)
    rig.store(rig.request("r", *keys), *keys)
    rig.told()
    connector = object.__new__(NixlTiersConnector)
    connector._withdrawn = []
    forgotten: list[bool] = []

    def reset() -> None:
        rig.manager.reset_cache()
        forgotten.append(True)

    def take() -> list[tuple[bool, OffloadingEvent]]:
        return [(bool(forgotten), event) for event in rig.manager.take_events()]

    connector.connector_scheduler = SimpleNamespace(  # type: ignore[assignment]
        manager=rig.manager, reset_cache=reset, take_events=take
    )
    monkeypatch.setattr(NixlTiersConnector, "_manager", rig.manager)
    assert connector.reset_cache()
    assert connector.reset_cache(), "a second one before the next step"
    first, *_ = taken = list(connector.take_events())
    assert not any(late for late, _ in taken), "vLLM has forgotten what they are"
    assert (first[1].removed, first[1].keys) == (True, keys)
    assert list(connector.take_events()) == []


def test_tokens_that_vllm_keeps_for_storage_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_TOKENS", 3 * 64)
    rig = FileRig(tmp_path / "kv")
    old, new = keys_of(2), keys_of(2, first=100)
    for name, keys in (("old", old), ("new", new)):
        rig.store(rig.request(name, *keys), *keys)
        rig.flush()
        told = rig.told()
    assert (FILE, True, old[:1]) in told
    rig.manager.shutdown()


# --- over ZeroMQ ---------------------------------------------------------------------------------------------------


class Engine:
    """vLLM's own scheduler side and publisher, with chunks of two blocks, and a router that subscribes to it."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.rig = FileRig(folder / "kv", rows=24, **fields)
        self.vllm = ConnectorScheduler(self.rig.manager, 2, events=True)
        self.connector: Any = object.__new__(NixlTiersConnector)
        self.connector.connector_scheduler = self.vllm.scheduler
        self.connector._withdrawn = []
        places = [f"ipc://{folder}/{name}" for name in ("live", "replay")]
        self.publisher = ZmqEventPublisher(0, *places)
        self.router = Router(*places)
        self.ends: dict[bytes, int] = {}
        self.kept = False  # there are chunks from before a reset, of which the router knows those that were found since
        self._names = count()

    def ask(self, hashes: list[bytes]) -> None:
        """A request from its arrival to its end: what it finds, and what it stores."""
        name, vllm, manager = f"r{next(self._names)}", self.vllm, self.rig.manager
        request = vllm.request(name, hashes)
        until(lambda: self._looked_up(request), "hits")
        for spec in vllm.store(request):
            for cell in (0, 1):
                self.rig.region.mark(spec.rows, cell, spec.store_seq, True)
        context = vllm.scheduler._req_status.pop(name).req_context
        self.ends.update(context._offload_key_positions)
        for job in vllm.scheduler._jobs.values():
            manager.complete_store(job.keys, context)
        vllm.scheduler._jobs.clear()
        manager.on_request_finished(context)
        self.step()

    def step(self) -> None:
        """The end of a step, in vLLM's order."""
        self.rig.manager.on_schedule_end(STEP)
        if events := self.connector.take_events():
            self.publisher.publish(KVEventBatch(ts=0.0, events=events))

    def agrees(self) -> bool:
        """Whether the router knows what `locate` says, and all tiers that a chunk is in."""
        self.step()
        self.router.receive()
        named = {key: maybe_convert_block_hash(get_offload_block_hash(key)) for key in self.ends}
        keys = [key for key, block in named.items() if block in self.router.blocks or not self.kept]
        blocks = [named[key] for key in keys]
        told = [{"cpu" if medium == "CPU" else name for medium, name, _ in self.router.tiers(each)} for each in blocks]
        for key, block, tiers in zip(keys, blocks, told, strict=True):
            assert not tiers or len(self.router.prefix(block)) == self.ends[key]
        with self.rig.coordinator.core() as core:
            denied = {key for key in keys if not core.tiers[0].can_load(key)}  # a load of it ended with a mover
            held = [
                {tier.spec.name for tier in core.tiers if tier.index.rows.is_stored(key)}
                | ({"cpu"} if key in core.host.index else set())
                for key in keys
            ]
            located = core.where(keys)
        first = [
            "cpu" if "cpu" in tiers else "file" if "file" in tiers and key not in denied else None
            for key, tiers in zip(keys, told, strict=True)
        ]
        return told == held and first == located

    def knows_nothing(self) -> bool:
        """Whether the router knows of no chunk in any tier."""
        self.router.receive()
        return not any(map(self.router.tiers, self.router.blocks))

    def close(self) -> None:
        self.publisher.shutdown()
        self.router.close()
        self.rig.manager.shutdown()

    def _looked_up(self, request: Any) -> bool:
        if self.vllm.matched(request) is not None:
            return True
        self.step()
        return False


@pytest.mark.parametrize("on_reset", ["new_epoch", "keep"])
def test_router_knows_what_locate_says(tmp_path: Path, on_reset: str) -> None:
    """With fewer rows in host memory and in files than chunks, through resets and the death of a mover."""
    random = Random(on_reset)
    engine = Engine(tmp_path, on_reset=on_reset)
    states = set()
    for turn in range(40):
        prompt = "".join(random.choices("ab", k=random.randint(1, 4)))
        chain = [sha256(f"{prompt[: end + 1]}{half}".encode()).digest() for end in range(len(prompt)) for half in "12"]
        engine.ask(chain)
        if turn in (12, 30):
            engine.rig.flush()
            assert engine.connector.reset_cache()
            until(lambda: engine.rig.coordinator.ready, "the file tier")
            engine.step()
            until(engine.knows_nothing, "the router to hear of the reset")
            engine.router.blocks.clear()
            engine.kept = on_reset == "keep"
        if turn == 20:
            engine.rig.flush()  # what it had yet to delete, its successor would find, and no request
            (mover,) = engine.rig.coordinator.mover_pids
            assert mover is not None
            os.kill(mover, signal.SIGKILL)
            # Until that is seen, a store would give up a row for its place, which the successor finds in its old state.
            store = TieredStore(engine.rig.coordinator)
            until(lambda store=store: store.stats()["file"]["deaths"], "the death of the mover")  # type: ignore[misc]
        if turn % 4 == 3:
            until_up(TieredStore(engine.rig.coordinator))
            engine.rig.flush()
            until(engine.agrees, "the router to know what locate says")
            states.update(frozenset(places) for places in map(engine.router.tiers, engine.router.blocks))
    assert {frozenset(), frozenset({WIRE_HOST, WIRE_FILE}), frozenset({WIRE_FILE})} <= states
    engine.close()


# --- a real engine -------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_router_of_a_real_engine_knows_what_locate_says(
    engine: Callable[..., list[Any]], small_model: Path, tmp_path: Path
) -> None:
    """Chunks of two blocks, in a host that holds fewer than are stored, and files that do too; then a reset."""
    ask = [["generate", [[(7 * i * i + 3 * i + 31 * number) % 500 + 1 for i in range(650)]], 2] for number in range(4)]
    cpu = {"type": "cpu", "capacity": "4MiB"}
    tiers = {
        "blocks_per_chunk": 2,
        "self_describing_kv_events": True,
        "tiers": [cpu, file_tier(tmp_path / "kv", "7MiB")],
    }
    settings = {
        "path": small_model,
        "transfer": {"kv_connector": "NixlTiersConnector", "kv_load_failure_policy": "recompute"},
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 32,
        "max_num_seqs": 1,
        "kv_events_config": {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay_endpoint")},
    }
    _, _, first, *_, churned, _, _, reset, _, _, last = engine(
        tiers,
        *([ask[0], ["flush"], ["follow"]]),
        *([ask[1], ["flush"], ask[2], ["flush"], ["forget"], ask[1], ask[3], ["flush"], ["follow"]]),
        *([["reset"], ["flush"], ["follow"]]),
        *([ask[0], ["flush"], ["follow"]]),
        **settings,
    )
    assert first == {"cpu, file": 10}
    assert churned.keys() >= {"cpu, file", "file", ""}, "host memory and files have evicted"
    assert reset == {"": 40}
    assert last == {"cpu, file": 10, "": 30}
