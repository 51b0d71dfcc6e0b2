"""Steps in which the engine has nothing to compute, because its requests wait for storage or for copies.

An engine whose requests all wait for that runs empty steps: thousands a second where it steps in its caller's process
(offline LLM), and its workers spin along. That starves the movers, their supervisor and the copies, so that the wait
lasts several times as long (measured).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.loads import Loads
from nixl_tiers.vllm.lookups import Lookups

PAUSE_S: Final = 0.001  # short, as no mover reports the end of a copy or a new request


class Pause:
    """`pause_s`: the longest; 0: none."""

    def __init__(self, coordinator: Coordinator, lookups: Lookups, loads: Loads, pause_s: float) -> None:
        self._changed = coordinator.changed
        self._lookups = lookups
        self._loads = loads
        self.pause_s = pause_s
        self._begun: set[str] = set()  # requests that have computed something, so that any step may go on with them

    def began(self, requests: Collection[str]) -> None:
        self._begun.update(requests)

    def ended(self, request: str) -> None:
        self._begun.discard(request)

    def is_idle(self) -> bool:
        """Whether no request that has begun can be computing in this step.

        vLLM does not say which requests a step computes, apart from new ones. Of those that were new in a step before,
        it can be any that neither waits nor loads.
        """
        waiting = self._lookups.waiting
        return all(request in waiting or request in self._loads for request in self._begun)

    def take(self) -> None:
        """In a step that begins no request: wait, if it can only wait."""
        if self.pause_s and self.can_only_wait():
            with self._changed:
                self._changed.wait(self.pause_s)

    def can_only_wait(self) -> bool:
        """Whether some request waits for storage or a copy, and no request can be computing in this step."""
        return not self._loads.prepared and bool(self._lookups.waiting or self._loads) and self.is_idle()
