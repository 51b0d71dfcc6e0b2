"""Promotion at arrival, with vLLM's own connector: what is read of a request in the queue, and what comes up for it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from nixl_tiers.base.chunk import Key
from nixl_tiers.vllm.chains import Arrivals
from nixl_tiers.vllm.connector import NixlTiersConnector
from tests.support.vllm_scheduler import BLOCK, ConnectorScheduler, keys_of
from tests.vllm.test_request_options import Rig, hashes_of


class BlockPool:
    """The engine's prefix cache: it has the blocks of these hashes."""

    def __init__(self, *hashes: bytes) -> None:
        self.hashes = hashes

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[object] | None:
        return [object()] if block_hash in self.hashes and groups == [0] else None


class Connector:
    """NixlTiersConnector in a scheduler's process, over this side of vLLM's; the test says what is in the queue."""

    def __init__(self, scheduler: ConnectorScheduler, *cached: bytes, by_priority: bool = False) -> None:
        self.scheduler = scheduler
        self.connector: Any = object.__new__(NixlTiersConnector)
        self.connector.connector_scheduler = scheduler.scheduler
        self.connector._by_priority = by_priority
        self.connector._anticipates = True
        self.connector._arrivals = Arrivals()
        self.connector._kv_cache_manager = SimpleNamespace(block_pool=BlockPool(*cached))

    def arrives(self, name: str, hashes: list[bytes], params: dict[str, Any] | None = None, **fields: Any) -> Any:
        request = self.scheduler.make(name, hashes, params)
        vars(request).update({"priority": 0, "arrival_time": 0.0, **fields})
        self.connector.on_new_request(request)
        return request


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(connector, what of its requests is anticipated)."""
    rig = Rig()
    joined: list[tuple[str, list[Key], tuple[float, ...]]] = []

    def anticipate(request: str, keys: Sequence[Key], rank: tuple[float, ...]) -> bool:
        if keys:
            joined.append((request, list(keys), rank))
        return True

    monkeypatch.setattr(rig.coordinator._core, "anticipate", anticipate)
    monkeypatch.setattr(rig.manager, "_has_storage", True)
    yield rig.scheduler, joined
    rig.manager.shutdown()


def test_chain_of_a_request_in_the_queue(queue: Any) -> None:
    scheduler, joined = queue
    hashes = hashes_of(6)
    connector = Connector(scheduler, *hashes[:2])
    connector.arrives("usual", hashes)
    connector.arrives("limited", hashes, {"max_load_tokens": 3 * BLOCK + 5})
    connector.arrives("computes", hashes, {"nixl_tiers": {"load": "none"}})
    connector.arrives("prompt logprobs", hashes, skip_reading_prefix_cache=True)
    keys = keys_of(hashes)
    assert joined == [
        ("usual", keys[2:], (0.0,)),
        ("limited", keys[2:5], (0.0,)),
    ]


def test_nothing_is_read_of_the_queue_where_nothing_can_come_up(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _ = queue
    monkeypatch.setattr("nixl_tiers.vllm.connector.chain_at_arrival", lambda *_: pytest.fail("read"))
    connector = Connector(scheduler)
    connector.arrives("computes", hashes_of(2), {"nixl_tiers": {"load": "none"}})
    monkeypatch.setattr(scheduler.scheduler.manager, "_has_storage", False)
    connector.arrives("r", hashes_of(2))
    assert connector.connector._anticipates


def test_order_of_turns_with_priorities(queue: Any) -> None:
    scheduler, joined = queue
    Connector(scheduler, by_priority=True).arrives("r", hashes_of(1), priority=-2, arrival_time=7.5)
    assert joined[0][2] == (-2.0, 7.5)


def test_vllm_that_keeps_its_queue_in_another_way_is_left_alone(queue: Any, caplog: pytest.LogCaptureFixture) -> None:
    scheduler, joined = queue
    connector = Connector(scheduler)
    del scheduler.scheduler.config
    scheduler.scheduler.config = SimpleNamespace(kv_group_configs=())
    scheduler.scheduler.on_new_request = lambda request: None
    for name in ("one", "two"):
        connector.arrives(name, hashes_of(2))
    assert joined == []
    (message,) = caplog.messages
    assert "this vLLM does not show its queue" in message


def test_keys_are_read_of_the_next_requests_only(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may wait, each with hundreds of keys, of which vLLM makes none itself before their turn."""
    scheduler, joined = queue
    connector, room = Connector(scheduler), 2
    ended: set[str] = set()
    manager = scheduler.scheduler.manager
    anticipate = manager.anticipate

    def in_line(request: str, keys: Sequence[Key], rank: tuple[float, ...]) -> bool | None:
        found = anticipate(request, keys, rank) and len(joined) < room
        return None if request in ended else found

    monkeypatch.setattr(manager, "anticipate", in_line)
    for number in range(5):
        connector.arrives(f"r{number}", hashes_of(2, number))
    made = {name: len(status.group_states[0].offload_keys) for name, status in scheduler.scheduler._req_status.items()}
    assert made == {"r0": 2, "r1": 2, "r2": 0, "r3": 0, "r4": 0}
    ended.add("r2")  # it was aborted
    room = 3
    connector.connector._fill_line()
    assert [name for name, _, _ in joined] == ["r0", "r1", "r3"]


def test_requests_that_are_not_next_are_kept_in_the_order_of_their_turns() -> None:
    arrivals = Arrivals()
    for name, rank in (("a", (0.0, 2.0)), ("b", (0.0, 1.0)), ("c", (-1.0, 3.0)), ("d", (0.0, 1.0))):
        arrivals.add(name, rank)
    assert [name for name, _ in arrivals.take(lambda _, rank: rank < (0.0, 2.0))] == ["c", "b", "d"]
    assert [name for name, _ in arrivals.take(lambda *_: True)] == ["a"]
