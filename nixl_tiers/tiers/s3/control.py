"""Control requests of the S3 tier: deletes of bad rows, and credentials, with boto3 (connection.py) on its own thread.

No rows are transferred here. The mover's loop queues requests and collects results; only `connect` blocks, and not for
long. No message contains a server's text or a credential: error codes and class names only.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Final

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS, down, no_answer, tier_error
from nixl_tiers.tiers.s3.connection import REMEDY, VERSIONED, S3Connection, is_versioned
from nixl_tiers.tiers.s3.deletes import delete_names, most_names

logger = logging.getLogger(__name__)

IDLE_S: Final = 3600.0


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
        self._credentials_checked_at = 0.0
        self._credentials_every_s = times.s3_credentials_s
        self._closing = False
        self._thread: threading.Thread | None = None
        self._versioning_unknown = tier.write != "off"  # asked for once

    # The mover's side

    def connect(self, timeout_s: float | None = None) -> None:
        """Find credentials and check that the bucket exists; returns within `timeout_s` (`s3_open_s`).

        An attempt that takes longer goes on, and what it achieves is the next call's. Raises TierRefused if there is no
        such bucket or the configuration cannot work, else TierDown.
        """
        timeout_s = timeout_s or self._times.s3_open_s
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
            what = no_answer(self._tier, f"within {timeout_s:g} s")
            raise down(self._tier, self.connection.region.name, what) from None
        with self._wake:
            self._connecting = None

    def transfer_failed(self) -> None:
        """A transfer has failed, perhaps because of its credentials: check soon whether there are new ones."""
        with self._wake:
            self._credentials_every_s = self._times.s3_credentials_again_s
            self._wake.notify()

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects in the background: once, as others may have stored a row anew by then."""
        with self._wake:
            self._delete_queue.update(dict.fromkeys(names))
            self._wake.notify()

    def cancel_delete(self, name: str) -> bool:
        """Cancel a delete. False if it is in flight: wait for its end."""
        with self._wake:
            self._delete_queue.pop(name, None)
            return name not in self._in_flight_deletes

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
                    soonest = min((at for at, _ in self._tasks()), default=IDLE_S + time.monotonic())
                    self._wake.wait(max(0.0, soonest - time.monotonic()))
            self._do(task)

    def _next(self, now: float) -> Callable[[], None] | None:
        return next((task for at, task in self._tasks() if at <= now), None)

    def _tasks(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """What is to be done, and when: the most urgent first."""
        if self._connecting is not None and not self._connecting.done():
            yield 0.0, self._connect
        if self.connection.client is None:
            return
        yield self._credentials_checked_at + self._credentials_every_s, self._check_credentials
        if self._delete_queue:
            yield 0.0, self._delete_some
        # After all else, since a first hit must not wait for it.
        if self._versioning_unknown and not self._closing:
            yield 0.0, self._check_versioning

    def _do(self, task: Callable[[], None]) -> None:
        """Log errors that are not the server's or the network's: `denials` and circuit breakers know of these."""
        try:
            task()
        except (*REQUEST_ERRORS, TierDown, TierRefused, OSError):
            pass
        except Exception as error:  # noqa: BLE001 (this thread must not end)
            what, kind = f'a request to s3 bucket "{self._tier.bucket}" has failed', type(error).__name__
            self._log_once.report(kind, f"{what} with an unexpected error ({kind})")

    def _connect(self) -> None:
        assert self._connecting is not None
        try:
            self.connection.open()
            self._credentials_checked_at = time.monotonic()
        except Exception as error:  # noqa: BLE001 (whatever it is, `connect` raises it)
            self._connecting.set_exception(tier_error(self._tier, self.connection.region.name, error))
        else:
            self._connecting.set_result(None)

    def _check_credentials(self) -> None:
        self._credentials_checked_at, self._credentials_every_s = time.monotonic(), self._times.s3_credentials_s
        self.connection.renew()

    def _delete_some(self) -> None:
        with self._wake:
            names = list(itertools.islice(self._delete_queue, most_names()))
            for name in names:
                del self._delete_queue[name]
            self._in_flight_deletes = frozenset(names)
        try:
            delete_names(self.connection.delete_client, self._tier.bucket, names)
        finally:
            with self._wake:
                self._in_flight_deletes = frozenset()

    def _check_versioning(self) -> None:
        """Warn if the bucket keeps what is deleted. It may not be allowed to ask, or the server knows no versions."""
        self._versioning_unknown = False
        if is_versioned(self.connection.quick_client, self._tier.bucket):
            self._log_once.report("versioning", f's3 bucket "{self._tier.bucket}": {VERSIONED}; {REMEDY}')
