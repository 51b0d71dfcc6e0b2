"""Which mover writes the usage record, and so lists and deletes. No I/O and no clock: what is to be asked of the server
is yielded, and the answer sent back with the time (`Steps`); a request that fails is raised there.

The record names its writer. It is replaced only on the condition that it is still the one that was read, with a fresh
nonce each time. A record that has not changed for `stale_s` of one's own clock, or was released, may be taken over,
**which takes two writes**: some servers let two conditional writes through that arrive at once. The first is a copy
with the taker's name; a while later the taker reads that it is still there, then reads the counters, and with its
second write it is the writer, also called the janitor. Whoever finds a record of another name withdraws at once.

The record is read before each write, as one without an answer may or may not have arrived. If it has this mover's
name, whichever nonce, it is replaced again, since what is known here is newer.

Where the server has no conditional writes (budget.py, `_write`), only the mover that the record names may store
(`UploadQuota.alone`). Two that begin at once may both believe that, until the next renewal of one of them.
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
WRITE: Final = "write"  # (Record, ETag that it must have; None: there must be none) -> ETag, or None
COUNTERS: Final = "read_counters"  # -> Counter of each mover that has one
PUBLISH: Final = "publish"  # Counter of this mover
CLAIM: Final = "claim"  # the time -> whether an older release has stored here without the record; None: it lives
KEEP: Final = "keep"  # the time: tell engines of older releases that the prefix is in use -> False: one of them has it
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
        self.account: Account | None = None
        """While this mover writes the record, as far as it knows."""
        self.record: Record | None = None
        """As it was read or written last."""
        self.changed_s = NEVER_S
        """When it was first seen as it is."""
        self.next_s = NEVER_S
        """When the next turn is due."""
        self._reads_only = reads_only
        self._nonce = nonce
        self._etag: str | None = None
        self._wrote_s = NEVER_S
        self._taking = "", NEVER_S  # nonce and time of a takeover's first write
        self._published_s = NEVER_S

    def may_delete(self, now: float) -> bool:
        return self.account is not None and now < self._wrote_s + self.terms.delete_s

    def turn(self, now: float) -> Steps[float]:
        """What is to be done every `renew_s`, and once half a window is used. Returns the time."""
        self.next_s = now + self.terms.renew_s
        if self._reads_only:
            return (yield from self.read())
        counter = self.quota.counter(now)
        counted = self.record is not None and self.record.counted.get(self.quota.mover) == counter.ended
        # Again and again until it is counted: what has arrived may be damaged, and then nothing is granted.
        if not counted or self.quota.failing or now > self._published_s + self.terms.counter_s:
            self.quota.failing = False
            try:
                now, _ = yield Ask(PUBLISH, counter)
            except Exception:
                yield from self.read()  # who may not write hears nevertheless what was deleted
                raise
            self._published_s = now
            self.quota.published(counter)
        now = yield from self.renew(now)
        if self.account is None and self._may_take(now):
            now = yield from self._take(now)
        return now

    def renew(self, now: float) -> Steps[float]:
        """Read the record, and write it if it is this mover's."""
        now = yield from self.read()
        account = self.account
        if account is None:
            return now
        now, counters = yield Ask(COUNTERS)
        if account.ended is None:
            account.read(counters)
        else:
            account.end_sweep(counters, account.ended)
        wrote, now = yield from self._write(account.record(self.quota.mover, self._nonce()), now)
        if not wrote:
            return (yield from self.read())
        return (yield from self._keep(now))

    def release(self, now: float) -> Steps[float]:
        """At the end: others need not wait."""
        if self.account is not None:
            now, _ = yield Ask(WRITE, (self.account.record("", self._nonce()), self._etag))
            self.account = None
        return now

    def read(self) -> Steps[float]:
        """Read the record. Returns the time."""
        now, (etag, record) = yield Ask(READ)
        self._found(etag, record, now)
        if record is None or record.writer != self.quota.mover:
            self.account = None  # nothing of what this mover has counted holds any more
        return now

    # --- inside -----------------------------------------------------------------------------------------------------

    def _found(self, etag: str | None, record: Record | None, now: float) -> None:
        if etag != self._etag:
            self.changed_s = now
        self._etag, self.record = etag, record
        if record is not None:
            self.quota.refresh(record)

    def _may_take(self, now: float) -> bool:
        if self._etag is None or (self.record is not None and self.record.writer in ("", self.quota.mover)):
            return True
        return now - self.changed_s >= self.terms.stale_s

    def _take(self, now: float) -> Steps[float]:
        now, unseen = yield Ask(CLAIM, now)
        if unseen is None:
            return now
        if not self._stayed(now):
            now, _ = yield Ask(COUNTERS)  # who cannot list must not keep others from it
            record = self._first(unseen=unseen)
            self._taking = record.write, now
            wrote, now = yield from self._write(record, now)
            if not wrote:
                return now
            now, _ = yield Ask(WAIT, self.terms.confirm_s)
            now = yield from self.read()
            if not self._stayed(now):
                return now
        now, counters = yield Ask(COUNTERS)
        account = self._account(counters)
        wrote, now = yield from self._write(account.record(self.quota.mover, self._nonce()), now)
        if wrote and now - self._taking[1] < self.terms.take_s:
            self.account = account
            now = yield from self._keep(now)
        return now

    def _keep(self, now: float) -> Steps[float]:
        now, kept = yield Ask(KEEP, now)
        if not kept:
            self.account = None
        return now

    def _stayed(self, now: float) -> bool:
        """Whether the record is the one that this takeover's first write has written, a while ago."""
        write, began_s = self._taking
        stayed = self.record is not None and self.record.write == write
        return stayed and self.terms.confirm_s <= now - began_s < self.terms.take_s

    def _first(self, *, unseen: bool) -> Record:
        """A copy of what there is: same bytes, counts, and how far was deleted. `unseen`: there may be more than it
        says, so nothing is stored before a sweep."""
        copied = self.record or Record(self.quota.capacity_bytes)
        if unseen:
            copied = replace(copied, nbytes=max(copied.nbytes, self.quota.capacity_bytes), swept=0)
        return replace(copied, writer=self.quota.mover, write=self._nonce())

    def _account(self, counters: Mapping[str, Counter]) -> Account:
        assert self.record is not None
        account = Account(self.record, self.quota.window_bytes)
        account.read(counters)
        return account

    def _write(self, record: Record, now: float) -> Steps[tuple[bool, float]]:
        """Whether it was written in place of the one that was read; if not, that is to be read."""
        sent_s = now
        now, etag = yield Ask(WRITE, (record, self._etag))
        if etag is None:
            return False, now
        self._found(etag, record, now)
        self._wrote_s = sent_s
        return True, now
