"""Denylist: keys whose last move failed, hung or killed a mover, and when they may be tried again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from nixl_tiers.base.chunk import Key

MAX_KEYS: Final = 4096


class _Record:
    __slots__ = ("batch", "failures", "retry_at", "suspected")

    def __init__(self) -> None:
        self.failures = 0
        self.retry_at = 0.0
        self.suspected = False
        self.batch: list[Key] = []


class Denylist:
    """At most MAX_KEYS keys with exponential back-off; the oldest are forgotten first.

    A key whose move *failed* is a miss until its back-off has passed. A *suspect* (poison key) was in a job that hung,
    or that its mover died of: no request waits for it until it was tried alone and succeeded, lest one bad row
    takes the tier from all others. Most of its batch are innocent: when one of them succeeds, the others are tried.
    """

    __slots__ = ("_first_s", "_most_s", "keys")

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        # Public to be asked for its truth, which costs less than a call.
        self.keys: OrderedDict[Key, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self.keys)

    def is_denied(self, key: Key, now: float) -> bool:
        """Whether `key` is a miss now."""
        record = self.keys.get(key) if self.keys else None
        return record is not None and (record.suspected or record.retry_at > now)

    def is_suspect(self, key: Key) -> bool:
        record = self.keys.get(key) if self.keys else None
        return record is not None and record.suspected

    def trial_due(self, key: Key, now: float) -> bool:
        """Whether `key` is a suspect that may be tried now, alone."""
        record = self.keys.get(key) if self.keys else None
        return record is not None and record.suspected and record.retry_at <= now

    def record_failure(self, key: Key, now: float) -> None:
        """Its move ended in an error. So its mover is alive, and the key is no suspect."""
        self._record(key, now).suspected = False

    def suspect(self, keys: Iterable[Key], now: float, batch: list[Key] | None = None) -> None:
        """Their moves did not end in time, or their mover died before they ended. `batch`: keys of before that were
        suspected together with them; `keys` are added to it."""
        keys = list(keys)
        batch = [] if batch is None else batch
        batch += keys
        for key in keys:
            record = self._record(key, now)
            record.suspected = True
            record.batch = batch

    def clear(self, key: Key) -> Sequence[Key]:
        """Its move succeeded. Returns, once, the keys that were suspected together with it: they may be tried now."""
        record = self.keys.pop(key, None) if self.keys else None
        if record is None:
            return ()
        batch = [*record.batch]
        record.batch.clear()
        return batch

    def reset(self) -> None:
        self.keys.clear()

    def _record(self, key: Key, now: float) -> _Record:
        record = self.keys.pop(key, None) or _Record()
        record.retry_at = now + min(self._most_s, self._first_s * 2.0 ** min(record.failures, 30))
        record.failures += 1
        self.keys[key] = record
        if len(self.keys) > MAX_KEYS:
            self.keys.popitem(last=False)
        return record
