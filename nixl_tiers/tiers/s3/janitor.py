"""The budget of a prefix that several engines share: one of them keeps it, all of them keep to its word.

Whoever holds the lease (`<prefix>/.janitor`) lists the prefix, deletes the oldest rows of any namespace when room is
short, and writes what it found to `<prefix>/.usage`. An engine uploads no more than one window of bytes which that
record cannot have counted yet. So the prefix never holds more than the capacity and one window an engine, also while
two engines take themselves for the janitor, or none does: the lease saves work, the bound does not hang on it.

Times are compared with times of the same server (its Date and Last-Modified); local clocks only measure intervals.
Everything that waits for the server runs on a thread of its own.
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

from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.listing import PROBE_NAME

LEASE_NAME: Final = ".janitor"
USAGE_NAME: Final = ".usage"
WINDOW_SHARE: Final = 64  # an upload window is the capacity divided by this, and at least a row
MAX_VICTIMS: Final = 1 << 16  # what one round may delete: the names must be kept meanwhile
DELETES_AT_ONCE: Final = 1000
SKEW_S: Final = 1.0  # by which the clocks of one service's front ends may differ, and what a Date header leaves out
CLOSE_S: Final = 2.0

_NOT_NOW: Final = {404, 409, 412}  # the condition does not hold (any more), or somebody else is at it
_UNSUPPORTED: Final = {"NotImplemented", "MethodNotAllowed", "InvalidArgument", "InvalidRequest"}


@dataclass(frozen=True)
class JanitorIntervals:
    """Intervals, in seconds."""

    turn_s: float = 5.0  # between looks at the lease and the usage record, and between the janitor's signs of life
    lease_s: float = 30.0  # a lease that was not renewed for so long is anybody's
    fresh_s: float = 60.0  # a usage record that was not renewed for so long allows no upload
    round_s: float = 30.0  # between two listings of the whole prefix; longer where a listing takes longer


@dataclass(frozen=True)
class Usage:
    """What a listing found below the prefix, less what was deleted since. It began at `began_s`, server's Unix time."""

    nbytes: int
    began_s: float

    def encode(self) -> bytes:
        return json.dumps({"bytes": self.nbytes, "began": self.began_s}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self | None:
        """None for what is no usage record."""
        try:
            found = json.loads(raw)
            return cls(int(found["bytes"]), float(found["began"]))
        except (ValueError, TypeError, KeyError):
            return None


class UploadQuota:
    """How much this engine may upload now. Asked by the mover's loop, told of the record by the janitor's thread."""

    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.window_bytes = max(row_bytes, capacity_bytes // WINDOW_SHARE)
        self._lock = threading.Lock()
        self._usage: Usage | None = None
        self._fresh_until = 0.0  # monotonic
        self._flying = 0
        # What the last life of this engine has left under way is in no listing yet: a whole window, to begin with.
        self._landed = self.window_bytes
        self._dating = 0
        self._dated: deque[tuple[float, int]] = deque()  # (when the server surely had them by its clock, bytes)

    def take(self, nbytes: int) -> bool:
        """Count an upload that is about to start; False if there is no room for it now."""
        with self._lock:
            usage = self._usage
            if usage is None or time.monotonic() > self._fresh_until:
                return False
            if usage.nbytes + self.window_bytes > self.capacity_bytes or self._open() + nbytes > self.window_bytes:
                return False
            self._flying += nbytes
            return True

    def ended(self, nbytes: int) -> None:
        """An upload is over, whatever its end."""
        with self._lock:
            self._flying -= nbytes
            self._landed += nbytes

    @property
    def used_bytes(self) -> int | None:
        """What the prefix holds, as far as the record says; None before there is one."""
        with self._lock:
            return None if self._usage is None else self._usage.nbytes

    def asking(self) -> None:
        """The server is about to be asked for its time: all that has landed has done so before that."""
        with self._lock:
            self._dating, self._landed = self._dating + self._landed, 0

    def answered(self, now_s: float, usage: Usage | None, fresh_for_s: float) -> None:
        """The server's time, and the record as it stands, to be believed for so long from when `asking` was called."""
        with self._lock:
            if self._dating:
                self._dated.append((now_s, self._dating))
                self._dating = 0
            # A record older than one seen before comes from a janitor that was replaced, and counts less than was true.
            if usage is None or (self._usage is not None and usage.began_s < self._usage.began_s):
                return
            self._usage = usage
            self._fresh_until = time.monotonic() + fresh_for_s
            while self._dated and self._dated[0][0] + SKEW_S < usage.began_s:
                self._dated.popleft()

    def _open(self) -> int:
        """Bytes of ours that the record may not have counted."""
        return self._flying + self._landed + self._dating + sum(nbytes for _, nbytes in self._dated)


class Janitor:
    """One engine's care for a prefix: tells its allowance, and keeps the budget for all while it has the lease."""

    def __init__(
        self,
        client: Callable[[], Any],
        bucket: str,
        prefix: str,
        *,
        allowance: UploadQuota,
        is_row: Callable[[str], bool],
        pace: JanitorIntervals,
        denials: Denials,
        max_age_s: float | None = None,
    ) -> None:
        """`client`: the present boto3 client. `is_row`: whether a name, below the prefix, is ours to count.
        `denials`: is told what the server does not do.
        `max_age_s`: what was last written longer ago is deleted, however much room there is."""
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._allowance = allowance
        self._is_row = is_row
        self._pace = pace
        self._denials = denials
        self._max_age_s = float("inf") if max_age_s is None else max_age_s
        self._id = uuid.uuid4().hex
        self._lease: str | None = None  # the ETag that it was last renewed with
        self._record: str | None = None  # the usage record's ETag
        self._usage: Usage | None = None  # what we, as the janitor, last found
        self._turns = 0
        self._now_s = 0.0
        self._round_at = 0.0
        self._turn_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nixl_tiers-janitor", daemon=True)

    @property
    def in_charge(self) -> bool:
        """Whether this engine holds the lease, as far as it knows."""
        return self._lease is not None

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop within `timeout_s`, and tell the others that the lease is free: else they wait until it expires."""
        self._stop.set()
        self._thread.join(timeout_s)

    # The thread

    def _run(self) -> None:
        supported: bool | None = None
        while not self._stop.is_set():
            try:
                if supported is None:
                    supported = self._probe()
                if not supported:
                    self._denials.say(
                        "conditional writes",
                        "this server does not support conditional writes (If-None-Match, If-Match), "
                        f'so nothing is written below the shared prefix "{self._prefix}"',
                    )
                    return
                self._turn()
                if self._lease is not None and time.monotonic() >= self._round_at:
                    self._round()
                self._denials.worked("shared prefix")
            except (BotoCoreError, ClientError):
                self._lease = None  # what was put may have arrived, under an unknown ETag: look for it
            except (KeyError, ValueError):
                self._lease = None
                self._denials.say(
                    "shared prefix",
                    "answers lack an ETag, a Date or a Last-Modified, "
                    f'so nothing is written below the shared prefix "{self._prefix}"',
                )
            self._stop.wait(self._pace.turn_s)
        if self._lease is not None:
            with contextlib.suppress(BotoCoreError, ClientError):
                self._put(LEASE_NAME, b"", IfMatch=self._lease)

    def _probe(self) -> bool:
        """Whether the server refuses a write whose condition does not hold, of either kind."""
        try:
            self._put(PROBE_NAME, b"conditional writes", IfNoneMatch="*")
            return (
                self._put(PROBE_NAME, b"conditional writes", IfNoneMatch="*") is None
                and self._put(PROBE_NAME, b"conditional writes", IfMatch='"00000000000000000000000000000000"') is None
            )
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in _UNSUPPORTED:
                raise
            return False

    def _turn(self) -> None:
        """Renew the lease or try to get it, renew the record, and hear what it says."""
        self._turn_at = time.monotonic() + self._pace.turn_s
        self._turns += 1
        mark = f"{self._id} {self._turns}".encode()  # another body each time, or another's ETag might equal ours
        if self._lease is not None:
            self._lease = self._put(LEASE_NAME, mark, IfMatch=self._lease)
        else:
            self._seek(mark)
        if self._lease is not None and self._usage is not None:
            self._publish()
        self._hear()

    def _seek(self, mark: bytes) -> None:
        try:
            found = self._client().get_object(Bucket=self._bucket, Key=self._name(LEASE_NAME))
        except ClientError as error:
            if _status(error) != 404:
                raise
            self._lease = self._put(LEASE_NAME, mark, IfNoneMatch="*")
        else:
            age_s = _date(found) - found["LastModified"].timestamp()
            holder = found["Body"].read().partition(b" ")[0].decode("ascii", "replace")
            if age_s <= self._pace.lease_s and holder not in {"", self._id}:
                return
            self._lease = self._put(LEASE_NAME, mark, IfMatch=found["ETag"])
        self._usage = None
        # A listing that begins within the clocks' doubt of our own start would not let us upload before the next one.
        self._round_at = time.monotonic() + 2 * SKEW_S

    def _hear(self) -> None:
        self._allowance.asking()
        asked = time.monotonic()
        try:
            found = self._client().get_object(Bucket=self._bucket, Key=self._name(USAGE_NAME))
        except ClientError as error:
            if _status(error) != 404:
                raise
            self._record = None
            answer = error.response["ResponseMetadata"]["HTTPHeaders"].get("date")
            if answer is not None:
                self._allowance.answered(parsedate_to_datetime(answer).timestamp(), None, 0.0)
            return
        self._record = found["ETag"]
        usage = Usage.decode(found["Body"].read())
        age_s = _date(found) - found["LastModified"].timestamp()
        fresh_for_s = self._pace.fresh_s - age_s - (time.monotonic() - asked)
        self._allowance.answered(_date(found), usage, fresh_for_s)

    # The janitor's work

    def _round(self) -> None:
        """List everything, delete the oldest rows if room is short, and write down what is left."""
        started = time.monotonic()
        began_s = self._now_s
        total = 0
        oldest: list[tuple[float, str, int]] = []  # a heap, the newest of them on top
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
            if not self._goes_on():
                return
        window, capacity = self._allowance.window_bytes, self._allowance.capacity_bytes
        # A window more than must go, or each round would make room for one row.
        excess = total - max(0, capacity - 2 * window) if total + window > capacity else 0
        total -= self._sweep(sorted(oldest, reverse=True), excess, began_s - self._max_age_s)
        if self._lease is None:
            return
        self._usage = Usage(total, began_s)
        self._publish()
        self._hear()
        self._round_at = time.monotonic() + max(self._pace.round_s, time.monotonic() - started)

    def _sweep(self, oldest: Sequence[tuple[float, str, int]], excess: int, before_s: float) -> int:
        """Delete from the front of `oldest` what was written before `before_s`, and on until `excess` bytes are gone.

        Returns the bytes that surely are.
        """
        gone = asked = 0
        victims: dict[str, int] = {}
        for minus_when, name, nbytes in oldest:
            if asked >= excess and -minus_when >= before_s:
                break
            victims[name] = nbytes
            asked += nbytes
            if len(victims) == DELETES_AT_ONCE:
                gone += self._delete(victims)
                victims = {}
                if not self._goes_on():
                    return gone
        return gone + (self._delete(victims) if victims else 0)

    def _delete(self, victims: dict[str, int]) -> int:
        request = {"Objects": [{"Key": name} for name in victims], "Quiet": True}
        answer = self._client().delete_objects(Bucket=self._bucket, Delete=request)
        stay = {error.get("Key") for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"}
        return sum(nbytes for name, nbytes in victims.items() if name not in stay)

    def _goes_on(self) -> bool:
        """Between two steps of a round: keep the lease and the record alive. False if the round is to end."""
        if time.monotonic() >= self._turn_at:
            self._turn()
        return self._lease is not None and not self._stop.is_set()

    def _publish(self) -> None:
        """Write the record over the one that was last seen; if another is there by now, the next turn knows it."""
        assert self._usage is not None
        condition = {"IfNoneMatch": "*"} if self._record is None else {"IfMatch": self._record}
        self._record = self._put(USAGE_NAME, self._usage.encode(), **condition) or self._record

    # Requests

    def _put(self, name: str, body: bytes, **condition: str) -> str | None:
        """Write a small object; its ETag, or None if the condition does not hold."""
        try:
            answer = self._client().put_object(Bucket=self._bucket, Key=self._name(name), Body=body, **condition)
        except ClientError as error:
            if _status(error) not in _NOT_NOW:
                raise
            return None
        self._now_s = _date(answer)
        return str(answer.get("ETag", ""))

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _date(answer: dict[str, Any]) -> float:
    """The server's Unix time when it answered, in whole seconds."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
