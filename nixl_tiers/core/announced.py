"""What those who follow the tiers (routers) were told of them, and what they are to be told next.

Changes are noted by their keys alone. `take` looks where those keys are by then, and tells how that differs from what
was told. So nothing is told twice, what came and went in between is not told at all, and what there is to tell is
bounded by what was told and by what a scheduler has just used.

A follower learns of a chunk when the engine has used it: what a medium lists has neither tokens nor a parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.rows import READY
from nixl_tiers.core.tier import Tier

KEYS_A_HOLD: Final = 256  # that are looked at in one hold of the lock
_HOST: Final = 1


class What(Enum):
    STORED = "stored"
    REMOVED = "removed"
    PASSED = "passed"  # seen in host memory, and gone: who keeps what a chunk is until it is removed must be told


class Change(NamedTuple):
    """What has become of `keys` in host memory (`tier` is None) or in a storage tier, by its number."""

    what: What
    tier: int | None
    keys: list[Key]


class Announced:
    """Of each key the tiers in which it was told to be. Only `seen` is called without the coordinator's lock, by the
    thread that calls `take`.

    `most_stored`: so many keys are told to be in storage tiers; of more, those whose tiers changed first are told to be
    there no longer. With 0, only host memory is told of.
    """

    def __init__(self, host: HostTier, tiers: Sequence[Tier], most_stored: int) -> None:
        self._host = host
        self._tiers = [(_HOST << 1 + tier.number, tier) for tier in tiers] if most_stored else []
        self._most_stored = most_stored
        self._in_host: dict[Key, None] = {}
        self._stored: dict[Key, int] = {}  # in which storage tiers, a bit each; the last changed is the last
        self._changed: dict[Key, bool] = {}  # keys to look at: each was told of, or (True) seen
        self._again: deque[Key] = deque()  # to be looked at when nothing else is
        self._forgotten: list[Change] = []
        host.changed = self.changed
        for _, tier in self._tiers:
            tier.index.changed = self.changed

    # --- what happens ------------------------------------------------------------------------------------------

    def seen(self, key: Key) -> None:
        """A request has found this key in host memory, or has stored it there: whoever takes knows what it is."""
        if key not in self._in_host:
            self._changed[key] = True

    def changed(self, key: Key) -> None:
        """It has come to a tier or left one."""
        if key in self._in_host or key in self._stored:
            self._changed.setdefault(key, False)

    def listed(self) -> None:
        """A tier has listed its rows, and did not say one by one which are new."""
        self._again = deque(self._stored)
        self._again.extend(self._in_host)

    def reset(self) -> None:
        """Nothing of what was told holds any more, even where a row stays: it is told again when it is seen."""
        removed = self._sorted()
        removed[_HOST] += self._in_host
        for key, told in self._stored.items():
            _add(removed, told, key)
        passed = [key for key, seen in self._changed.items() if seen and key not in self._in_host]
        self._forgotten += _changes(self._sorted(), removed, passed)
        self._in_host, self._stored, self._changed, self._again = {}, {}, {}, deque()

    # --- what is told ------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether `take` has anything to look at."""
        return bool(self._changed or self._forgotten or self._again)

    def take(self) -> list[Change]:
        """The next changes, in this order. Parents come before their children, and where a key is before where it is
        not: a follower may forget a key that is nowhere."""
        changes, self._forgotten = self._forgotten, []
        stored, removed, passed = self._sorted(), self._sorted(), list[Key]()
        while self._again and len(self._changed) < KEYS_A_HOLD:
            self.changed(self._again.popleft())
        for key in list(islice(self._changed, KEYS_A_HOLD)):
            seen, told, now = self._changed.pop(key), self._told(key), self._tiers_of(key)
            if now != told:
                _add(stored, now & ~told, key)
                _add(removed, told & ~now, key)
                self._note(key, now)
            if seen and not (told | now) & _HOST:
                passed.append(key)
        self._withdraw(removed)
        return changes + _changes(stored, removed, passed)

    # --- inside ------------------------------------------------------------------------------------------------

    def _told(self, key: Key) -> int:
        return (_HOST if key in self._in_host else 0) | self._stored.get(key, 0)

    def _tiers_of(self, key: Key) -> int:
        row = self._host.index.get(key)
        found = _HOST if row is not None and row.state is READY else 0
        for bit, tier in self._tiers:
            if tier.index.rows.is_stored(key):
                found |= bit
        return found

    def _note(self, key: Key, tiers: int) -> None:
        if tiers & _HOST:
            self._in_host[key] = None
        else:
            self._in_host.pop(key, None)
        self._stored.pop(key, None)
        if tiers & ~_HOST:
            self._stored[key] = tiers & ~_HOST

    def _withdraw(self, removed: dict[int, list[Key]]) -> None:
        """Keep the bound. What is to be looked at stays: it may have come back, and who takes is to know it still."""
        for key in list(islice(self._stored, max(0, len(self._stored) - self._most_stored))):
            told = self._stored.pop(key)
            if key in self._changed:
                self._stored[key] = told
            else:
                _add(removed, told, key)

    def _sorted(self) -> dict[int, list[Key]]:
        return {_HOST: [], **{bit: [] for bit, _ in self._tiers}}


def _add(by_tier: dict[int, list[Key]], tiers: int, key: Key) -> None:
    for bit, keys in by_tier.items():
        if tiers & bit:
            keys.append(key)


def _changes(stored: dict[int, list[Key]], removed: dict[int, list[Key]], passed: list[Key]) -> list[Change]:
    return [
        Change(what, None if bit == _HOST else bit.bit_length() - 2, keys)
        for what, by_tier in ((What.STORED, stored), (What.REMOVED, removed), (What.PASSED, {_HOST: passed}))
        for bit, keys in by_tier.items()
        if keys
    ]
