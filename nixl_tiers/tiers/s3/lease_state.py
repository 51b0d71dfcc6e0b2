"""A lease below a prefix: of a private one's owner, or of a shared one's janitor. One holder at a time works there.

The lease is an object below the prefix, written with If-None-Match or If-Match only, so that each write replaces the
content that its writer has read. Every write has a new ETag, and the object is never deleted. Some servers let several
such writes through that arrive at once, so one does not make a holder: an engine claims the lease with the first,
waits, reads that its own is the one that stayed, and holds it from the second on. Nobody compares clocks:

- The holder may work for `lease_s - margin_s` after it *sent* its last successful renewal, by its own clock. For as
  long a claim counts: the second write is another claim if its answer comes later.
- Another engine takes over once the object's ETag has not changed for `lease_s` after the *answer* that first had it,
  by that engine's clock. The condition of its write makes sure that no renewal came in between.

The renewal was sent before it was first read, so the holder's time ends `margin_s` before another's begins, however
late requests arrive and whichever answers are lost, while clocks differ in rate by less than margin_s / (2 * lease_s).
The margin is also for what the holder began in time: the second try of a delete request.

The owner is an engine, not a mover: a mover that was restarted finds its engine's ID in the object and need not wait
until the lease expires. The janitor is a mover, whose counts end with it.

On a server without conditional writes there is no lease: an engine stores below a private prefix without one, but not
while the object names another that renews it. A shared prefix has no janitor there.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import Final, Self

MAX_LEASE_S: Final = 3600.0  # what a record may claim
NEVER_S: Final = float("-inf")


@dataclass(frozen=True)
class Record:
    """What an owner's lease holds."""

    engine: str  # "": released; as `LeaseState.other`: not known
    since_s: float  # Unix time since when it is this engine's
    lease_s: float  # as `LeaseTerms.lease_s`, at least

    def encode(self) -> bytes:
        """Different for each call, so that no two writes have the same ETag."""
        fields = {"engine": self.engine, "since": self.since_s, "lease": self.lease_s, "write": secrets.token_hex(8)}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self | None:
        """None if this is not such a record."""
        try:
            found = json.loads(raw)
            engine, since_s, lease_s = str(found["engine"]), float(found["since"]), float(found["lease"])
            time.gmtime(since_s)
        except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
            return None
        return cls("".join(filter(str.isprintable, engine))[:128], since_s, min(lease_s, MAX_LEASE_S))


class JanitorRecord(Record):
    """What a janitor's lease holds."""

    def encode(self) -> bytes:
        return f"{self.engine} {secrets.randbits(63)}".encode() if self.engine else b""

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        return cls(raw.partition(b" ")[0].decode("ascii", "replace"), 0.0, 0.0)


@dataclass(frozen=True)
class LeaseTerms:
    """Of a lease, in seconds; by default of an owner's."""

    lease_s: float = 60.0  # a lease that was not renewed for this long has expired
    margin_s: float = 20.0  # its holder stops so long before that
    renew_s: float = 15.0  # between two renewals: two may fail before the holder stops
    poll_s: float = 10.0  # between two reads of another engine's lease
    retry_s: float = 1.0  # after an error, or a condition that did not hold; doubles up to renew_s
    confirm_s: float = 1.0  # between the two writes that begin a tenure, or a little more
    claim_s: float = 1.0  # after `confirm_s`: how long uploads wait for the claim's last two requests
    doubt_s: float = 60.0  # conditional writes must fail for so long before it is believed that there are none
    ask_again_s: float = 3600.0  # whether they work meanwhile
    unguarded: bool = True  # whether its holder works without a lease where there are none
    name: str = ".owner"  # of the object, below the prefix
    record: type[Record] = Record

    def __post_init__(self) -> None:
        assert 0 < self.margin_s < self.lease_s, "else two could hold it: docs/internals/s3-tier.md"


OWNER_TERMS: Final = LeaseTerms()
JANITOR_TERMS: Final = LeaseTerms(
    lease_s=30.0, margin_s=10.0, renew_s=5.0, poll_s=5.0, unguarded=False, name=".janitor", record=JanitorRecord
)


@dataclass(frozen=True)
class Read:
    """Read the object: `LeaseState.read` with the answer."""


@dataclass(frozen=True)
class Write:
    """Write the object if its ETag is still this one (None: if there is none): `LeaseState.written`."""

    etag: str | None

    @property
    def condition(self) -> dict[str, str]:
        return {"IfNoneMatch": "*"} if self.etag is None else {"IfMatch": self.etag}


@dataclass
class _Claim:
    """This engine has written the object, and is not the owner yet."""

    tenure: int  # which it is for
    since_s: float
    until_s: float  # the time of the answer to its second write: later, others may have taken it for expired
    confirmed: bool = False  # whether the object was this engine's `confirm_s` later


class LeaseState:
    """What one engine knows of the lease. No I/O and no clock: `now` is its own steady clock, in seconds.

    One request at a time: `next_request`, then one of `read`, `written` and `failed`.
    """

    def __init__(self, engine: str, terms: LeaseTerms) -> None:
        self.engine = engine
        self.terms = terms
        self.unguarded = False
        """Whether the server has no conditional writes: nothing is written, and nobody else's lease is taken over."""
        self.other: Record | None = None  # of the engine that holds it
        self.other_lives = False  # whether that engine was seen to write it
        self.others = 0
        """How often the object was not this engine's when it was read. While that does not change, nobody else has held
        the lease."""
        self.was_owner = False
        self.next_at_s = NEVER_S
        """When to send the next request."""
        self._held = (0, NEVER_S)  # tenure, and until when it may work; replaced as one, since other threads read it
        self._tenures = 0  # and claims to one, so far
        self._claim: _Claim | None = None
        self._known = False  # whether the object was last seen with `_etag`
        self._etag: str | None = None
        self._ours = False  # whether it may be written without waiting
        self._seen_s = 0.0  # when another engine's record was first seen with this ETag
        self._expiry_s = terms.lease_s
        self._retry_s = terms.retry_s

    def tenure(self, now: float) -> int:
        """The number of the time since which this engine may work without an interruption, from 1 on; 0: it may not.
        A new number: others may have written in between."""
        number, until_s = self._held
        return number if now < until_s else 0

    def coming_tenure(self, now: float) -> int:
        """The present tenure, or the one that is claimed; 0: neither. No other begins in between, so that what is
        listed from now on counts for it."""
        claim = self._claim
        return self.tenure(now) or (0 if claim is None else claim.tenure)

    def is_claiming(self, now: float) -> bool:
        """Whether a tenure may begin any moment."""
        claim = self._claim
        return claim is not None and now < claim.since_s + self.terms.confirm_s + self.terms.claim_s

    def next_request(self, now: float) -> Read | Write:
        """The request to send now."""
        if self.unguarded or (self._claim is not None and not self._claim.confirmed):
            return Read()
        if self._known and (self._ours or self._has_expired(now)):
            return Write(self._etag)
        return Read()

    def read(self, etag: str | None, record: Record | None, now: float) -> None:
        """The object has this ETag and content; no ETag: there is none. A content of None is of no known engine."""
        engine = None if record is None else record.engine
        changed, wrote = etag != self._etag, self._etag is not None
        self._ours = etag is None or engine in ("", self.engine)
        self._etag, self._known = etag, True
        if engine != self.engine:
            self._claim = None
            self.others += 1
        if self._ours:
            self.other, self.next_at_s = None, now
        else:
            if changed or self.other is None:
                self._seen_s = now
                self._expiry_s = self.terms.lease_s if record is None else max(self.terms.lease_s, record.lease_s)
                self.other_lives = changed and wrote
            self.other = record or Record("", 0.0, self.terms.lease_s)
            self._retry_s = self.terms.retry_s
            self.next_at_s = min(now + self.terms.poll_s, max(now, self._seen_s + self._expiry_s))
        if self.unguarded and (self._ours or self._has_expired(now)):
            self._hold(now, now)
            self.next_at_s = now + self.terms.poll_s
        elif not self._ours:
            self._held = (self._held[0], NEVER_S)
        elif self._claim is not None:
            self.next_at_s = max(now, self._claim.since_s + self.terms.confirm_s)
            self._claim.confirmed = self.next_at_s == now

    def written(self, etag: str | None, sent_s: float, now: float) -> None:
        """The object was written and has this ETag; None: the condition did not hold. `sent_s`: before the request."""
        if etag is None:
            return self.failed(now)
        self._etag, self._known, self._ours, self.other = etag, True, True, None
        self._retry_s = self.terms.retry_s
        if self.tenure(now) or (self._claim is not None and now < self._claim.until_s):
            self._hold(sent_s, now)
            self.next_at_s = sent_s + self.terms.renew_s
        else:
            self._tenures += 1
            self._claim = _Claim(self._tenures, now, self._until_s(sent_s))
            self.next_at_s = now + self.terms.confirm_s
        return None

    def failed(self, now: float) -> None:
        """The request may or may not have arrived: read the object before it is written again."""
        self._known = False
        self.next_at_s = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, self.terms.renew_s)

    def lost(self, now: float) -> None:
        """Something unknown went wrong: no more work until a new tenure begins."""
        self._held = (self._held[0], NEVER_S)
        self._claim = None
        self.failed(now)

    def begin_anew(self, *, unguarded: bool) -> None:
        """The server turned out to be another kind: nothing that is known of the object holds."""
        self.unguarded = unguarded
        self._held = (self._held[0], NEVER_S)
        self._claim = self._etag = self.other = None
        self._known, self.next_at_s = False, NEVER_S

    def release(self) -> Write | None:
        """No more work from now on. The request that hands the lease over; None: it must expire."""
        held = self._held[1] > NEVER_S or self._claim is not None
        self._held, self._claim = (self._held[0], NEVER_S), None
        return Write(self._etag) if held and self._known and self._ours and not self.unguarded else None

    def _has_expired(self, now: float) -> bool:
        return now >= self._seen_s + self._expiry_s  # as `read` says when to ask

    def _hold(self, sent_s: float, now: float) -> None:
        assert sent_s <= now, "a tenure is measured from before its renewal was sent"
        number = self.coming_tenure(now)
        if not number:
            number = self._tenures = self._tenures + 1
        self._held = (number, self._until_s(sent_s))
        self._claim = None
        self.was_owner = True

    def _until_s(self, sent_s: float) -> float:
        """Before when nobody takes over what a write that was sent then has written."""
        return sent_s + self.terms.lease_s - self.terms.margin_s
