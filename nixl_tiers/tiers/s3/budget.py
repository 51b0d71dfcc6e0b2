"""The budget of a prefix: a thread that does what takeover.py and sweep.py ask, and so keeps a mover's UploadQuota up
to date, and enforces the capacity for all movers while this one writes the usage record.

The ages of rows and counters are by the server's clocks (Date and Last-Modified); whether somebody still writes the
record is seen by its changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from botocore.parsers import ResponseParserError

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS, SKEW_S, age_s, answered_at_s
from nixl_tiers.tiers.s3.compat import OldEngines
from nixl_tiers.tiers.s3.conditional import (
    CONDITIONS,
    ConditionalWrites,
    conditional_writes_work,
    delete_object,
    get_object,
    put_if,
    write_test_name,
)
from nixl_tiers.tiers.s3.deletes import delete_objects
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.names import RowNames, below
from nixl_tiers.tiers.s3.record import Counter, Record, UploadQuota
from nixl_tiers.tiers.s3.sweep import EmptyPages, Listed, Sweeper, limited, whole_listing
from nixl_tiers.tiers.s3.takeover import Steps, Takeover, Terms

logger = logging.getLogger(__name__)

USAGE_NAME: Final = ".usage"
COUNTER_NAME: Final = ".landed-"  # and the mover's ID
FAILED: Final = "failed"  # in the user metadata of a counter
KIND: Final = "prefix"
TERMS: Final = Terms()
COUNTER_TIMEOUT_S: Final = 3 * TERMS.counter_s  # a counter that was not written again for so long is deleted
UNCHANGED_S: Final = 60.0  # without a record that allows uploads, before that is told
LEAST_TURN_S: Final = 1.0  # between two turns, however fast a window is used
LEAST_AHEAD_S: Final = 5.0  # both times are in whole seconds, and answers take time


def budget_clock() -> float:
    """Seconds that this machine has run, the time that it slept included: other engines' clocks went on meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Budget:
    """Of one mover."""

    def __init__(
        self,
        client: Callable[[], Any],
        delete_client: Callable[[], Any],
        bucket: str,
        prefix: str,
        *,
        quota: UploadQuota,
        denials: Denials,
        max_age_s: float | None = None,
        reads_only: bool = False,
        close_s: float = PRODUCTION.s3_close_s,
        terms: Terms | None = None,
    ) -> None:
        """`client`: returns the present boto3 client; `delete_client`: one whose requests are sent once. `denials`:
        where it reports what the server does not support. `reads_only`: it only reads the usage record."""
        terms = terms or TERMS
        self._client = client
        self._delete_client = delete_client
        self._bucket = bucket
        self._prefix = prefix
        self._names = RowNames(prefix)
        self._quota = quota
        self._denials = denials
        self._log_once = LogOnce(logger)
        self._reads_only = reads_only
        self._close_s = close_s
        self.takeover = Takeover(quota, terms, reads_only=reads_only)
        self._sweeper = Sweeper(self.takeover, self._names, lambda: self._server_s, max_age_s)
        self._conditions = ConditionalWrites()
        self.old = OldEngines(client, bucket, prefix, quota.mover)
        self._server_s = 0.0
        self._fine_s = budget_clock()  # when uploads were last possible, but for room
        self._counters: dict[str, tuple[str, Counter]] = {}  # of each mover: the ETag and the value
        self._counted: dict[str, int] = {}  # by the record that was read or written last
        self._version: object = None  # of the record as last read, another one after each write
        self._looked_s = self._published_s = float("-inf")
        self._pages: Iterator[dict[str, Any]] = iter(())
        self._empty = EmptyPages()
        self._wake, self._stop = threading.Event(), threading.Event()
        quota.half_used = self._wake.set
        self._thread = threading.Thread(target=self._run, name="nixl_tiers-budget", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop within `close_s`, and release the record, so that the others need not wait."""
        self._stop.set()
        self._wake.set()
        self._thread.join(self._close_s)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(min(LEAST_TURN_S, self.takeover.terms.renew_s)):
            self._wake.clear()
            self.step()
            self._wake.wait(max(0.0, self.takeover.next_s - budget_clock()))
        self.end()

    def end(self) -> None:
        try:
            self._drive(self.takeover.release(budget_clock()))
        except Exception as error:  # noqa: BLE001 (then the record becomes stale)
            logger.debug("the usage record was not released (%s)", type(error).__name__)

    def step(self) -> None:
        """One turn. A request that fails ends it; the next one goes on from there."""
        try:
            if not self._reads_only:
                self._ask_for_conditions()
            self._drive(self._turn(budget_clock()))
        except REQUEST_ERRORS:
            self.takeover.failed(budget_clock())
        except (KeyError, ValueError):
            self.takeover.failed(budget_clock())
            self._denials.report(
                KIND,
                "answers lack an ETag, a Date or a Last-Modified, "
                f'so nothing is written below the prefix "{self._prefix}"',
            )
            return
        except Exception as error:  # noqa: BLE001 (this thread must not end)
            self.takeover.forget()
            self._log_once.report(
                "budget",
                f'the budget of the prefix "{self._prefix}" has stopped after an unexpected error '
                f"({type(error).__name__}), and starts again",
            )
        self._report()

    def _turn(self, now: float) -> Steps[None]:
        now = yield from self.takeover.turn(now)
        yield from self._sweeper.work(now)

    def _drive(self, steps: Steps[Any]) -> None:
        """Ask the server what these steps ask."""
        try:
            asked = next(steps)
            while True:
                try:
                    answer = getattr(self, f"_{asked.what}")(asked.given)
                except Exception as error:  # noqa: BLE001 (the steps say what it means)
                    asked = steps.throw(error)
                else:
                    asked = steps.send((budget_clock(), answer))
        except StopIteration:
            pass

    def _report(self) -> None:
        """Say so if nothing may be uploaded for long."""
        if self._reads_only:
            return
        if self.takeover.account is None:
            self._denials.lists_nothing()
        if self.takeover.others_live and self.old.live:
            self._denials.report(
                KIND,
                f'engine {self.old.live} of an older release uses the prefix "{self._prefix}", so this one only reads '
                "there until it has ended, or has crashed for a minute",
            )
            return
        now = budget_clock()
        if self._quota.ready and now - self.takeover.changed_s <= UNCHANGED_S:
            self._fine_s = now
            self._denials.succeeded(KIND)
        elif now - self._fine_s > UNCHANGED_S:
            self._denials.report(
                KIND,
                f'the usage record of the prefix "{self._prefix}" was not renewed for {UNCHANGED_S:g} s, or no sweep '
                "has ended since it was begun, so nothing is written there",
                unreachable=True,
            )

    def _ask_for_conditions(self) -> None:
        """Find out whether the server has conditional writes, until that is known."""
        now = budget_clock()
        if now < self._conditions.next_at_s:
            return
        name = self._name(write_test_name(self._quota.mover))
        self._conditions.asking(now)
        work = conditional_writes_work(self._put_if, name)  # KeyError: no ETag, so not S3's answer
        self._conditions.answered(work, budget_clock())
        self.takeover.conditions = self._conditions.work
        delete_object(self._client(), self._bucket, name)
        if self._conditions.refused:
            self._denials.report(
                CONDITIONS,
                "this server does not support conditional writes (If-None-Match, If-Match), so only one engine "
                f'at a time stores below the prefix "{self._prefix}", and two may for a moment when they begin at once',
            )
        else:
            self._denials.succeeded(CONDITIONS)

    # --- what is asked ----------------------------------------------------------------------------------------------

    def _read(self, _: None) -> tuple[str | None, Record | None]:
        asked_s = budget_clock()
        found = get_object(self._client(), self._bucket, self._name(USAGE_NAME))
        before_s, self._looked_s = self._looked_s, asked_s
        if found is None:
            self._version, self._counted = None, {}
            return None, None
        record = Record.decode(found["Body"].read())
        self._counted = {} if record is None else dict(record.counted)
        self._server_s = _date(found)
        version = found["ETag"], found["LastModified"]
        if version != self._version:  # it was written since it was last seen without that
            self._version = version
            self._note_ahead(found, before_s, asked_s)
        return found["ETag"], record

    def _note_ahead(self, found: dict[str, Any], before_s: float, asked_s: float, page: Any = None) -> None:
        """How much the server's Date is ahead, at least, by an object that was written after `before_s`."""
        ahead_s = _date(page or found) - found["LastModified"].timestamp() - (asked_s - before_s)
        self._quota.ahead_s = ahead_s if ahead_s > LEAST_AHEAD_S else 0.0

    def _write(self, given: tuple[Record, str | None]) -> str | None:
        record, etag = given
        condition = {} if etag == "" else {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        written = self._put_if(self._name(USAGE_NAME), record.encode(), **condition)
        if written is not None:
            self._counted = dict(record.counted)
        return written

    def _publish(self, counter: Counter) -> None:
        self._published_s = budget_clock()
        name = self._name(COUNTER_NAME + self._quota.mover)
        given = {"Metadata": {FAILED: str(counter.failed)}} if counter.failed else {}
        self._client().put_object(Bucket=self._bucket, Key=name, Body=str(counter.ended).encode(), **given)

    def _read_counters(self, _: None) -> dict[str, Counter]:
        """The counters of all movers; those of movers that are long gone are deleted."""
        counters: dict[str, tuple[str, Counter]] = {}
        names, asked_s = self._name(COUNTER_NAME), budget_clock()
        for page in self._told(names, limited(whole_listing(self._client(), self._bucket, names))):
            for each in page.get("Contents", ()):
                mover = each["Key"].removeprefix(names)
                if _date(page) - each["LastModified"].timestamp() > COUNTER_TIMEOUT_S:
                    self._client().delete_object(Bucket=self._bucket, Key=each["Key"])
                    continue
                if mover == self._quota.mover:
                    self._note_ahead(each, self._published_s, asked_s, page)
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
        found = get_object(self._client(), self._bucket, name)
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
        counted = self._counted.get(mover)
        return None if counted is None else ("", Counter(counted))

    def _begin(self, last: str) -> None:
        self._pages = whole_listing(self._client(), self._bucket, self._names.root, last)
        self._empty = EmptyPages()

    def _page(self, _: None) -> list[Listed] | None:
        for page in self._told(self._names.root, self._pages):
            if self._empty.too_many(page):  # a failure would begin again in front of them
                self._report()
                self._stop.wait(self.takeover.terms.renew_s)
            return [
                Listed(each["Key"], each["LastModified"].timestamp(), each["Size"]) for each in page.get("Contents", ())
            ]
        return None

    def _told(self, prefix: str, pages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The pages of a listing. If they keep failing, that is told."""
        try:
            for page in pages:
                self._denials.page_listed(prefix)
                yield page
        except REQUEST_ERRORS as error:
            self._denials.page_failed(prefix, error, "rows are not deleted, and so before long none is written")
            raise

    def _delete(self, names: list[str]) -> set[str]:
        answer = delete_objects(self._delete_client(), self._bucket, [{"Key": name} for name in names])
        failed = {error.get("Key") for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"}
        if not failed <= set(names):
            raise ResponseParserError("an error in the answer to a delete request names no object of the request")
        return set(names) - failed

    def _claim(self, _: None) -> bool:
        return self.old.claim(budget_clock(), self._server_s, conditions=bool(self.takeover.conditions))

    def _keep(self, _: None) -> bool:
        return self.old.keep(budget_clock(), self._server_s, conditions=bool(self.takeover.conditions))

    def _wait(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _put_if(self, name: str, body: bytes, **condition: str) -> str | None:
        """Its ETag; None: the condition does not hold."""
        answer = put_if(self._client(), self._bucket, name, body, condition)
        if answer is None:
            return None
        self._server_s = _date(answer)
        return str(answer["ETag"])

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def is_in_use(client: Any, bucket: str, prefix: str) -> bool:
    """Whether some engine writes the usage record, for who reads it once: until it has surely become stale. Raises what
    boto3 raises."""
    found = get_object(client, bucket, below(prefix, USAGE_NAME))
    record = None if found is None else Record.decode(found["Body"].read())
    return found is not None and record is not None and bool(record.writer) and age_s(found) <= TERMS.stale_s + SKEW_S


def _date(answer: dict[str, Any]) -> float:
    """The server's Unix time when it answered, in whole seconds. Raises KeyError if it has no Date."""
    date_s = answered_at_s(answer)
    if date_s is None:
        raise KeyError("date")
    return date_s
