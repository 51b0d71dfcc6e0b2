"""Which mover writes the usage record, and so lists and deletes. No I/O and no clock: what is to be asked of the server
is yielded, and the answer sent back with the time (`Steps`); a request that fails is raised there.

The record names its writer. It is replaced only on the condition that it is still the one that was read, with a fresh
nonce each time. A record that has not changed for `stale_s` of one's own clock, or was released, may be taken over,
**which takes two writes**: some servers let two conditional writes through that arrive at once. The first is a copy
with the taker's name; a while later the taker reads that it is still there, then reads the counters, and with its
second write it is the writer, also called the janitor. Whoever finds a record of another name withdraws at once.

A write without an answer may or may not have arrived: the record is read before the next one. If it has this mover's
name, whichever nonce, it is replaced again, since what is known here is newer.

Where the server has no conditional writes (`conditions` is False), each write is preceded by a read, and followed by
another one after `settle_s`; only the mover that then finds its own write may store. Two that begin at once may both
believe that, until the next renewal of one of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from nixl_tiers.tiers.s3.record import Account, Counter, Record, UploadQuota

NEVER_S: Final = float("-inf")
T = TypeVar("T")


@dataclass(frozen=True)
class Terms:
    """In seconds."""

    renew_s: float = 5.0  # between two reads of the record, or two writes by its writer
    stale_s: float = 30.0  # a record that has not changed for so long may be taken over
    confirm_s: float = 1.0  # between the two writes of a takeover
    take_s: float = 20.0  # which must both have been answered by then, else it begins again
    delete_s: float = 20.0  # no delete begins later than that after the last own write
    settle_s: float = 2.0  # without conditional writes: between a write and the look whether it stayed
    sweep_s: float = 30.0  # between two sweeps, or as long as the last one took
    counter_s: float = 3600.0  # a counter that does not change is written again, to show that its mover lives


class Ask(NamedTuple):
    """What a step needs of the server."""

    what: str
    given: Any = None


READ: Final = "read"  # -> (ETag, Record), each of which may be None
WRITE: Final = "write"  # (Record, ETag that it must have; None: there must be none; or "": whatever) -> ETag, or None
COUNTERS: Final = "read_counters"  # -> Counter of each mover that has one
PUBLISH: Final = "publish"  # Counter of this mover
CLAIM: Final = "claim"  # -> whether no engine of an older release lives that would not be told by the record
KEEP: Final = "keep"  # tell engines of older releases that the prefix is in use -> False: one of them has it
WAIT: Final = "wait"  # seconds

Steps = Generator[Ask, tuple[float, Any], T]


class Takeover:
    """What one mover knows of the record, and its turns as its writer."""

    def __init__(
        self,
        quota: UploadQuota,
        terms: Terms,
        *,
        reads_only: bool = False,
        nonce: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self.quota = quota
        self.terms = terms
        self.conditions: bool | None = None
        """Whether the server has conditional writes; None: not known yet, so nothing is written."""
        self.account: Account | None = None
        """While this mover writes the record, as far as it knows."""
        self.others_live = False
        """Whether an engine of an older release kept this one from taking the record over."""
        self.changed_s = NEVER_S
        """When the record was first seen as it is."""
        self.next_s = NEVER_S
        """When the next turn is due."""
        self._reads_only = reads_only
        self._nonce = nonce
        self._etag: str | None = None
        self._record: Record | None = None
        self._known = False  # whether that is what there is now, as far as is known
        self._wrote_s = NEVER_S
        self._published: tuple[Counter, float] | None = None
        self._taking: tuple[str, float] | None = None  # nonce and time of a takeover's first write
        self.ended: int | None = None
        """The sweep that runs has listed everything, and all that was written before this was deleted: it ends with the
        next write."""

    def may_delete(self, now: float) -> bool:
        return self.account is not None and now < self._wrote_s + self.terms.delete_s

    def forget(self) -> None:
        """Nothing of what this mover has counted holds any more."""
        self.account, self.ended, self._known = None, None, False

    def turn(self, now: float) -> Steps[float]:
        """What is to be done every `renew_s`, and once half a window is used. Returns the time."""
        self.next_s = now + self.terms.renew_s
        if self._reads_only:
            return (yield from self._read())
        if self.conditions is None:
            return now
        now = yield from self._publish(now)
        if self.account is not None:
            return (yield from self.renew(now))
        now = yield from self._read()
        if self._may_take(now):
            now = yield from self._take(now)
        return now

    def renew(self, now: float) -> Steps[float]:
        """The writer's turn."""
        if not self._known:
            now = yield from self._read()
        account = self.account
        if account is None:
            return now
        now, counters = yield Ask(COUNTERS)
        account.read(counters)
        if self.ended is not None:
            account.end_sweep(counters, self.ended)
            self.ended = None
        wrote, now = yield from self._write(account.record(self.quota.mover, self._nonce()), now)
        if not wrote:
            return (yield from self._read())
        now, kept = yield Ask(KEEP)
        if not kept:
            self.others_live = True
            self.forget()
        return now

    def release(self, now: float) -> Steps[float]:
        """At the end: others need not wait."""
        account, self.account = self.account, None
        if account is not None and self._known:
            if self.conditions is False:
                now = yield from self._read()
            if self._record is not None and self._record.writer == self.quota.mover:
                now, _ = yield Ask(WRITE, (account.record("", self._nonce()), self._condition))
        return now

    def failed(self, now: float) -> None:
        """A request has failed. Without conditional writes another mover may have written meanwhile."""
        if self.conditions is False and now >= self._wrote_s + self.terms.take_s:
            self.quota.stop()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _publish(self, now: float) -> Steps[float]:
        """Again and again until it is counted: what has arrived may be damaged, and then nothing is granted."""
        counter = self.quota.counter(now)
        counted = self._record is not None and self._record.counted.get(self.quota.mover) == counter.ended
        if not counted or self._published is None or now > self._published[1] + self.terms.counter_s:
            now, _ = yield Ask(PUBLISH, counter)
            self._published = counter, now
            self.quota.published(counter)
        return now

    def _read(self) -> Steps[float]:
        now, (etag, record) = yield Ask(READ)
        self._found(etag, record, now)
        if record is None or record.writer != self.quota.mover:
            self.forget()
            if self.conditions is False and not self._reads_only:
                self.quota.stop()
        self._known = True
        if record is not None and (self.conditions is not False or self._reads_only):
            self.quota.refresh(record)
        return now

    def _found(self, etag: str | None, record: Record | None, now: float) -> None:
        if etag != self._etag or self.changed_s == NEVER_S:
            self.changed_s = now
        self._etag, self._record = etag, record

    def _may_take(self, now: float) -> bool:
        if self._etag is None or (self._record is not None and self._record.writer in ("", self.quota.mover)):
            return True
        return now - self.changed_s >= self.terms.stale_s

    def _take(self, now: float) -> Steps[float]:
        now, free = yield Ask(CLAIM)
        self.others_live = not free
        if not free:
            return now
        if not self._has_begun(now):
            record = self._first()
            self._taking = record.write, now
            wrote, now = yield from self._write(record, now)
            if not wrote:
                return now
            now, _ = yield Ask(WAIT, self.terms.confirm_s)
            now = yield from self._read()
            if not self._has_begun(now):
                return now
        assert self._taking is not None
        began_s = self._taking[1]
        now, counters = yield Ask(COUNTERS)
        account = self._account(counters)
        record = account.record(self.quota.mover, self._nonce())
        wrote, now = yield from self._write(record, now)
        if wrote and now - began_s < self.terms.take_s:
            self.account = account
            self.quota.refresh(record)
        return now

    def _has_begun(self, now: float) -> bool:
        """Whether the record is the one that this takeover's first write has written, a while ago."""
        if self._taking is None or self._record is None or self._record.write != self._taking[0]:
            return False
        return self.terms.confirm_s <= now - self._taking[1] < self.terms.take_s

    def _first(self) -> Record:
        """A copy of what there is: same bytes, counts, and how far was deleted."""
        copied = self._record or Record(self.quota.capacity_bytes)
        return replace(copied, writer=self.quota.mover, write=self._nonce())

    def _account(self, counters: Mapping[str, Counter]) -> Account:
        assert self._record is not None
        account = Account(self._record, self.quota.window_bytes)
        account.read(counters)
        return account

    @property
    def _condition(self) -> str | None:
        return "" if self.conditions is False else self._etag

    def _write(self, record: Record, now: float) -> Steps[tuple[bool, float]]:
        """Whether it was written in place of the record that is known; if not, that is to be read."""
        if self.conditions is False:
            replaced = self._etag
            now = yield from self._read()
            if self._etag != replaced:
                return False, now
        sent_s, self._known = now, False
        now, etag = yield Ask(WRITE, (record, self._condition))
        if etag is None:
            return False, now
        self._found(etag, record, now)
        if self.conditions is False:
            now, _ = yield Ask(WAIT, self.terms.settle_s)
            now = yield from self._read()
            if self._record is None or self._record.write != record.write:
                return False, now
        self._wrote_s, self._known = sent_s, True
        if self.conditions or self.account is not None:
            self.quota.refresh(record)
        return True, now
