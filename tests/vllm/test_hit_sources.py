"""Where the tokens of a hit come from, as NixlTiersConnector tells vLLM: the same as vLLM finds out chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.core import all_good

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_offload.base import make_offload_key

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.connector import NixlTiersConnector
from nixl_tiers.vllm.kv_groups import KvGroups
from nixl_tiers.vllm.manager import NixlTiersManager
from tests.support.file_tier import file_tier
from tests.support.vllm_scheduler import BLOCK, ConnectorScheduler

CHUNKS = 4  # of two blocks


class Rig:
    def __init__(self, tmp_path: Any) -> None:
        geometry = Geometry(cells=1, cell_payload=4096)
        capacity = 4 * CHUNKS * geometry.row_bytes
        config = schema.load({"tiers": [{"type": "cpu", "capacity": capacity}, file_tier(tmp_path, "1MiB")]})
        coordinator = Coordinator(config, Namespace.of({"test": 1}), HostRegion.create(geometry, 4 * CHUNKS))
        self.core: Any = coordinator._core
        self.manager = NixlTiersManager(coordinator, config, (0,), None, pause_s=0.0, chunk_tokens=(2 * BLOCK,))
        self.schedulers = ConnectorScheduler(self.manager, blocks_per_chunk=2)
        self.connector: Any = object.__new__(NixlTiersConnector)
        self.connector.connector_scheduler = self.schedulers.scheduler

    def load(self, sources: list[str], computed: int = 0) -> Any:
        """A request loads a chunk from each of these places, but for its first `computed` tokens."""
        hashes = [os.urandom(32) for _ in range(2 * len(sources))]
        keys = [make_offload_key(each, 0) for each in hashes[1::2]]
        self.core.prepare_store("put", keys)
        self.core.complete_store(keys, all_good)
        for key, source in zip(keys, sources, strict=True):
            self.core.host.index[key].source = source
        request = self.schedulers.request(f"r{hashes[0].hex()}", hashes)
        tokens = self.schedulers.matched(request, computed)
        assert tokens == len(hashes) * BLOCK - computed
        blocks = [KVCacheBlock(number + 1) for number in range(len(hashes))]
        self.schedulers.scheduler.update_state_after_alloc(request, KVCacheBlocks((blocks,)), tokens)
        return request, tokens


@pytest.fixture
def rig(tmp_path: Any) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.manager.shutdown()


@pytest.mark.parametrize("computed", [0, BLOCK, 2 * BLOCK])
@pytest.mark.parametrize(
    "sources", [["cpu"] * CHUNKS, ["file"] * CHUNKS, ["file", "cpu", "cpu", "file"], ["file", "cpu", "cpu", "cpu"]]
)
def test_the_sources_are_those_that_vllm_finds(
    rig: Rig, sources: list[str], computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, tokens = rig.load(sources, computed)
    asked: list[bytes] = []
    source_of = rig.manager.get_load_source
    monkeypatch.setattr(rig.manager, "get_load_source", lambda key, _: asked.append(key) or source_of(key, _))
    found = rig.connector.get_external_cache_hit_sources(request, tokens)
    assert bool(asked) == (len(set(sources[computed // (2 * BLOCK) :])) > 1), "vLLM asks only if they differ"
    assert found == OffloadingConnector.get_external_cache_hit_sources(rig.connector, request, tokens)
    assert sum(found.values()) == tokens


def test_the_sources_of_an_earlier_load_are_asked_for_one_by_one(rig: Rig) -> None:
    first, tokens = rig.load(["file"] * CHUNKS)
    last, _ = rig.load(["cpu"] * CHUNKS)
    assert rig.connector.get_external_cache_hit_sources(first, tokens) == {compat.CacheHitSource.DISK: tokens}
    assert rig.connector.get_external_cache_hit_sources(last, 0) == {}


def test_with_several_groups_vllm_asks_for_each_chunk(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some load less than others, and tokens that none has loaded come from nowhere that is known."""
    request, tokens = rig.load(["cpu"] * CHUNKS)
    assert rig.manager.only_source(request.request_id, tokens) is compat.CacheHitSource.HOST
    monkeypatch.setattr(KvGroups, "__len__", lambda _: 2)
    assert rig.manager.only_source(request.request_id, tokens) is None
