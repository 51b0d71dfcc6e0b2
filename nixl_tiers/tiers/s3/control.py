"""The control plane of an object tier: credentials, one probe, listings and deletes, with boto3 on a thread of its own.

Nothing here moves a row. The mover's loop leaves requests and collects results; only `connect` waits, and not for long.
No message of this module repeats what a server said or what a credential holds: error codes and class names only.
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
from email.utils import parsedate_to_datetime
from typing import Any, Final

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, SSLError
from botocore.exceptions import ConnectionError as BotoConnectionError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.log_once import LogOnce
from nixl_tiers.tiers.s3.aws_region import configured_region, settled_region
from nixl_tiers.tiers.s3.credentials import Credentials, find_credentials, session_of
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.encryption import objection
from nixl_tiers.tiers.s3.listing import PROBE_NAME, Listing
from nixl_tiers.tiers.s3.tls import speaks_tls_only, trusted_certificates

logger = logging.getLogger(__name__)

PROBE_S: Final = 3.0
FLUSH_S: Final = 2.0
RENEW_S: Final = 60.0
DOUBT_S: Final = 5.0  # the same while transfers fail
CHECK_S: Final = 60.0  # between two uploads that are made to hear why others fail
CONNECTIONS: Final = 16
MAX_DELETES: Final = 1000  # what one DeleteObjects request may name
BACKOFF_S: Final = (1.0, 30.0)

# The answer to HEAD has no body: instead of an error's name there is only the HTTP status.
_MEANINGS: Final = {
    "400": "does not accept the request, as with expired credentials or a wrong region (HTTP 400)",
    "401": "refuses these credentials (HTTP 401)",
    "403": "refuses these credentials (HTTP 403), or they lack the right s3:ListBucket",
}
# What OpenSSL, as its version has it, calls an answer that is no TLS.
_PLAIN_HTTP: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


class S3Control:
    """One bucket as one mover sees it. Its methods are called by one thread; what blocks runs on another, a daemon."""

    def __init__(self, tier: S3Config) -> None:
        self._tier = tier
        self._session: Any = None
        self._client: Any = None
        self._quick: Any = None  # for questions whose answer is of no use later
        self._source: Any = None  # botocore's credentials, which renew themselves where they can
        self.credentials: Credentials | None = None
        self.region = configured_region(tier)
        self._complaints = LogOnce(logger)
        self.denials = Denials(f's3 bucket "{tier.bucket}" at {tier.endpoint or "AWS"}')
        self._wake = threading.Condition()
        self._probe: Future[None] | None = None
        self._listing: Listing | None = None
        self._queued: dict[str, None] = {}
        self._leaving: frozenset[str] = frozenset()
        self._gone: list[str] = []
        self._waits_s = {"list": 0.0, "delete": 0.0}
        self._not_before = {"list": 0.0, "delete": 0.0}
        self._doubted = False  # whether uploads fail, who knows why
        self._check_at = float("-inf")
        self._renew_at = float("inf")
        self._renewed_at = 0.0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._time: tuple[float, float] | None = None  # what an answer told last, and when, by the monotonic clock

    # The mover's side

    def connect(self, timeout_s: float = PROBE_S) -> Credentials:
        """Find credentials and ask the bucket whether it is there; returns within `timeout_s`.

        Raises TierRefused if there is no such bucket or the configuration cannot work, else TierDown.
        """
        with self._wake:
            if self._probe is None or self._probe.done():
                self._probe = Future()
            probe = self._probe
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nixl_tiers-bucket", daemon=True)
                self._thread.start()
            self._wake.notify()
        try:
            probe.result(timeout_s)
        except FutureTimeout:
            raise self._down(f"does not answer within {timeout_s:g} s") from None
        if self.credentials is None:
            raise self._down("no credentials")
        return self.credentials

    def start(self, listing: Listing) -> None:
        """Make this listing in the background, in place of an earlier one that still runs."""
        with self._wake:
            self._listing = listing
            self._not_before["list"] = 0.0
            self._wake.notify()

    def doubt(self) -> None:
        """A transfer has failed, perhaps for its credentials: look soon whether there are others by now."""
        with self._wake:
            if self._renew_at < float("inf") and self._renew_at > self._renewed_at + DOUBT_S:
                self._renew_at = self._renewed_at + DOUBT_S
                self._wake.notify()

    def doubt_uploads(self) -> None:
        """An upload has failed: find out soon whether the server denies them."""
        self.denials.failed("put")
        with self._wake:
            self._doubted = True
            self._wake.notify()

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects in the background, again and again until the server says that they are gone."""
        with self._wake:
            self._queued.update(dict.fromkeys(names))
            self._wake.notify()

    def keep(self, name: str) -> bool:
        """Take a delete back. False if it is under way: wait for `gone`, or give up while `deletes_back_off`."""
        with self._wake:
            self._queued.pop(name, None)
            return name not in self._leaving

    def gone(self) -> Sequence[str]:
        """Names whose deletes were confirmed since the last call."""
        if not self._gone:
            return ()
        with self._wake:
            gone, self._gone = self._gone, []
        return gone

    def is_there(self, name: str, nbytes: int) -> bool | None:
        """Whether an object of this name and size, not too old, is there; None if the server does not say, soon.

        For threads that may wait. Raises what boto3 raises for anything but an answer.
        """
        if self._quick is None:
            return None
        try:
            found = self._quick.head_object(Bucket=self._tier.bucket, Key=name)
        except ClientError as error:
            return False if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404 else None
        date = found["ResponseMetadata"]["HTTPHeaders"].get("date")
        if self._tier.max_age is not None and date is not None:
            age_s = parsedate_to_datetime(date).timestamp() - found["LastModified"].timestamp()
            return bool(found["ContentLength"] == nbytes and age_s <= self._tier.max_age)
        return bool(found["ContentLength"] == nbytes)

    def now_s(self) -> float:
        """Unix seconds by the server's clock, a second late at most; by this machine's while the server tells none."""
        known = self._time
        return time.time() if known is None else known[0] + time.monotonic() - known[1]

    @property
    def client(self) -> Any:
        """A boto3 client with the present credentials, for other threads that may wait; None before `connect`."""
        return self._client

    @property
    def deleting(self) -> bool:
        """Whether deletes are queued or under way."""
        return bool(self._queued or self._leaving)

    @property
    def deletes_back_off(self) -> bool:
        """Whether the last delete request has failed, and the next is put off. What it named is queued again."""
        return self._waits_s["delete"] > 0 and time.monotonic() < self._not_before["delete"]

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Send the deletes that are queued, as long as `timeout_s` and the server allow, and stop."""
        if self._thread is None:
            return
        with self._wake:
            self._listing = None
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        with self._wake:
            self._queued.clear()

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
        if self._probe is not None and not self._probe.done():
            return self._connect
        if self._check_due and self._client is not None and now >= self._check_at:
            return self._check_uploads
        if self._queued and self._client is not None and now >= self._not_before["delete"]:
            return self._delete_some
        if self._listing is not None and now >= self._not_before["list"]:
            return self._list_page
        if now >= self._renew_at:
            return self._renew
        return None

    def _idle_s(self, now: float) -> float | None:
        times = [self._renew_at]
        if self._check_due:
            times.append(self._check_at)
        if self._queued:
            times.append(self._not_before["delete"])
        if self._listing is not None:
            times.append(self._not_before["list"])
        soonest = min(times)
        return None if soonest == float("inf") else max(0.0, soonest - now)

    @property
    def _check_due(self) -> bool:
        # What was denied is asked for again and again: where nothing is stored meanwhile, who else finds out that it
        # is allowed now?
        return not self._closing and (self._doubted or "put" in self.denials.current())

    def _check_uploads(self) -> None:
        """Upload a small object, whose answer tells why uploads fail: NIXL does not."""
        self._doubted = False
        self._check_at = time.monotonic() + CHECK_S
        with contextlib.suppress(BotoCoreError, ClientError):
            name = f"{self._tier.prefix}/{PROBE_NAME}"
            self._client.put_object(Bucket=self._tier.bucket, Key=name, Body=b"are uploads allowed?")

    def _connect(self) -> None:
        assert self._probe is not None
        try:
            self._source, self.credentials = find_credentials(self._tier)
            self.region = configured_region(self._tier)
            if self._session is None:
                self._session = session_of(self._tier)
            client = self._make_client(connect_s=1.2, read_s=1.4, attempts=1)
            answer = client.head_bucket(Bucket=self._tier.bucket)
            told = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
            configured, self.region = self.region, settled_region(self._tier, self.region, told)
            if configured.source is not None and configured != self.region:
                self._complaints.report(
                    "region",
                    f'region: bucket "{self._tier.bucket}" is in {self.region.name}, which is used, and not in '
                    f"{configured.name}, as {configured.source} says",
                )
            if (found := objection(client, self._tier)) is not None:
                raise self._down(found)
            self._make_clients()
            self._not_before = {"list": 0.0, "delete": 0.0}
            self._renewed_now()
        except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to who waits in connect)
            self._probe.set_exception(self._explained(error))
        else:
            self._probe.set_result(None)

    def _delete_some(self) -> None:
        with self._wake:
            names = list(itertools.islice(self._queued, MAX_DELETES))
            for name in names:
                del self._queued[name]
            self._leaving = frozenset(names)
        request = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        stay: Sequence[str]
        try:
            answer = self._client.delete_objects(Bucket=self._tier.bucket, Delete=request)
            stay = [str(error.get("Key")) for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"]
        except (BotoCoreError, ClientError):
            stay = names
        with self._wake:
            self._leaving = frozenset()
            self._gone.extend(set(names).difference(stay))
            self._queued.update(dict.fromkeys(stay))
            self._pace("delete", failed=bool(stay))

    def _list_page(self) -> None:
        listing = self._listing
        if listing is None:
            return
        try:
            listing.page(self._client, self._tier.bucket)
            failed = False
        except (BotoCoreError, ClientError):
            failed = True
        with self._wake:
            self._pace("list", failed)
            if listing.done.is_set() and self._listing is listing:
                self._listing = None

    def _renew(self) -> None:
        """Offer credentials that were renewed (a role's, or in their file); keep the old ones if none are found."""
        self._renewed_now()
        try:
            self._source, found = find_credentials(self._tier, self._source)
        except (BotoCoreError, TierDown, TierRefused, OSError):
            return
        if found != self.credentials:
            self.credentials = found
            self._make_clients()

    def _renewed_now(self) -> None:
        with self._wake:
            self._renewed_at = time.monotonic()
            self._renew_at = self._renewed_at + RENEW_S

    def _pace(self, what: str, failed: bool) -> None:
        first_s, last_s = BACKOFF_S
        self._waits_s[what] = min(max(self._waits_s[what] * 2, first_s), last_s) if failed else 0.0
        self._not_before[what] = time.monotonic() + self._waits_s[what]

    def _make_clients(self) -> None:
        self._client = self._make_client(connect_s=2.0, read_s=10.0, attempts=2)
        self._quick = self._make_client(connect_s=1.0, read_s=1.0, attempts=1)

    def _make_client(self, connect_s: float, read_s: float, attempts: int) -> Any:
        assert self.credentials is not None
        client = self._session.client(
            "s3",
            region_name=self.region.name,
            endpoint_url=self._tier.endpoint,
            verify=trusted_certificates(self._tier),
            aws_access_key_id=self.credentials.access_key,
            aws_secret_access_key=self.credentials.secret_key,
            aws_session_token=self.credentials.session_token or None,
            config=Config(
                connect_timeout=connect_s,
                read_timeout=read_s,
                max_pool_connections=CONNECTIONS,
                retries={"mode": "standard", "total_max_attempts": attempts},
                s3={"addressing_style": "auto" if self._tier.endpoint is None else "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                tcp_keepalive=True,
            ),
        )
        self.denials.watch(client)
        client.meta.events.register("after-call.s3", self._answered)
        return client

    def _answered(self, http_response: Any, **_: object) -> None:
        """Called by botocore with each answer."""
        with contextlib.suppress(TypeError, ValueError):
            self._time = parsedate_to_datetime(http_response.headers.get("date")).timestamp(), time.monotonic()

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, (TierDown, TierRefused)):
            return error
        if speaks_tls_only(self._tier, error):
            return self._down("speaks https, not http (see endpoint)")
        if isinstance(error, ClientError):
            code = str(error.response.get("Error", {}).get("Code", "unknown"))
            if code in {"404", "NoSuchBucket"}:
                return TierRefused(f'bucket: there is no bucket "{self._tier.bucket}" at {self._place}')
            return self._down(_MEANINGS.get(code, f"answers with an error ({code})"))
        if isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
            return self._down("shows a certificate that is not trusted here (see ca_file)")
        if isinstance(error, SSLError):
            plain = any(sign in str(error).upper().replace(" ", "_") for sign in _PLAIN_HTTP)
            return self._down("speaks http, not https (see endpoint)" if plain else "agrees on no TLS (see endpoint)")
        if isinstance(error, (BotoConnectionError, HTTPClientError, OSError)):
            return self._down(f"does not answer ({type(error).__name__})")
        return self._down(f"cannot be used ({type(error).__name__})")

    def _down(self, what: str) -> TierDown:
        return TierDown(f's3 bucket "{self._tier.bucket}" at {self._place}: {what}')

    @property
    def _place(self) -> str:
        return self._tier.endpoint or f"AWS {self.region.name}"
