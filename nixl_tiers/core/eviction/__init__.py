"""Eviction policies: which key of a tier goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, get_args

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Eviction
from nixl_tiers.core.eviction.arc import Arc
from nixl_tiers.core.eviction.lru import LeafFirstLru
from nixl_tiers.core.eviction.s3fifo import S3Fifo


class EvictionPolicy(Protocol):
    """Orders the keys of one tier. `tick` is a logical time: all uses by one request have one tick.

    The tier keeps the budget: it calls `evict` before it calls `add`. A policy only selects victims.
    """

    def add(self, key: Key, tick: int) -> None:
        """Insert a new key. Keys of one tick come in prefix order."""

    def touch(self, keys: Iterable[Key], tick: int) -> None:
        """Known keys were used, in prefix order. A second use at the tick of the last one is by the same request, and
        does not count."""

    def put_back(self, key: Key, tick: int) -> None:
        """A victim stays after all, as a key that was used at this tick: it was no use, and no key that came back."""

    def remove(self, key: Key) -> None:
        """A known key was removed for another reason than eviction."""

    def evict(self, count: int, is_pinned: Callable[[Key], bool]) -> list[Key]:
        """Remove and return up to `count` victims, the least valuable first, skipping pinned keys.

        Returns fewer only where every key that is left is pinned, or after a bounded number of steps (more than a
        thousand), behind which the next call goes on. Amortised, a victim costs a constant number of
        steps, however many pinned keys are before it.
        """

    def __len__(self) -> int: ...


def make_policy(name: Eviction, rows: int) -> EvictionPolicy:
    """The policy of that name for a tier of `rows` rows. Raises ValueError for a name that is none of them."""
    if name == "lru":
        return LeafFirstLru()
    if name == "s3fifo":
        return S3Fifo(rows)
    if name == "arc":
        return Arc(rows)
    raise ValueError(f"policy: {name!r} is not one of {', '.join(get_args(Eviction))}")
