"""Holding a lease (lease_state.py): the requests for it (`Lease`); a private prefix's, on a thread of its own
(`PrefixLease`), and what follows from that, whether a tier may store and delete there now (`Ownership`). Whether the
other kind of engines uses the prefix (`OtherKind`)."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS, SKEW_S, age_s
from nixl_tiers.tiers.s3.conditional import (
    CONDITIONS,
    ConditionalWrites,
    conditional_writes_work,
    delete_object,
    get_object,
    put_if,
    write_test_name,
)
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.lease_state import JANITOR_TERMS, NEVER_S, OWNER_TERMS, LeaseState, LeaseTerms, Read, Record
from nixl_tiers.tiers.s3.names import below

logger = logging.getLogger(__name__)

KIND: Final = "private prefix"
UNSEEN_S: Final = 60.0  # between two looks, after which it counts as a first one: the server was not reached meanwhile
OLD: Final = 4.0  # times as long as they are waited for: it is not waited at all


def lease_clock() -> float:
    """Seconds that this machine has run, the time that it slept included: another engine's clock went on meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Lease:
    """One lease, and the requests for it. `tenure`, `coming_tenure` and `is_claiming` are for any thread, the rest is
    for one."""

    client: Callable[[], Any]
    """Returns the present boto3 client."""
    bucket: str
    prefix: str
    engine: str
    """The ID to hold it with."""
    denials: Denials
    """Where it is reported why it is not held."""
    server_time_s: Callable[[], float]
    """Unix seconds, for the record only."""
    terms: LeaseTerms

    def __post_init__(self) -> None:
        self.state = LeaseState(self.engine, self.terms)
        self._conditions = ConditionalWrites(self.terms.doubt_s, self.terms.ask_again_s, self.terms.retry_s)
        self._since_s: float | None = None

    def tenure(self) -> int:
        """See LeaseState.tenure."""
        return self.state.tenure(lease_clock())

    def coming_tenure(self) -> int:
        """See LeaseState.coming_tenure."""
        return self.state.coming_tenure(lease_clock())

    def is_claiming(self) -> bool:
        """See LeaseState.is_claiming."""
        return self.state.is_claiming(lease_clock())

    @property
    def next_at_s(self) -> float:
        """When `step` should be called (`lease_clock`)."""
        ask_at_s = self._conditions.next_at_s
        return min(ask_at_s, self.state.next_at_s) if self._can_be_held else ask_at_s

    def can_be_held(self) -> bool:
        """Whether the server has what that needs; asks it if that is due."""
        if lease_clock() >= self._conditions.next_at_s:
            self._ask()
        return self._can_be_held

    def step(self) -> None:
        """Send what is due, at most one request for the lease. Raises what boto3 raises, and KeyError for answers that
        are not S3's."""
        try:
            if self.can_be_held():
                self._send(lease_clock())
        except (*REQUEST_ERRORS, KeyError):
            self.state.failed(lease_clock())
            raise

    def keep(self, stop: threading.Event) -> None:
        """Renew it now, or try to get it, which takes `confirm_s` if it is to be had, and ends with `stop`. Raises what
        `step` raises."""
        self.step()
        while (wait_s := self.next_at_s - lease_clock()) <= 0 or self.is_claiming():
            if stop.wait(max(0.0, wait_s)):
                return
            self.step()

    def release(self, *, write: bool = True) -> None:
        """Do not hold it any longer. `write`: tell the others, if that is possible; else it expires."""
        request = self.state.release()
        if write and request is not None:
            with contextlib.suppress(Exception):
                self._put(self.terms.name, self.terms.record("", 0.0, self.terms.lease_s).encode(), **request.condition)

    def report_conditions(self, so: str) -> None:
        """Report it if the server has no conditional writes. `so`: what follows from that."""
        if self._conditions.refused:
            self.denials.report(
                CONDITIONS, f"this server does not support conditional writes (If-None-Match, If-Match), {so}"
            )
        elif self._conditions.work:
            self.denials.succeeded(CONDITIONS)

    @property
    def _can_be_held(self) -> bool:
        return bool(self._conditions.work) or self.state.unguarded

    def _ask(self) -> None:
        """Find out whether the server knows conditional writes."""
        name = write_test_name(self.engine)
        self._conditions.asking(lease_clock())
        work = conditional_writes_work(self._put, name)  # KeyError: no ETag, so not S3's answer
        self._conditions.answered(work, lease_clock())
        unguarded = self.terms.unguarded and self._conditions.work is False
        if self.state.unguarded != unguarded:
            self.state.begin_anew(unguarded=unguarded)
        delete_object(self.client(), self.bucket, f"{self.prefix}/{name}")

    def _send(self, now: float) -> None:
        request = self.state.next_request(now)
        if isinstance(request, Read):
            self.state.read(*self._read(), lease_clock())
            return
        if self._since_s is None:
            self._since_s = self.server_time_s()
        body = self.terms.record(self.engine, self._since_s, self.terms.lease_s).encode()
        self.state.written(self._put(self.terms.name, body, **request.condition), now, lease_clock())

    def _read(self) -> tuple[str | None, Record | None]:
        found = get_object(self.client(), self.bucket, f"{self.prefix}/{self.terms.name}")
        if found is None:
            self._since_s = None
            return None, None
        record = self.terms.record.decode(found["Body"].read(1 << 16))
        self._since_s = record.since_s if record is not None and record.engine == self.engine else None
        return str(found["ETag"]), record

    def _put(self, name: str, body: bytes, **condition: str) -> str | None:
        answer = put_if(self.client(), self.bucket, f"{self.prefix}/{name}", body, condition)
        return None if answer is None else str(answer["ETag"])


@dataclass
class OtherKind:
    """Whether engines of the other kind use a prefix: a private one's owner, or the janitor of a shared one. They would
    delete what this one stores, and it what they store. A record, released or not, counts as theirs for `gone_s` after
    it was last seen to change, far longer than a lease: they may be restarted meanwhile, and no condition guards it."""

    client: Callable[[], Any]
    bucket: str
    prefix: str
    terms: LeaseTerms
    """Of the other kind's lease."""
    gone_s: float = PRODUCTION.s3_other_kind_s
    lives: bool = False
    _etag: str | None = None
    _seen_s: float = 0.0  # when the object was first seen with this ETag, or again after a time without a look
    _looked_s: float = NEVER_S

    def look(self) -> None:
        """Before anything is written that says that this engine may store. Raises what boto3 raises."""
        found, now = get_object(self.client(), self.bucket, below(self.prefix, self.terms.name)), lease_clock()
        looked_s, self._looked_s = self._looked_s, now
        if found is None:
            self.lives, self._etag = False, None
            return
        if self._etag is None and age_s(found) > OLD * self.gone_s:  # by the server's clocks, which may be two
            self._etag, self._seen_s = found["ETag"], NEVER_S
        elif found["ETag"] != self._etag or (self.lives and now - looked_s > UNSEEN_S):
            self._etag, self._seen_s = found["ETag"], now  # who could not look cannot tell: nor could they renew it
        self.lives = now - self._seen_s < self.gone_s

    @property
    def may_live(self) -> bool:
        """Also before the first look."""
        return self.lives or self._looked_s == NEVER_S

    @property
    def problem(self) -> tuple[str, str]:
        """While they do: what is wrong, and what to change."""
        which, change = "engines with shared: true use", "set shared: true in this one too, or another prefix"
        if self.terms.name == OWNER_TERMS.name:
            which, change = "an engine without shared: true uses", "set shared: true in it too, or another prefix"
        seen = f'the prefix "{self.prefix}" ("{self.terms.name}" below it is renewed, or was lately)'
        return f"{which} {seen}, so rows are only read there, not stored or deleted", change


@dataclass
class PrefixLease(Lease):
    """Holds or awaits a private prefix's lease on a thread of its own."""

    other_kind_s: float = PRODUCTION.s3_other_kind_s

    def __post_init__(self) -> None:
        super().__post_init__()
        self.other = OtherKind(self.client, self.bucket, self.prefix, JANITOR_TERMS, self.other_kind_s)
        self._started_s = lease_clock()
        self._awaited: Record | None = None  # whose lease is waited for, as was logged
        self._log_once = LogOnce(logger)
        self._answered = threading.Event()
        self._stop = threading.Event()
        self._release = False
        self._thread = threading.Thread(target=self._run, name="nixl_tiers-lease", daemon=True)

    def start(self, wait_s: float) -> None:
        """Start, and wait until the lease was asked for once, at most this long."""
        self._thread.start()
        self._answered.wait(wait_s)

    def close(self, timeout_s: float, *, release: bool) -> None:
        """Stop within `timeout_s`. `release`: hand the lease over, as nothing that was begun can still arrive."""
        self._release = release
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # The thread

    def _send(self, now: float) -> None:
        self.other.look()
        if self.other.lives:
            self.state.lost(now)  # not renewed either: of two that began at once, the shared ones go on
        else:
            super()._send(lease_clock())

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except REQUEST_ERRORS:
                pass
            except KeyError:
                self.denials.report(
                    KIND,
                    "answers have no ETag, so they are not S3's, perhaps a proxy's page: there is no lease of the "
                    f'private prefix "{self.prefix}", and nothing is stored or deleted there',
                )
            except Exception as error:  # noqa: BLE001 (this thread must not end: nobody would renew, nor say why)
                self.state.lost(lease_clock())
                self._log_once.report(
                    "lease",
                    f'the lease of the private prefix "{self.prefix}" is given up after an unexpected error '
                    f"({type(error).__name__}), and asked for again",
                )
            wait_s = self.next_at_s - lease_clock()
            if wait_s > 0:
                self._report()
                self._answered.set()
                self._stop.wait(wait_s)
        self.release(write=self._release)

    def _report(self) -> None:
        """Say why nothing is stored, if that is not ordinary."""
        state, now = self.state, lease_clock()
        where = f'the private prefix "{self.prefix}"'
        so = f"so two engines on {where} would not notice each other, and delete each other's rows"
        if self._conditions.work is None:
            so = f"and is asked again for {self.terms.doubt_s:g} s, in which nothing is stored below {where}"
        self.report_conditions(so)
        if self.other.lives:
            self.denials.report(KIND, "; ".join(self.other.problem))
        elif state.tenure(now):
            self.denials.succeeded(KIND)
        elif (other := state.other) is not None:
            if other.engine and not state.other_lives:
                self._await(other)
                return
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(other.since_s))
            owner = f"belongs to engine {other.engine} since {since}"
            if not other.engine:
                owner = f'belongs to an unknown engine ("{self.prefix}/{self.terms.name}" is no record of one)'
            self.denials.report(
                KIND,
                f'the private prefix "{self.prefix}" {owner}, so rows are only '
                "read there, not stored or deleted; set shared: true in every engine, or another prefix in this one "
                f"(the lease of an engine that crashed expires {other.lease_s:g} s after its last renewal)",
            )
        elif (
            not self._conditions.refused
            and not state.is_claiming(now)
            and (state.was_owner or now - self._started_s > self.terms.lease_s)
        ):
            why = "cannot be renewed" if state.was_owner else "cannot be acquired"
            self.denials.report(
                KIND,
                f'the lease of the private prefix "{self.prefix}" {why}, so nothing is stored or deleted there',
                unreachable=True,
            )

    def _await(self, other: Record) -> None:
        """Of this engine's own last process, as a rule: no reason to warn unless somebody renews it."""
        if self._awaited != other:
            self._awaited = other
            logger.info(
                'the lease of the private prefix "%s" was not released by engine %s: rows are only read there for up '
                "to %g s, until it has expired",
                *(self.prefix, other.engine, other.lease_s),
            )


def holder_now(client: Any, bucket: str, prefix: str, terms: LeaseTerms) -> Record | None:
    """Of a lease, by its object, for who reads it once: None if nobody has it, or it has surely expired. Raises what
    boto3 raises."""
    found = get_object(client, bucket, below(prefix, terms.name))
    record = None if found is None else terms.record.decode(found["Body"].read(1 << 16))
    if found is None or record is None or not record.engine:
        return None
    return record if age_s(found) <= max(terms.lease_s, record.lease_s) + SKEW_S else None


class Ownership:
    """Whether one tier may store and delete. `may_write` and `may_delete` are for any thread.

    On a private prefix: with the lease, once a listing that began in this tenure, or after the lease was claimed for
    it, has counted what others wrote before. On a shared one: always, but with `write: off`.
    """

    def __init__(self, config: S3Config, times: Times) -> None:
        self._config = config
        self._times = times
        self.engine = secrets.token_hex(8)
        self.reads_only = config.write == "off"
        self.lease: PrefixLease | None = None
        self._tenures = (0, 0)  # the lease's when the last listing ended, and when the present one began

    def start(self, control: S3Control) -> None:
        """Ask for the lease, if there should be one."""
        if self._config.shared or self.reads_only or self.lease is not None:
            return
        self.lease = PrefixLease(
            lambda: control.connection.client,
            self._config.bucket,
            self._config.prefix,
            self.engine,
            control.denials,
            control.connection.server_time_s,
            replace(OWNER_TERMS, claim_s=self._times.s3_claim_s),
            self._times.s3_other_kind_s,
        )
        self.lease.start(self._times.s3_lease_s)

    def close(self, *, release: bool) -> None:
        """`release`: nothing that was begun can still arrive, so that the lease may be handed over."""
        if self.lease is not None:
            self.lease.close(self._times.s3_close_s, release=release)
            self.lease = None

    @property
    def tenure(self) -> int:
        return 0 if self.lease is None else self.lease.tenure()

    @property
    def coming_tenure(self) -> int:
        """For which a listing that begins now counts."""
        return 0 if self.lease is None else self.lease.coming_tenure()

    @property
    def may_write_soon(self) -> bool:
        """Whether `may_write` may become true within a second or two, without a listing."""
        return self.lease is not None and self.lease.is_claiming() and self.may_queue_deletes

    @property
    def has_new_tenure(self) -> bool:
        """Whether everything must be listed before rows are stored and deleted."""
        return not self._config.shared and self.tenure not in (0, self._tenures[0])

    @property
    def may_write(self) -> bool:
        """Whether uploads and deletes may begin now."""
        if self._config.shared:
            return not self.reads_only
        return (tenure := self.tenure) != 0 and tenure == self._tenures[0]

    @property
    def may_queue_deletes(self) -> bool:
        """As `may_write`, and while the tenure that the last listing counts for is claimed: they are sent when it has
        begun. If it does not, the listing of the next drops them."""
        if self._config.shared:
            return not self.reads_only
        return (tenure := self.coming_tenure) != 0 and tenure == self._tenures[0]

    @property
    def may_delete(self) -> bool:
        """Whether queued deletes may be sent now: as `may_write`, and while the listing of a new tenure runs, in which
        only expired objects that it has found are queued."""
        if self._config.shared:
            return not self.reads_only
        return (tenure := self.tenure) != 0 and tenure == self._tenures[1]

    def is_other(self, tenure: int) -> bool:
        """Whether this is not the tenure of the last listing: others may have written since."""
        return tenure != self._tenures[0]

    @property
    def has_counted(self) -> bool:
        """Whether the last full listing that has begun counts for an owner."""
        return self._tenures[1] != 0

    def listing_begins(self, tenure: int) -> None:
        """A full listing of this tenure (0: without the lease) sends its first request."""
        self._tenures = (self._tenures[0], tenure)

    def forgot_rows(self) -> None:
        """Rows that are there are not counted any more: what was listed counts for no tenure."""
        self._tenures = (0, 0)

    def listing_ended(self) -> None:
        self._tenures = (self._tenures[1], self._tenures[1])
