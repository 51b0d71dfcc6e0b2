"""The one interface between a tier and its eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nixl_tiers.chunk import Key


class EvictionPolicy(Protocol):
    """Orders the keys of one tier. `tick` is a logical time: all that one request uses carries one tick."""

    def add(self, key: Key, tick: int) -> None:
        """A key that is not known yet has come. Keys of one tick come in prefix order."""

    def touch(self, key: Key, tick: int) -> None:
        """A known key was used."""

    def remove(self, key: Key) -> None:
        """A known key has gone for another reason than eviction."""

    def evict(self, count: int, spare: Callable[[Key], bool]) -> list[Key]:
        """Choose and forget up to `count` keys, the least valuable first, passing over those that `spare` names."""

    def __len__(self) -> int: ...
