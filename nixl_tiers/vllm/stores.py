"""The stores that vLLM has begun and not completed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.compat import OffloadKey, PrepareStoreOutput, ReqContext
from nixl_tiers.vllm.copy_jobs import RowsSpec
from nixl_tiers.vllm.kv_groups import KvGroups


class Stores:
    """True while any is open."""

    def __init__(self, coordinator: Coordinator, groups: KvGroups) -> None:
        self._coordinator = coordinator
        self._groups = groups
        self._open: set[OffloadKey] = set()
        self._spoiled: set[OffloadKey] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    def prepare(self, offered: list[OffloadKey], context: ReqContext) -> PrepareStoreOutput:
        """Rows for those of `offered` that are new."""
        keys = self._groups.in_prefix_order(offered, context)
        row_of: Mapping[OffloadKey, int] = {}
        store_seq = 0
        if keys:
            plan = self._coordinator.prepare_store(context.req_id, keys)
            row_of, store_seq = dict(zip(plan.keys, plan.rows, strict=True)), plan.store_seq
        # vLLM lists the blocks of a job in the order in which it offered the keys, whatever the order of this answer.
        accepted = [key for key in offered if key in row_of]
        self._open.update(accepted)
        rows = np.array([row_of[key] for key in accepted], np.int64)
        return PrepareStoreOutput(
            keys_to_store=accepted,
            store_spec=RowsSpec(rows, self._groups.counts(accepted), store_seq),
            evicted_keys=[],  # vLLM does not look at them
        )

    def spoil(self, keys: Iterable[OffloadKey]) -> None:
        """What the open ones of these copy is not known."""
        self._spoiled.update(self._open.intersection(keys))

    def completed(self, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Returns those of them that were spoiled."""
        self._open.difference_update(keys)
        if spoiled := self._spoiled.intersection(keys):
            self._spoiled -= spoiled
        return spoiled

    def reset(self) -> None:
        """vLLM completes no job of before a reset."""
        self._open.clear()
        self._spoiled.clear()
