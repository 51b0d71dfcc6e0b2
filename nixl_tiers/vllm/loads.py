"""The loads that vLLM has begun and not completed: of a request one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.compat import CacheHitSource, OffloadKey
from nixl_tiers.vllm.copy_jobs import RowsSpec
from nixl_tiers.vllm.kv_groups import KvGroups


class Loads:
    """Iterates over the requests with an open load. `prepared`: one was prepared in this step, at whose end it is
    submitted to the workers."""

    def __init__(self, coordinator: Coordinator, groups: KvGroups, config: TiersConfig) -> None:
        self._coordinator = coordinator
        self._groups = groups
        self._sources = _sources(config)
        # Of the last load, as vLLM asks right behind it: the request, its tokens, and the tier of each key.
        self._last: tuple[str, int, Sequence[OffloadKey], Sequence[str]] = ("", 0, (), ())
        self._source_of: dict[OffloadKey, str] | None = None  # the same, once it has been asked for
        self._open: dict[str, float] = {}  # by request: since when
        self._beside: set[str] = set()  # those in whose time the engine computed: their end was reported later
        self._failed: set[str] = set()  # those that a worker could not copy
        self.prepared = False

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __contains__(self, request: object) -> bool:
        return request in self._open

    def prepare(self, keys: Sequence[OffloadKey], counts: list[int], request: str, end: int) -> RowsSpec:
        """Pin the rows of `keys`, of which each KV group has so many. `end`: the last one's end token."""
        tokens = self._groups.saved_tokens(keys, counts)
        plan = self._coordinator.prepare_load(request, keys, tokens=tokens, end=end)
        self._open[request] = self._coordinator.now()
        self.prepared = True
        self._last, self._source_of = (request, sum(tokens), keys, plan.sources), None
        return RowsSpec(np.array(plan.rows, np.int64), counts, missing=plan.missing)

    def source_of(self, key: OffloadKey) -> Any:
        """Where `key` comes from, as vLLM names it."""
        if self._source_of is None:
            self._source_of = dict(zip(*self._last[2:], strict=True))
        source = self._source_of.get(key)
        if source is None:
            with self._coordinator.core() as core:
                (source,) = core.sources([key])
        return self._sources[source]

    def only_source(self, request: str, tokens: int) -> Any:
        """Where so many tokens of the last load, which is this request's, come from, if that is one place; else, or if
        it is not plain, None."""
        name, loaded, _, sources = self._last
        if name != request or not 0 < tokens <= loaded or len(self._groups) > 1 or len(set(sources)) > 1:
            return None
        return self._sources[sources[0]]

    def complete(self, request: str) -> None:
        began_s = self._open.pop(request, None)
        took_s = None if began_s is None else self._coordinator.now() - began_s
        beside, failed = request in self._beside, request in self._failed
        self._beside.discard(request)
        self._failed.discard(request)
        self._coordinator.complete_load(request, took_s, at_most=beside, failed=failed)

    def fail(self, request: str) -> bool:
        """A worker could not copy the request's load. False, and without effect, if it has none."""
        if request not in self._open:
            return False
        self._failed.add(request)
        return True

    def computed_beside(self) -> None:
        """The engine computes in this step, while the open loads are copied."""
        self._beside.update(self._open)

    def ended(self, request: str) -> None:
        """The request has; its load may not have."""
        self._failed.discard(request)

    def reset(self) -> None:
        """vLLM completes no job of before a reset."""
        self._open.clear()
        self._beside.clear()
        self._failed.clear()


def _sources(config: TiersConfig) -> Mapping[str, Any]:
    """vLLM's name for where a hit came from, by tier name."""
    storage = {
        name: CacheHitSource.DISK if tier.on_disk else CacheHitSource.EXTERNAL_UNSPECIFIED
        for name, tier in zip(config.names, config.storage, strict=True)
    }
    return {"cpu": CacheHitSource.HOST, **storage}
