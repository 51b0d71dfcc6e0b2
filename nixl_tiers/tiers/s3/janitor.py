"""The byte budget of a shared prefix: one mover at a time, the janitor, enforces it; all movers respect its record.

Every mover publishes what it has uploaded (`<prefix>/.landed-<id>`). The holder of the lease (lease_state.py) lists the
prefix, deletes the oldest rows of any namespace when space runs out, and writes what is left, and what others have
uploaded since, to `<prefix>/.usage`. A mover uploads at most one window of bytes that this record has not counted.
So the prefix never holds more than the capacity plus one window for each mover but one, also while two movers believe
that they hold the lease, or none does: the lease saves work, the bound does not depend on it (usage.py).

The ages of rows and counters are by the server's clocks (Date and Last-Modified); whether somebody still renews the
lease or the record is seen by its changes.
Requests that block run on a thread of the janitor's own. The lease is renewed there too, so that a janitor that hangs
loses it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from botocore.parsers import ResponseParserError

from nixl_tiers.base.chunk import NAMESPACE_BYTES
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS, answered_at_s
from nixl_tiers.tiers.s3.conditional import get_object, put_if
from nixl_tiers.tiers.s3.deletes import delete_objects, most_names
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.lease import Lease, OtherKind, lease_clock
from nixl_tiers.tiers.s3.lease_state import JANITOR_TERMS, OWNER_TERMS, LeaseTerms
from nixl_tiers.tiers.s3.listing import EmptyPages, limited, whole_listing
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.usage import Account, UploadQuota, Usage, Victims

logger = logging.getLogger(__name__)

USAGE_NAME: Final = ".usage"
COUNTER_NAME: Final = ".landed-"  # and the mover's ID
COUNTER_REWRITE_S: Final = 3600.0  # a counter that does not change is written again, to show that its mover lives
COUNTER_TIMEOUT_S: Final = 3 * COUNTER_REWRITE_S  # one that was not, for this long, is deleted
LEAST_AHEAD_S: Final = 5.0  # both times are in whole seconds, and answers take time


@dataclass(frozen=True)
class JanitorIntervals:
    """Intervals and timeouts, in seconds."""

    renew_s: float = JANITOR_TERMS.renew_s  # between renewals of the lease and the usage record, and reads of it
    usage_timeout_s: float = 60.0  # a usage record not renewed for this long is stale, and allows no upload
    sweep_s: float = 30.0  # between two listings of the whole prefix; longer if a listing takes longer
    lease: LeaseTerms = JANITOR_TERMS


@dataclass
class _Sweep:
    """A listing of the whole prefix that has not ended yet."""

    account: Account
    victims: Victims
    started: float
    rows: int = 0
    last: str = ""  # the last row listed; no other object, whose name may be damaged: rows behind it would be skipped


class Janitor:
    """Keeps one mover's UploadQuota up to date, and enforces the budget for all movers while it holds the lease."""

    def __init__(
        self,
        client: Callable[[], Any],
        bucket: str,
        prefix: str,
        *,
        quota: UploadQuota,
        intervals: JanitorIntervals,
        denials: Denials,
        max_age_s: float | None = None,
        reads_only: bool = False,
        close_s: float = PRODUCTION.s3_close_s,
        other_kind_s: float = PRODUCTION.s3_other_kind_s,
    ) -> None:
        """`client`: returns the present boto3 client. `denials`: where it reports what the server does not support.
        `max_age_s`: rows that were last written longer ago are deleted even if there is room. `reads_only`: it only
        reads the usage record."""
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._quota = quota
        self._names = RowNames(prefix)
        self._intervals = intervals
        self._denials = denials
        self._log_once = LogOnce(logger)
        self._max_age_s = float("inf") if max_age_s is None else max_age_s
        self._reads_only = reads_only
        self._close_s = close_s
        self._id = quota.mover
        self._lease = Lease(client, bucket, prefix, quota.mover, denials, time.time, intervals.lease)
        self.other = OtherKind(client, bucket, prefix, OWNER_TERMS, other_kind_s)
        self._others = 0  # of the lease, when what was listed was last forgotten
        self._usage_etag: str | None = None  # the usage record's ETag
        self._usage: Usage | None = None  # the record with that ETag
        self._usage_version: object = None  # of the record as last read, another one after each renewal
        self._renewed_s = float("-inf")  # when it was renewed, at the earliest
        self._looked_s = float("-inf")  # when it was last asked for
        self._account: Account | None = None  # of this mover's last sweep
        self._victims = Victims(0)
        self._rows = 0  # found by the last sweep
        self._sweeping: _Sweep | None = None  # in progress
        self._counters: dict[str, tuple[str, int]] = {}  # of each mover: the ETag and the value
        self._published: tuple[int, float] | None = None  # this mover's counter, and when it was written
        self._server_s = 0.0
        self._valid_at = time.monotonic()  # when there was last a usage record that allows uploads
        self._sweep_at = 0.0
        self._renew_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nixl_tiers-janitor", daemon=True)

    @property
    def holds_lease(self) -> bool:
        """Whether this mover holds the lease, as far as it knows, and may work."""
        return self._lease.tenure() != 0 and not self.other.lives

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop within `close_s`, and release the lease, so that the others need not wait until it expires."""
        self._stop.set()
        self._thread.join(self._close_s)

    # The thread

    def _run(self) -> None:
        while not self._stop.is_set():
            self.step()
            self._stop.wait(self._intervals.renew_s)
        self._lease.release()

    def step(self) -> None:
        """What is to be done every `renew_s`. A request that fails ends it; the next one goes on from there."""
        if self._reads_only:
            with contextlib.suppress(*REQUEST_ERRORS, KeyError, ValueError):
                self._read_usage()
            return
        try:
            can_be_held = self._lease.can_be_held()
            self._lease.report_conditions(f'so nothing is written below the shared prefix "{self._prefix}"')
            if not can_be_held:
                self.other.look()  # bad rows are deleted nevertheless
                return
            self._renew()
            if self.holds_lease and time.monotonic() >= self._sweep_at:
                self._sweep()
            self._make_room()
        except REQUEST_ERRORS:
            pass
        except (KeyError, ValueError):
            self._lease.state.lost(lease_clock())
            self._denials.report(
                "shared prefix",
                "answers lack an ETag, a Date or a Last-Modified, "
                f'so nothing is written below the shared prefix "{self._prefix}"',
            )
            return
        except Exception as error:  # noqa: BLE001 (this thread must not end)
            self._lease.state.lost(lease_clock())
            self._forget()
            self._log_once.report(
                "janitor",
                f'the janitor of the shared prefix "{self._prefix}" has stopped after an unexpected error '
                f"({type(error).__name__}), and starts again",
            )
        self._report_usage()

    def _report_usage(self) -> None:
        """Say so if nothing may be uploaded for long."""
        if not self._lease.tenure():
            self._denials.lists_nothing()
        if self.other.lives:
            self._denials.report("shared prefix", "; ".join(self.other.problem))
            return
        since_s = time.monotonic() - self._valid_at
        if since_s <= self._intervals.usage_timeout_s:
            self._denials.succeeded("shared prefix")
            return
        self._denials.report(
            "shared prefix",
            f'the usage record of the shared prefix "{self._prefix}" was not renewed for '
            f"{self._intervals.usage_timeout_s:g} s, so nothing is written there until a janitor has listed it",
            unreachable=True,
        )

    def _forget(self) -> None:
        """Forget what was listed: with the lease, begin with a sweep."""
        self._account = self._sweeping = None
        self._sweep_at = 0.0

    def _renew(self) -> None:
        """Publish the counter, renew the lease or try to acquire it, renew the usage record, and read it."""
        self.other.look()
        if self.other.lives:
            self._quota.stop()
            self._forget()
            if self._lease.tenure():  # of two kinds that began at once, the shared one goes on
                self._lease.keep(self._stop)
            return
        self._publish()
        self._lease.keep(self._stop)
        if self._lease.state.others != self._others:  # one of them may have been the janitor since the last sweep
            self._others = self._lease.state.others
            self._forget()
        self._renew_at = time.monotonic() + self._intervals.renew_s
        if self.holds_lease and self._account is not None:
            self._account.read(self._read_counters())
            self._write_usage()
        self._read_usage()

    def _publish(self) -> None:
        counter, now = self._quota.counter, time.monotonic()
        if self._published is None or counter != self._published[0] or now > self._published[1] + COUNTER_REWRITE_S:
            self._put(f"{COUNTER_NAME}{self._id}", str(counter).encode())
            self._published = (counter, now)

    def _read_usage(self) -> None:
        """A record was renewed after it was last seen without that, so the age that counts is at least the true one."""
        asked_s = time.monotonic()
        found = get_object(self._client(), self._bucket, self._name(USAGE_NAME))
        looked_before_s, self._looked_s = self._looked_s, asked_s
        if found is None:
            self._usage_etag = self._usage = self._usage_version = None
            return
        usage = Usage.decode(found["Body"].read())
        self._usage_etag, self._usage = found["ETag"], usage
        version = found["ETag"], found["LastModified"]  # if its content stays, only the time changes
        if version != self._usage_version:
            self._usage_version, self._renewed_s = version, looked_before_s
            ahead_s = _date(found) - found["LastModified"].timestamp() - (asked_s - looked_before_s)
            self._quota.ahead_s = ahead_s if ahead_s > LEAST_AHEAD_S else 0.0
        valid_for_s = self._intervals.usage_timeout_s - (time.monotonic() - self._renewed_s)
        self._quota.refresh(usage, valid_for_s)
        if usage is not None and valid_for_s > 0:
            self._valid_at = time.monotonic()

    # The lease holder's work

    def _read_counters(self) -> dict[str, int]:
        """The counters of all movers; those of movers that are long gone are deleted."""
        counters: dict[str, tuple[str, int]] = {}
        names = self._name(COUNTER_NAME)
        for page in self._told(names, limited(whole_listing(self._client(), self._bucket, names))):
            for each in page.get("Contents", ()):
                mover = each["Key"].removeprefix(names)
                if _date(page) - each["LastModified"].timestamp() > COUNTER_TIMEOUT_S:
                    self._client().delete_object(Bucket=self._bucket, Key=each["Key"])
                elif mover in self._counters and self._counters[mover][0] == each["ETag"]:
                    counters[mover] = self._counters[mover]
                else:
                    found = self._client().get_object(Bucket=self._bucket, Key=each["Key"])
                    value = self._value_of(mover, found["Body"].read())
                    if value is not None:
                        counters[mover] = (found["ETag"], value)
        self._counters = counters
        return {mover: counter for mover, (_, counter) in counters.items()}

    def _value_of(self, mover: str, body: bytes) -> int | None:
        """Of a counter; if it is no number, what the usage record has counted of it.

        A counter never falls, so that is at most the true value, and its mover may upload no more than with that one. A
        mover that is not in the record either (None) uploads nothing before a sweep that can read its counter."""
        try:
            return int(body)
        except ValueError:
            self._log_once.report(
                f"counter of {mover}",
                f"{self._name(COUNTER_NAME + mover)!r} in the bucket is no number; it is deleted when it is "
                f"{COUNTER_TIMEOUT_S / 3600:.0f} hours old, unless its mover writes it again",
            )
            return None if self._usage is None else self._usage.counted.get(mover)

    def _sweep(self) -> None:
        """List everything, and write the usage record. If a request fails, the next call goes on from there."""
        if self._sweeping is None:
            self._sweeping = _Sweep(Account(self._read_counters()), Victims(self._rows), time.monotonic())
        sweep = self._sweeping
        empty = EmptyPages()
        pages = whole_listing(self._client(), self._bucket, self._names.root, sweep.last)
        for page in self._told(self._names.root, pages):
            if empty.too_many(page):  # a failure would begin again in front of them
                self._report_usage()
                self._stop.wait(self._intervals.renew_s)
            for each in page.get("Contents", ()):
                row = self._names.parse(each["Key"])
                if row is not None:
                    modified_s, nbytes = each["LastModified"].timestamp(), each["Size"]
                    sweep.rows += 1
                    sweep.account.listed(nbytes)
                    # Rows that `_make_room` deletes now may be in this listing. They stay in this account, and are
                    # deleted once more before others: the oldest are the first.
                    sweep.victims.add(modified_s, bytes.fromhex(row[0]) + row[1], nbytes)
                    sweep.last = each["Key"]
            if time.monotonic() >= self._renew_at:
                self._renew()
                self._make_room()
            if self._sweeping is not sweep or not self.holds_lease or self._stop.is_set():
                return
        sweep.account.read({mover: counter for mover, (_, counter) in self._counters.items()})
        self._account, self._victims, self._rows = sweep.account, sweep.victims, sweep.rows
        self._sweeping = None
        self._sweep_at = time.monotonic() + max(self._intervals.sweep_s, time.monotonic() - sweep.started)
        self._write_usage()
        self._read_usage()

    def _told(self, prefix: str, pages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The pages of a listing. If they keep failing, that is told."""
        try:
            for page in pages:
                self._denials.page_listed(prefix)
                yield page
        except REQUEST_ERRORS as error:
            self._denials.page_failed(prefix, error, "rows are not deleted, and so before long none is written")
            raise

    def _make_room(self) -> None:
        """Delete expired rows, and if less than a window is free the oldest others until two are."""
        window, capacity = self._quota.window_bytes, self._quota.capacity_bytes
        account = self._account
        if account is None:
            return
        total = account.usage.nbytes
        # A window more than necessary, or there would be room for one row at a time.
        excess = total - max(0, capacity - 2 * window) if total + window > capacity else 0
        freed = 0
        while self.holds_lease and self._account is account and not self._stop.is_set():
            names = self._victims.take(excess - freed, self._server_s - self._max_age_s, most_names())
            if not names:
                break
            try:
                deleted = self._delete({self._row_name(name): nbytes for name, nbytes in names.items()})
            except Exception:
                self._victims.put_back()  # perhaps deleted: they are deleted once more before others
                raise
            if not deleted:
                return
            freed += deleted
            account.deleted(deleted)
            if time.monotonic() >= self._renew_at:
                self._renew()
        if self._account is not account:
            return
        if freed:
            self._write_usage()  # without the lease it fails, or writes what is true
            self._read_usage()
        if freed < excess and (freed or account.landed_bytes):
            self._sweep_at = 0.0  # there are no more names, but the next listing finds some

    def _row_name(self, packed: bytes) -> str:
        return self._names.name(packed[:NAMESPACE_BYTES].hex(), packed[NAMESPACE_BYTES:])

    def _delete(self, victims: dict[str, int]) -> int:
        answer = delete_objects(self._client(), self._bucket, [{"Key": name} for name in victims])
        failed = {error.get("Key") for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"}
        if not failed <= victims.keys():
            raise ResponseParserError("an error in the answer to a delete request names no object of the request")
        return sum(nbytes for name, nbytes in victims.items() if name not in failed)

    def _write_usage(self) -> None:
        """Replace the record that was last read; if there is another one by now, the next `_renew` reads it.

        What the record has counted, the new one counts too. If it has counted a mover that began after this account's
        listing, another janitor's listing is newer: the record stays until the next sweep."""
        assert self._account is not None
        if self._usage is not None:
            unknown = self._account.unknown(self._usage)
            if unknown and unknown & self._read_counters().keys():
                return
            self._account.read(self._usage.counted)
        usage = replace(self._account.usage, oldest=self._victims.oldest)
        if self._usage is not None:  # else the prefix could hold more than its capacity: docs/internals/s3-tier.md
            counted = self._usage.counted.items()
            assert all(usage.counted.get(mover, n) >= n for mover, n in counted), "a record counts less than the last"
        condition = {"IfNoneMatch": "*"} if self._usage_etag is None else {"IfMatch": self._usage_etag}
        if etag := self._put(USAGE_NAME, usage.encode(), **condition):
            self._usage_etag, self._usage = etag, usage

    # Requests

    def _put(self, name: str, body: bytes, **condition: str) -> str | None:
        """Write a small object; its ETag, or None if the condition does not hold."""
        answer = put_if(self._client(), self._bucket, self._name(name), body, condition)
        if answer is None:
            return None
        self._server_s = _date(answer)
        return str(answer.get("ETag", ""))

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def _date(answer: dict[str, Any]) -> float:
    """The server's Unix time when it answered, in whole seconds. Raises KeyError if it has no Date."""
    date_s = answered_at_s(answer)
    if date_s is None:
        raise KeyError("date")
    return date_s
