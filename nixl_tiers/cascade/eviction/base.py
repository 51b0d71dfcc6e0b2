"""The one interface between a tier and its eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nixl_tiers.chunk import Key


class EvictionPolicy(Protocol):
    """Orders the keys of one tier. `tick` is a logical time: all that one request uses carries one tick.

    The tier keeps the budget: it calls `evict` before it calls `add`. A policy only says who goes.
    """

    def add(self, key: Key, tick: int) -> None:
        """A key that is not known yet has come. Keys of one tick come in prefix order."""

    def touch(self, key: Key, tick: int) -> None:
        """A known key was used. A second use at the tick of the last one is the same request's, and no news."""

    def remove(self, key: Key) -> None:
        """A known key has gone for another reason than eviction."""

    def evict(self, count: int, is_pinned: Callable[[Key], bool]) -> list[Key]:
        """Choose and forget up to `count` keys, the least valuable first, passing over those that `spare` names.

        Returns fewer only where every key that is left is pinned. Amortised, a victim costs a constant number of
        steps, however many spared keys stand before it.
        """

    def resize(self, rows: int) -> None:
        """The tier has room for `rows` keys from now on. Evicts nothing; what is remembered of gone keys shrinks."""

    def __len__(self) -> int: ...
