"""The budget of a prefix: a thread that does what takeover.py and sweep.py ask, and so keeps a mover's UploadQuota up
to date, and enforces the capacity for all movers while this one writes the usage record.

The ages of rows and counters are by the server's clocks (Date and Last-Modified); whether somebody still writes the
record is seen by its changes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS, SKEW_S, age_s, answered_at_s
from nixl_tiers.tiers.s3.compat import OldEngines, old_engine_now
from nixl_tiers.tiers.s3.conditional import conditional_writes_work, get_object, put_if
from nixl_tiers.tiers.s3.connection import S3Connection
from nixl_tiers.tiers.s3.deletes import delete_names
from nixl_tiers.tiers.s3.names import CONDITIONS_NAME, RowNames, below
from nixl_tiers.tiers.s3.record import Counter, Record, UploadQuota
from nixl_tiers.tiers.s3.sweep import BEGIN, DELETE, PAGE, Listed, Sweeper, whole_listing
from nixl_tiers.tiers.s3.takeover import Steps, Takeover, Terms

logger = logging.getLogger(__name__)

USAGE_NAME: Final = ".usage"
COUNTER_NAME: Final = ".landed-"  # and the mover's ID
FAILED: Final = "failed"  # in the user metadata of a counter
KIND: Final = "prefix"
CONDITIONS: Final = "conditional writes"
TERMS: Final = Terms()
COUNTER_TIMEOUT_S: Final = 3 * TERMS.counter_s  # a counter that was not written again for so long is deleted
UNCHANGED_S: Final = 60.0  # without a record that allows uploads, before that is told
LEAST_TURN_S: Final = 1.0  # between two turns, however fast a window is used
DOUBT_S: Final = 60.0  # so long a server must say that it has no conditional writes
MAX_EMPTY_PAGES: Final = 1000  # of a listing, in a row
LEAST_AHEAD_S: Final = 5.0  # both times are in whole seconds, and answers take time


def budget_clock() -> float:
    """Seconds that this machine has run, the time that it slept included: other engines' clocks went on meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Budget:
    """Of one mover."""

    def __init__(
        self,
        connection: S3Connection,
        bucket: str,
        prefix: str,
        *,
        quota: UploadQuota,
        max_age_s: float | None = None,
        reads_only: bool = False,
        terms: Terms | None = None,
    ) -> None:
        """`reads_only`: it only reads the usage record."""
        terms = terms or TERMS
        self._connection = connection
        self._denials = connection.denials
        self._bucket = bucket
        self._prefix = prefix
        self._names = RowNames(prefix)
        self._quota = quota
        self._log_once = LogOnce(logger)
        self._reads_only = reads_only
        self.takeover = Takeover(quota, terms, reads_only=reads_only)
        self._sweeper = Sweeper(self.takeover, self._names, lambda: self._server_s, max_age_s)
        self.old = OldEngines(self._get, self._put, quota.mover)
        self._conditions: bool | None = None  # whether the server has conditional writes; None: not known yet
        self._refused_s: float | None = None  # since when it says that it has none
        self._server_s = 0.0
        self._fine_s = budget_clock()  # when uploads were last possible, but for room
        self._counters: dict[str, tuple[str, Counter]] = {}  # of each mover: the ETag and the value
        self._version: object = None  # of the record as last read
        self._looked_s = float("-inf")  # when that was
        self._pages: Iterator[dict[str, Any]] = iter(())
        self._wake, self._stop = threading.Event(), threading.Event()
        self._claim, self._keep, self._wait = self.old.claim, self.old.keep, self._stop.wait  # see `_drive`
        quota.half_used = self._half_used
        self._thread = threading.Thread(target=self._run, name="nixl_tiers-budget", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Stop, and release the record, so that the others need not wait."""
        self._stop.set()
        self._wake.set()
        self._thread.join(within_s)

    def _half_used(self) -> None:
        """On the mover's loop: have a turn soon, also between the pages of a listing."""
        self.takeover.next_s = min(self.takeover.next_s, budget_clock() + LEAST_TURN_S)
        self._wake.set()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        least_s = min(LEAST_TURN_S, self.takeover.terms.renew_s)
        while not self._stop.wait(least_s):
            self._wake.clear()
            self.step()
            self._wake.wait(max(0.0, self.takeover.next_s - least_s - budget_clock()))
        self.end()

    def end(self) -> None:
        try:
            self._drive(self.takeover.release(budget_clock()))
        except Exception as error:  # noqa: BLE001 (then the record becomes stale)
            logger.debug("the usage record was not released (%s)", type(error).__name__)

    def step(self) -> None:
        """One turn. A request that fails ends it; the next one goes on from there."""
        try:
            self._drive(self._turn(budget_clock()))
        except REQUEST_ERRORS:
            pass
        except (KeyError, ValueError):
            self._denials.report(
                KIND,
                "answers lack an ETag, a Date or a Last-Modified, "
                f'so nothing is written below the prefix "{self._prefix}"',
            )
            return
        except Exception as error:  # noqa: BLE001 (this thread must not end)
            self.takeover.account = None
            self._log_once.report(
                "budget",
                f'the budget of the prefix "{self._prefix}" has stopped after an unexpected error '
                f"({type(error).__name__}), and starts again",
            )
        self._report()

    def _turn(self, now: float) -> Steps[None]:
        if self._conditions is None and not self._reads_only:
            self.takeover.next_s = now + self.takeover.terms.renew_s
            now = yield from self.takeover.read()  # who may not write hears nevertheless what was deleted
            self._ask_for_conditions(now)
            if self._conditions is None:
                return
        if self._quota.alone and not self.takeover.may_delete(now):
            self._quota.stop()  # another mover may have written since
        self.old.live = ""
        self._quota.failing |= "put" in self._denials.current()
        now = yield from self.takeover.turn(now)
        yield from self._sweeper.work(now)

    def _drive(self, steps: Steps[Any]) -> None:
        """Ask the server what these steps ask, each by the method of that name; no more pages and deletes once this
        ends."""
        try:
            asked = next(steps)
            while not (self._stop.is_set() and asked.what in (BEGIN, PAGE, DELETE)):
                try:
                    answer = getattr(self, f"_{asked.what}")(asked.given)
                except Exception as error:  # noqa: BLE001 (the steps say what it means)
                    asked = steps.throw(error)
                else:
                    asked = steps.send((budget_clock(), answer))
        except StopIteration:
            return
        steps.close()

    def _report(self) -> None:
        """Say so if nothing may be uploaded for long."""
        if self._reads_only:
            return
        now = budget_clock()
        if self.takeover.account is None and now - self.takeover.changed_s < self.takeover.terms.stale_s:
            self._denials.lists_nothing()
        if self.old.live:
            self._denials.report(
                KIND,
                f'engine {self.old.live} of an older release uses the prefix "{self._prefix}", so this one stores '
                "there only what that one's usage record allows, until it has ended, or has crashed for a minute",
            )
        elif (self._quota.ready or self._quota.alone) and now - self.takeover.changed_s <= UNCHANGED_S:
            self._fine_s = now  # or another one stores alone, which is told
            self._denials.succeeded(KIND)
        elif now - self._fine_s > UNCHANGED_S:
            self._denials.report(
                KIND,
                f'the usage record of the prefix "{self._prefix}" was not renewed for {UNCHANGED_S:g} s, or no sweep '
                "has ended since it was begun, so nothing is written there",
                unreachable=True,
            )

    def _ask_for_conditions(self, now: float) -> None:
        """Find out whether the server has conditional writes. That it has none is believed only if it still says so
        after `DOUBT_S`: one answer may be a gateway's, or somebody may have deleted the object meanwhile."""
        name = f"{CONDITIONS_NAME}-{self._quota.mover}"
        if conditional_writes_work(self._put_if, name):  # KeyError: no ETag, so not S3's answer
            self._conditions = True
            self._denials.succeeded(CONDITIONS)
        else:
            self._refused_s = self._refused_s or now
            if now - self._refused_s >= DOUBT_S:
                self._conditions, self._quota.alone = False, True
            self._denials.report(
                CONDITIONS,
                "this server does not support conditional writes (If-None-Match, If-Match), so only one engine "
                f'at a time stores below the prefix "{self._prefix}", and two may for a moment when they begin at once',
            )
        with contextlib.suppress(*REQUEST_ERRORS):
            self._client.delete_object(Bucket=self._bucket, Key=self._names.root + name)

    # --- what is asked ----------------------------------------------------------------------------------------------

    def _read(self, _: None) -> tuple[str | None, Record | None]:
        before_s, self._looked_s = self._looked_s, budget_clock()
        found = self._get(USAGE_NAME)
        if found is None:
            return None, None
        record = Record.decode(found["Body"].read())
        self._server_s = _date(found)
        version = found["ETag"], found["LastModified"]
        if version != self._version:  # it was written since it was last read
            self._version = version
            ahead_s = self._server_s - found["LastModified"].timestamp() - (self._looked_s - before_s)
            self._quota.ahead_s = ahead_s if ahead_s > LEAST_AHEAD_S else 0.0
        return found["ETag"], record

    def _write(self, given: tuple[Record, str | None]) -> str | None:
        record, etag = given
        if self._conditions:
            return self._put(USAGE_NAME, record.encode(), etag)
        if self._read(None)[0] != etag:
            return None
        self._put(USAGE_NAME, record.encode(), etag)
        self._stop.wait(self.takeover.terms.settle_s)
        etag, there = self._read(None)
        return etag if there == record else None

    def _publish(self, counter: Counter) -> None:
        name = self._names.root + COUNTER_NAME + self._quota.mover
        given = {"Metadata": {FAILED: str(counter.failed)}} if counter.failed else {}
        self._client.put_object(Bucket=self._bucket, Key=name, Body=str(counter.ended).encode(), **given)

    def _read_counters(self, _: None) -> dict[str, Counter]:
        """The counters of all movers; those of movers that are long gone are deleted."""
        counters: dict[str, tuple[str, Counter]] = {}
        names = self._names.root + COUNTER_NAME
        for page in self._listing(names):
            for each in page["Contents"]:
                mover = each["Key"].removeprefix(names)
                if _date(page) - each["LastModified"].timestamp() > COUNTER_TIMEOUT_S:
                    with contextlib.suppress(*REQUEST_ERRORS):
                        self._client.delete_object(Bucket=self._bucket, Key=each["Key"])
                    continue
                known = self._counters.get(mover)
                if known is None or known[0] != each["ETag"]:
                    known = self._counter(mover, each["Key"])
                if known is not None:
                    counters[mover] = known
        self._counters = counters
        return {mover: counter for mover, (_, counter) in counters.items()}

    def _counter(self, mover: str, name: str) -> tuple[str, Counter] | None:
        """With its ETag; if it is no number, what the usage record has counted of it.

        A counter never falls, so that is at most the true value, and its mover may upload no more than with that one. A
        mover that is not in the record either (None) uploads nothing before a sweep that can read its counter."""
        found = get_object(self._client, self._bucket, name)
        if found is None:
            return None
        try:
            failed = int(found.get("Metadata", {}).get(FAILED, 0))
            return found["ETag"], Counter(int(found["Body"].read()), failed)
        except ValueError:
            self._log_once.report(
                f"counter of {mover}",
                f"{name!r} in the bucket is no number; it is deleted when it is "
                f"{COUNTER_TIMEOUT_S / 3600:.0f} hours old, unless its mover writes it again",
            )
        record = self.takeover.record
        counted = None if record is None else record.counted.get(mover)
        return None if counted is None else ("", Counter(counted))

    def _begin(self, last: str) -> None:
        self._pages = self._listing(self._names.root, last)

    def _page(self, _: None) -> list[Listed] | None:
        page = next(self._pages, None)
        if page is None:
            return None
        return [Listed(each["Key"], each["LastModified"].timestamp(), each["Size"]) for each in page["Contents"]]

    def _listing(self, prefix: str, after: str = "") -> Iterator[dict[str, Any]]:
        """Its pages. If they keep failing, or are empty without an end, that is told."""
        empty = 0
        try:
            for page in whole_listing(self._client, self._bucket, prefix, after):
                self._denials.page_listed(prefix)
                empty = 0 if page["Contents"] else empty + 1
                if empty > MAX_EMPTY_PAGES:  # a failure would begin again in front of them
                    self._report()
                    self._stop.wait(self.takeover.terms.renew_s)
                yield page
        except REQUEST_ERRORS as error:
            self._denials.page_failed(prefix, error)
            raise

    def _delete(self, names: list[str]) -> set[str]:
        return delete_names(self._connection.delete_client, self._bucket, names)

    def _get(self, name: str) -> dict[str, Any] | None:
        return get_object(self._client, self._bucket, self._names.root + name)

    def _put(self, name: str, body: bytes, etag: str | None) -> str | None:
        """Where the server has no conditional writes, whatever is there."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        return self._put_if(name, body, **(condition if self._conditions else {}))

    def _put_if(self, name: str, body: bytes, **condition: str) -> str | None:
        """Its ETag; None: the condition does not hold."""
        answer = put_if(self._client, self._bucket, self._names.root + name, body, condition)
        if answer is None:
            return None
        self._server_s = _date(answer)
        return str(answer["ETag"])

    @property
    def _client(self) -> Any:
        return self._connection.client


def engine_now(client: Any, bucket: str, prefix: str) -> str:
    """Who uses the prefix, for who asks once: until that has surely ended. "": nobody. Raises what boto3 raises."""
    old = old_engine_now(client, bucket, prefix)
    if old:
        return f"engine {old}"
    found = get_object(client, bucket, below(prefix, USAGE_NAME))
    record = None if found is None else Record.decode(found["Body"].read())
    lives = found and record and record.writer and age_s(found) <= TERMS.stale_s + SKEW_S
    return "at least one engine" if lives else ""


def _date(answer: dict[str, Any]) -> float:
    """The server's Unix time when it answered, in whole seconds. Raises KeyError if it has no Date."""
    date_s = answered_at_s(answer)
    if date_s is None:
        raise KeyError("date")
    return date_s
