"""KV events: which chunks are in which tiers, for routers that follow vLLM's event stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nixl_tiers.core.announced import What
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.compat import OffloadingEvent, OffloadKey

# Chunks of so many tokens are announced to be in storage. vLLM keeps the tokens of each in EngineCore's memory until
# its removal is announced, of self-describing events: some 50 bytes a token.
MOST_TOKENS: Final = 8 << 20
HOLDS_A_STEP: Final = 2  # of the coordinator's lock: what is left waits for the next step


class EventLog:
    """What routers are told, by `nixl_tiers.core.announced`: host memory and each storage tier.

    Each key is announced once a tier when a request has found it or stored it, and once more when it has left the tier:
    consumers count both. The events follow the tier's index: a tier that is down for a moment loses nothing; of a
    prefix that engines share, that a row is gone is known only once it was missed. `chunk_tokens`: of a chunk.
    """

    def __init__(self, coordinator: Coordinator, chunk_tokens: int) -> None:
        self._coordinator = coordinator
        storage = coordinator.config.storage
        self._tiers = [(name, tier.locality) for name, tier in zip(coordinator.config.names, storage, strict=True)]
        most_stored = max(1, MOST_TOKENS // max(1, chunk_tokens)) if storage else 0
        with coordinator.core() as core:
            self._announced = core.announce(most_stored)
        self.seen = self._announced.seen

    def withdraw(self) -> None:
        """Announce that all that was announced is gone."""
        with self._coordinator.core():
            self._announced.reset()

    def take(self) -> list[OffloadingEvent]:
        """The next events."""
        events: list[OffloadingEvent] = []
        for _ in range(HOLDS_A_STEP):
            if not self._announced.due:
                break
            with self._coordinator.core():
                changes = self._announced.take()
            for change in changes:
                events += self._events(*change)
        return events

    def _events(self, what: What, tier: int | None, keys: list[OffloadKey]) -> Iterator[OffloadingEvent]:
        if tier is not None:
            yield compat.storage_event(keys, what is What.REMOVED, *self._tiers[tier])
        elif what is What.PASSED:
            yield from compat.passing_events(keys)
        else:
            yield compat.host_event(keys, what is What.REMOVED)
