"""The byte budget of a shared prefix: one mover at a time, the janitor, enforces it; all movers respect its record.

The holder of the lease (`<prefix>/.janitor`) lists the prefix, deletes the oldest rows of any namespace when space runs
out, and writes the remaining bytes to `<prefix>/.usage`. A mover uploads at most one window of bytes that this record
cannot have counted yet. So the prefix never holds more than the capacity plus one window per mover, also while two
movers believe that they hold the lease, or none does: the lease saves work, the bound does not depend on it.

Times are compared with times of the same server (its Date and Last-Modified); local clocks only measure intervals.
Requests that block run on a thread of the janitor's own.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final, Self

from botocore.exceptions import BotoCoreError, ClientError

from nixl_tiers.tiers.s3.conditional import conditional_writes_work, put_if, status_of
from nixl_tiers.tiers.s3.denials import Denials

LEASE_NAME: Final = ".janitor"
USAGE_NAME: Final = ".usage"
WINDOW_SHARE: Final = 64  # an upload window is the capacity divided by this, and at least a row
MAX_VICTIMS: Final = 1 << 16  # of one sweep, whose names are kept in memory
MAX_DELETES: Final = 1000  # names in one DeleteObjects request
SKEW_S: Final = 1.0  # between the clocks of one service's front ends, and what a Date header rounds off
CLOSE_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True)
class JanitorIntervals:
    """Intervals and timeouts, in seconds."""

    renew_s: float = 5.0  # between renewals of the lease (the janitor's heartbeat), and reads of the usage record
    lease_timeout_s: float = 30.0  # a lease not renewed for this long has expired, and may be taken over
    usage_timeout_s: float = 60.0  # a usage record not renewed for this long is stale, and allows no upload
    sweep_s: float = 30.0  # between two listings of the whole prefix; longer if a listing takes longer


@dataclass(frozen=True)
class Usage:
    """The usage record: bytes that a listing found below the prefix, less those deleted since. The listing began at
    `began_s`, the server's Unix time."""

    nbytes: int
    began_s: float

    def encode(self) -> bytes:
        return json.dumps({"bytes": self.nbytes, "began": self.began_s}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self | None:
        """None if this is not a usage record."""
        try:
            found = json.loads(raw)
            return cls(int(found["bytes"]), float(found["began"]))
        except (ValueError, TypeError, KeyError):
            return None


class UploadQuota:
    """How much this mover may upload now. The mover's loop acquires; the janitor's thread refreshes it by the record.

    Ended uploads count until a listing that began after them has counted them: they are `unstamped` until the server's
    time is requested, `stamping` during that request, and then `stamped` with that time.
    """

    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.window_bytes = max(row_bytes, capacity_bytes // WINDOW_SHARE)
        self._lock = threading.Lock()
        self._usage: Usage | None = None
        self._valid_until = 0.0  # monotonic
        self._in_flight = 0
        # Uploads in flight when a previous process died are in no listing yet: assume a whole window of them.
        self._unstamped = self.window_bytes
        self._stamping = 0
        self._stamped: deque[tuple[float, int]] = deque()  # (server time by which they had ended, bytes)

    def try_acquire(self, nbytes: int) -> bool:
        """Count an upload that is about to start; False if there is no room for it now."""
        with self._lock:
            usage = self._usage
            if usage is None or time.monotonic() > self._valid_until:
                return False
            if usage.nbytes + self.window_bytes > self.capacity_bytes or self._uncounted() + nbytes > self.window_bytes:
                return False
            self._in_flight += nbytes
            return True

    def upload_ended(self, nbytes: int) -> None:
        """An upload has ended, successfully or not."""
        with self._lock:
            self._in_flight -= nbytes
            self._unstamped += nbytes

    @property
    def used_bytes(self) -> int | None:
        """Bytes below the prefix by the usage record; None before there is one."""
        with self._lock:
            return None if self._usage is None else self._usage.nbytes

    def begin_refresh(self) -> None:
        """Call it before the request whose answer is given to `refresh`: uploads that ended before it get its time."""
        with self._lock:
            self._stamping, self._unstamped = self._stamping + self._unstamped, 0

    def refresh(self, now_s: float, usage: Usage | None, valid_for_s: float) -> None:
        """The server's time, and the usage record, which is valid for `valid_for_s` from now on."""
        with self._lock:
            if self._stamping:
                self._stamped.append((now_s, self._stamping))
                self._stamping = 0
            # An older record than one seen before is that of a janitor that was replaced, and may count too little.
            if usage is None or (self._usage is not None and usage.began_s < self._usage.began_s):
                return
            self._usage = usage
            self._valid_until = time.monotonic() + valid_for_s
            while self._stamped and self._stamped[0][0] + SKEW_S < usage.began_s:
                self._stamped.popleft()

    def _uncounted(self) -> int:
        """Bytes of this mover's uploads that the record may not have counted."""
        return self._in_flight + self._unstamped + self._stamping + sum(nbytes for _, nbytes in self._stamped)


class Janitor:
    """Keeps one mover's UploadQuota up to date, and enforces the budget for all movers while it holds the lease."""

    def __init__(
        self,
        client: Callable[[], Any],
        bucket: str,
        prefix: str,
        *,
        quota: UploadQuota,
        is_row: Callable[[str], bool],
        intervals: JanitorIntervals,
        denials: Denials,
        max_age_s: float | None = None,
    ) -> None:
        """`client`: returns the present boto3 client. `is_row`: whether a name, below the prefix, is that of a row.
        `denials`: where it reports what the server does not support. `max_age_s`: rows that were last written longer
        ago are deleted even if there is room."""
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._quota = quota
        self._is_row = is_row
        self._intervals = intervals
        self._denials = denials
        self._max_age_s = float("inf") if max_age_s is None else max_age_s
        self._id = uuid.uuid4().hex
        self._lease: str | None = None  # the ETag that it was last renewed with
        self._usage_etag: str | None = None  # the usage record's ETag
        self._usage: Usage | None = None  # the record of this mover's last sweep
        self._renewals = 0
        self._server_s = 0.0
        self._sweep_at = 0.0
        self._renew_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nixl_tiers-janitor", daemon=True)

    @property
    def holds_lease(self) -> bool:
        """Whether this mover holds the lease, as far as it knows."""
        return self._lease is not None

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop within `timeout_s`, and release the lease, so that the others need not wait until it expires."""
        self._stop.set()
        self._thread.join(timeout_s)

    # The thread

    def _run(self) -> None:
        supported: bool | None = None
        while not self._stop.is_set():
            try:
                if supported is None:
                    supported = conditional_writes_work(self._put)
                if not supported:
                    self._denials.report(
                        "conditional writes",
                        "this server does not support conditional writes (If-None-Match, If-Match), "
                        f'so nothing is written below the shared prefix "{self._prefix}"',
                    )
                    return
                self._renew()
                if self._lease is not None and time.monotonic() >= self._sweep_at:
                    self._sweep()
                self._denials.succeeded("shared prefix")
            except (BotoCoreError, ClientError):
                self._lease = None  # a write may have arrived, with an unknown ETag: read the lease again
            except (KeyError, ValueError):
                self._lease = None
                self._denials.report(
                    "shared prefix",
                    "answers lack an ETag, a Date or a Last-Modified, "
                    f'so nothing is written below the shared prefix "{self._prefix}"',
                )
            self._stop.wait(self._intervals.renew_s)
        if self._lease is not None:
            with contextlib.suppress(BotoCoreError, ClientError):
                self._put(LEASE_NAME, b"", IfMatch=self._lease)

    def _renew(self) -> None:
        """Renew the lease or try to acquire it, renew the usage record, and read it."""
        self._renew_at = time.monotonic() + self._intervals.renew_s
        self._renewals += 1
        body = f"{self._id} {self._renewals}".encode()  # unique, so that no other mover's ETag equals ours
        if self._lease is not None:
            self._lease = self._put(LEASE_NAME, body, IfMatch=self._lease)
        else:
            self._try_acquire_lease(body)
        if self._lease is not None and self._usage is not None:
            self._write_usage()
        self._read_usage()

    def _try_acquire_lease(self, body: bytes) -> None:
        try:
            found = self._client().get_object(Bucket=self._bucket, Key=self._name(LEASE_NAME))
        except ClientError as error:
            if status_of(error) != 404:
                raise
            self._lease = self._put(LEASE_NAME, body, IfNoneMatch="*")
        else:
            age_s = _date(found) - found["LastModified"].timestamp()
            holder = found["Body"].read().partition(b" ")[0].decode("ascii", "replace")
            if age_s <= self._intervals.lease_timeout_s and holder not in {"", self._id}:
                return
            self._lease = self._put(LEASE_NAME, body, IfMatch=found["ETag"])
        self._usage = None
        # A listing that begins within SKEW_S of this mover's start would not count for it: it would wait for the next.
        self._sweep_at = time.monotonic() + 2 * SKEW_S

    def _read_usage(self) -> None:
        self._quota.begin_refresh()
        requested = time.monotonic()
        try:
            found = self._client().get_object(Bucket=self._bucket, Key=self._name(USAGE_NAME))
        except ClientError as error:
            if status_of(error) != 404:
                raise
            self._usage_etag = None
            answer = error.response["ResponseMetadata"]["HTTPHeaders"].get("date")
            if answer is not None:
                self._quota.refresh(parsedate_to_datetime(answer).timestamp(), None, 0.0)
            return
        self._usage_etag = found["ETag"]
        usage = Usage.decode(found["Body"].read())
        age_s = _date(found) - found["LastModified"].timestamp()
        valid_for_s = self._intervals.usage_timeout_s - age_s - (time.monotonic() - requested)
        self._quota.refresh(_date(found), usage, valid_for_s)

    # The lease holder's work

    def _sweep(self) -> None:
        """List everything, delete the oldest rows if space runs out, and write the usage record."""
        started = time.monotonic()
        began_s = self._server_s
        total = 0
        oldest: list[tuple[float, str, int]] = []  # a heap with the newest of them on top
        pages = self._client().get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + "/"):
            for each in page.get("Contents", ()):
                name, nbytes = each["Key"], each["Size"]
                if not self._is_row(name[len(self._prefix) + 1 :]):
                    continue
                total += nbytes
                item = (-each["LastModified"].timestamp(), name, nbytes)
                if len(oldest) < MAX_VICTIMS:
                    heapq.heappush(oldest, item)
                elif item > oldest[0]:
                    heapq.heapreplace(oldest, item)
            if not self._keep_lease():
                return
        window, capacity = self._quota.window_bytes, self._quota.capacity_bytes
        # Delete a window more than necessary, or each sweep would make room for one row only.
        excess = total - max(0, capacity - 2 * window) if total + window > capacity else 0
        total -= self._evict(sorted(oldest, reverse=True), excess, began_s - self._max_age_s)
        if self._lease is None:
            return
        self._usage = Usage(total, began_s)
        self._write_usage()
        self._read_usage()
        self._sweep_at = time.monotonic() + max(self._intervals.sweep_s, time.monotonic() - started)

    def _evict(self, oldest: Sequence[tuple[float, str, int]], excess: int, before_s: float) -> int:
        """Delete from the front of `oldest`: rows written before `before_s`, and more until `excess` bytes are deleted.

        Returns the bytes whose delete was confirmed.
        """
        deleted = selected = 0
        victims: dict[str, int] = {}
        for minus_when, name, nbytes in oldest:
            if selected >= excess and -minus_when >= before_s:
                break
            victims[name] = nbytes
            selected += nbytes
            if len(victims) == MAX_DELETES:
                deleted += self._delete(victims)
                victims = {}
                if not self._keep_lease():
                    return deleted
        return deleted + (self._delete(victims) if victims else 0)

    def _delete(self, victims: dict[str, int]) -> int:
        request = {"Objects": [{"Key": name} for name in victims], "Quiet": True}
        answer = self._client().delete_objects(Bucket=self._bucket, Delete=request)
        failed = {error.get("Key") for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"}
        return sum(nbytes for name, nbytes in victims.items() if name not in failed)

    def _keep_lease(self) -> bool:
        """Between two steps of a sweep: renew the lease and the record if due. False if the sweep must end."""
        if time.monotonic() >= self._renew_at:
            self._renew()
        return self._lease is not None and not self._stop.is_set()

    def _write_usage(self) -> None:
        """Replace the record that was last read; if there is another one by now, the next `_renew` reads it."""
        assert self._usage is not None
        condition = {"IfNoneMatch": "*"} if self._usage_etag is None else {"IfMatch": self._usage_etag}
        self._usage_etag = self._put(USAGE_NAME, self._usage.encode(), **condition) or self._usage_etag

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
    """The server's Unix time when it answered, in whole seconds."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
