"""KV events: which chunks were stored to host memory and which removed, for routers that follow vLLM's event stream."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.memory.region import HostRegion
from nixl_tiers.vllm.compat import HOST_MEDIUM, OffloadingEvent, OffloadKey


class EventLog:
    """Every key is announced once when it can be loaded from host memory, and once more when it is removed."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region
        self._filling: dict[OffloadKey, tuple[int, int]] = {}  # key -> (row, store_seq) of the open store
        self._announced: set[OffloadKey] = set()
        self._events: list[OffloadingEvent] = []

    def filling(self, keys: Sequence[OffloadKey], rows: NDArray[np.int64], store_seq: int) -> None:
        """A store of these keys into these rows begins."""
        for key, row in zip(keys, rows.tolist(), strict=True):
            self._filling[key] = (row, store_seq)

    def written(self, keys: Collection[OffloadKey]) -> None:
        """The store of these keys has ended: announce those that every worker wrote."""
        good = []
        for key in keys:
            row, store_seq = self._filling.pop(key, (-1, 0))
            if row >= 0 and self._region.written(np.array([row], np.int64), store_seq)[0]:
                good.append(key)
        self._announce(good)

    def present(self, key: OffloadKey) -> None:
        """`key` is a hit: it may have been promoted without any store."""
        self._announce((key,))

    def removed(self, keys: Iterable[OffloadKey]) -> None:
        gone = [key for key in keys if key in self._announced]
        if gone:
            self._announced.difference_update(gone)
            self._events.append(OffloadingEvent(keys=gone, medium=HOST_MEDIUM, removed=True))

    def reset(self) -> None:
        """Host memory is empty."""
        self._filling.clear()
        self.removed(list(self._announced))

    def take(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def _announce(self, keys: Collection[OffloadKey]) -> None:
        new = [key for key in keys if key not in self._announced]
        if new:
            self._announced.update(new)
            self._events.append(OffloadingEvent(keys=new, medium=HOST_MEDIUM, removed=False))
