"""Suspects: keys whose last move ended badly, and when they may be tried again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from nixl_tiers.chunk import Key

REMEMBERED: Final = 4096


class _Suspect:
    __slots__ = ("batch", "failures", "retry_at", "suspected")

    def __init__(self) -> None:
        self.failures = 0
        self.retry_at = 0.0
        self.suspected = False
        self.batch: list[Key] = []


class Denylist:
    """A negative cache with exponential back-off, of at most REMEMBERED keys; the oldest are forgotten first.

    A key that *failed* costs whoever asks for it an error: it is a miss until its back-off has passed. A key that is
    *accused* was in a job that never ended, or that its mover died of: no request waits for it until it was tried alone
    and came through, so that one poisonous row cannot take a tier away from all others. Most of those that were in a
    job with it are innocent: when one of them has come through, it is the turn of the rest.
    """

    __slots__ = ("_book", "_first_s", "_most_s")

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._book: OrderedDict[Key, _Suspect] = OrderedDict()

    def __len__(self) -> int:
        return len(self._book)

    def is_denied(self, key: Key, now: float) -> bool:
        """Whether nobody may ask for `key` now."""
        suspect = self._book.get(key) if self._book else None
        return suspect is not None and (suspect.suspected or suspect.retry_at > now)

    def is_suspect(self, key: Key) -> bool:
        suspect = self._book.get(key) if self._book else None
        return suspect is not None and suspect.suspected

    def trial_due(self, key: Key, now: float) -> bool:
        """Whether an accused key may be tried, alone."""
        suspect = self._book.get(key) if self._book else None
        return suspect is not None and suspect.suspected and suspect.retry_at <= now

    def record_failure(self, key: Key, now: float) -> None:
        """Its move ended in an error. Whoever says so is alive: the key kills nobody."""
        self._record(key, now).suspected = False

    def suspect(self, keys: Iterable[Key], now: float) -> None:
        """Their moves did not end in time, or their mover died with them in hand."""
        batch = list(keys)
        for key in batch:
            suspect = self._record(key, now)
            suspect.suspected = True
            suspect.batch = batch

    def clear(self, key: Key) -> Sequence[Key]:
        """It came through. Returns those that were accused together with it, once, if it was: they may be tried now."""
        suspect = self._book.pop(key, None) if self._book else None
        if suspect is None:
            return ()
        batch = [*suspect.batch]
        suspect.batch.clear()
        return batch

    def reset(self) -> None:
        self._book.clear()

    def _record(self, key: Key, now: float) -> _Suspect:
        suspect = self._book.pop(key, None) or _Suspect()
        suspect.retry_at = now + min(self._most_s, self._first_s * 2.0 ** min(suspect.failures, 30))
        suspect.failures += 1
        self._book[key] = suspect
        if len(self._book) > REMEMBERED:
            self._book.popitem(last=False)
        return suspect
