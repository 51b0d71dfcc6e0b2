"""Control requests of the S3 tier: deletes of bad rows, and checks, with boto3 (connection.py) on a thread of its own.

No rows are transferred here. The mover's loop queues requests and collects results; only `connect` blocks, and not for
long. No message contains a server's text or a credential: error codes and class names only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from botocore.exceptions import BotoCoreError, ClientError

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS, no_answer, tier_error
from nixl_tiers.tiers.s3.client import Credentials
from nixl_tiers.tiers.s3.connection import REMEDY, VERSIONED, S3Connection
from nixl_tiers.tiers.s3.deletes import delete_objects, most_names
from nixl_tiers.tiers.s3.names import WRITE_TEST_NAME

logger = logging.getLogger(__name__)


class S3Control:
    """Control requests to one bucket. To be used by one thread; requests that block run on another, a daemon."""

    def __init__(self, tier: S3Config, times: Times = PRODUCTION) -> None:
        self._tier = tier
        self._times = times
        self.connection = S3Connection(tier, times)
        self.denials = self.connection.denials
        self._log_once = LogOnce(logger)
        self._wake = threading.Condition()
        self._connecting: Future[None] | None = None
        self._delete_queue: dict[str, None] = {}
        self._in_flight_deletes: frozenset[str] = frozenset()
        self._backoff_s = self._not_before = 0.0  # of deletes
        self._check_requested = False  # whether uploads fail for an unknown reason
        self._upload_check_at = float("-inf")
        self._credentials_check_at = float("inf")
        self._credentials_checked_at = 0.0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._versioning_unknown = tier.write != "off"  # asked for once, when nothing else is to be done

    # The mover's side

    def connect(self, timeout_s: float | None = None) -> Credentials:
        """Find credentials and check that the bucket exists; returns within `timeout_s` (`s3_open_s`).

        An attempt that takes longer goes on, and what it achieves is the next call's. Raises TierRefused if there is no
        such bucket or the configuration cannot work, else TierDown.
        """
        timeout_s = self._times.s3_open_s if timeout_s is None else timeout_s
        with self._wake:
            connecting = self._connecting
            if connecting is None or (connecting.done() and connecting.exception() is not None):
                connecting = self._connecting = Future()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nixl_tiers-s3-control", daemon=True)
                self._thread.start()
            self._wake.notify()
        try:
            connecting.result(timeout_s)
        except FutureTimeout:
            raise self.connection.down(no_answer(self._tier, f"within {timeout_s:g} s")) from None
        with self._wake:
            self._connecting = None
        if self.connection.credentials is None:
            raise self.connection.down("no credentials")
        return self.connection.credentials

    def transfer_failed(self) -> None:
        """A transfer has failed, perhaps because of its credentials: check soon whether there are new ones."""
        with self._wake:
            soon = self._credentials_checked_at + self._times.s3_credentials_again_s
            if soon < self._credentials_check_at < float("inf"):
                self._credentials_check_at = soon
                self._wake.notify()

    def upload_failed(self) -> None:
        """An upload has failed: find out soon whether the server denies uploads."""
        self.denials.failed("put")
        with self._wake:
            self._check_requested = True
            self._wake.notify()

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects in the background, with retries until the server confirms it."""
        with self._wake:
            self._delete_queue.update(dict.fromkeys(names))
            self._wake.notify()

    def cancel_delete(self, name: str) -> bool:
        """Cancel a delete. False if it is in flight: wait for its end, or fail if `deletes_backing_off`."""
        with self._wake:
            self._delete_queue.pop(name, None)
            return name not in self._in_flight_deletes

    @property
    def deletes_backing_off(self) -> bool:
        """Whether the last delete request has failed, and the retry waits for its backoff."""
        return self._backoff_s > 0 and time.monotonic() < self._not_before

    def close(self) -> None:
        """Send the queued deletes, as far as that takes no longer than `s3_close_s`, and stop."""
        if self._thread is None:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(self._times.s3_close_s)
        with self._wake:
            self._delete_queue.clear()

    # The control thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while (task := self._next(time.monotonic())) is None:
                    if self._closing:
                        return
                    self._wake.wait(self._idle_s(time.monotonic()))
            task()

    def _next(self, now: float) -> Callable[[], None] | None:
        if self._connecting is not None and not self._connecting.done():
            return self._connect
        if self._check_due and self.connection.client is not None and now >= self._upload_check_at:
            return self._check_uploads
        if now >= self._credentials_check_at:
            return self._check_credentials
        if self._delete_queue and self.connection.client is not None and now >= self._not_before:
            return self._delete_some
        if self._versioning_unknown and self.connection.client is not None and not self._closing:
            return self._check_versioning
        return None

    def _idle_s(self, now: float) -> float | None:
        times = [self._credentials_check_at]
        if self._check_due:
            times.append(self._upload_check_at)
        if self._delete_queue:
            times.append(self._not_before)
        soonest = min(times)
        return None if soonest == float("inf") else max(0.0, soonest - now)

    @property
    def _check_due(self) -> bool:
        # Also while uploads are denied: if nothing is stored meanwhile, nothing else finds out that they are allowed.
        return not self._closing and (self._check_requested or "put" in self.denials.current())

    def _check_uploads(self) -> None:
        """Upload a small test object, whose answer holds the reason why uploads fail: NIXL does not report it."""
        self._check_requested = False
        self._upload_check_at = time.monotonic() + self._times.s3_test_upload_s
        with contextlib.suppress(*REQUEST_ERRORS):
            name = f"{self._tier.prefix}/{WRITE_TEST_NAME}"
            self.connection.client.put_object(Bucket=self._tier.bucket, Key=name, Body=b"are uploads allowed?")

    def _connect(self) -> None:
        assert self._connecting is not None
        try:
            self.connection.open()
            self._not_before = 0.0
            self._schedule_credentials_check()
        except Exception as error:  # noqa: BLE001 (whatever it is, `connect` raises it)
            self._connecting.set_exception(tier_error(self._tier, self.connection.region.name, error))
        else:
            self._connecting.set_result(None)

    def _delete_some(self) -> None:
        with self._wake:
            names = list(itertools.islice(self._delete_queue, most_names()))
            for name in names:
                del self._delete_queue[name]
            self._in_flight_deletes = frozenset(names)
        failed: Sequence[str]
        try:
            objects = [{"Key": name} for name in names]
            answer = delete_objects(self.connection.delete_client, self._tier.bucket, objects)
            errors = {error.get("Key") for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"}
            # An error of an unknown object may be that of any of these, and that object is not ours to delete.
            failed = [name for name in names if name in errors] if errors.issubset(names) else names
        except Exception as error:  # noqa: BLE001 (this thread must not end)
            self._request_failed("delete request", error)
            failed = names
        with self._wake:
            self._in_flight_deletes = frozenset()
            if not self._closing:
                self._delete_queue.update(dict.fromkeys(failed))
            first_s, last_s = self._times.s3_backoff_s
            self._backoff_s = min(max(self._backoff_s * 2, first_s), last_s) if failed else 0.0
            self._not_before = time.monotonic() + self._backoff_s

    def _check_versioning(self) -> None:
        """Warn if the bucket keeps what is deleted. After all else, since a first hit must not wait for it."""
        self._versioning_unknown = False
        try:
            if self.connection.is_versioned():
                self._log_once.report("versioning", f's3 bucket "{self._tier.bucket}": {VERSIONED}; {REMEDY}')
        except REQUEST_ERRORS:
            pass  # it may not ask, or the server knows no versions
        except Exception as error:  # noqa: BLE001 (this thread must not end)
            self._request_failed("the look at its versioning", error)

    def _request_failed(self, what: str, error: Exception) -> None:
        """Log errors that are not the server's or the network's: `denials` and circuit breakers know of these."""
        if not isinstance(error, (BotoCoreError, ClientError, TierDown, TierRefused, OSError)):
            where = f's3 bucket "{self._tier.bucket}"'
            self._log_once.report(what, f"{what} for {where} has failed, and is retried ({type(error).__name__})")

    def _check_credentials(self) -> None:
        self._schedule_credentials_check()
        try:
            self.connection.renew()
        except Exception as error:  # noqa: BLE001 (this thread must not end)
            self._request_failed("renewal of the credentials", error)

    def _schedule_credentials_check(self) -> None:
        with self._wake:
            self._credentials_checked_at = time.monotonic()
            self._credentials_check_at = self._credentials_checked_at + self._times.s3_credentials_s
