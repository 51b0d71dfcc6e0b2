"""The connection of the S3 tier's control requests: credentials, region and boto3's clients for one bucket.

Which requests are made, and when: control.py. No message contains a server's text or a credential.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.answers import answered_at_s
from nixl_tiers.tiers.s3.client import (
    Credentials,
    configured_region,
    endpoint_of,
    find_credentials,
    make_client,
    session_of,
    settled_region,
)
from nixl_tiers.tiers.s3.denials import Denials

logger = logging.getLogger(__name__)

VERSIONED: Final = "versioning is on: deleted and overwritten objects stay as old versions, which no capacity bounds"
REMEDY: Final = "suspend versioning, or have a lifecycle rule delete noncurrent versions"


class S3Connection:
    """What is known of one bucket's server, and the clients that ask it. `open` and `renew` are for one thread, which
    they may block; the rest is for any."""

    def __init__(self, tier: S3Config, times: Times = PRODUCTION) -> None:
        self._tier = tier
        self._times = times
        self._session: Any = None
        self._credential_source: Any = None  # botocore's credentials object, which may renew itself
        self._log_once = LogOnce(logger)
        self.credentials: Credentials | None = None
        self.region = configured_region(tier)
        self.endpoint: str | None = None
        """The server's URL, as boto3 has it after `open`; None: AWS."""
        self.denials = Denials(f's3 bucket "{tier.bucket}" at {tier.endpoint or "AWS"}', clear_s=times.s3_denial_s)
        self.client: Any = None
        """A boto3 client with the present credentials; None before `open`."""
        self.delete_client: Any = None
        """The same with one attempt: the next one needs the permission again."""
        self.quick_client: Any = None
        """The same with short timeouts, for existence checks."""
        self._server_time: tuple[float, float] | None = None
        """The Date of the last answer, and the monotonic time when it came."""

    def open(self) -> None:
        """Find credentials and region, check that the bucket can be used, and make the clients. Raises TierDown,
        TierRefused and what boto3 raises."""
        self._credential_source, self.credentials = find_credentials(self._tier)
        self.region = configured_region(self._tier)
        if self._session is None:
            self._session = session_of(self._tier)
        client = self._make_client(self._times.s3_open_request_s)
        answer = client.head_bucket(Bucket=self._tier.bucket)
        reported = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
        configured, self.region = self.region, settled_region(self._tier, self.region, reported)
        if configured.source is not None and configured != self.region:
            self._log_once.report(
                "region",
                f'region: bucket "{self._tier.bucket}" is in {self.region.name}, which is used, and not in '
                f"{configured.name}, as {configured.source} says",
            )
        self._make_clients()

    def renew(self) -> None:
        """Use credentials that were renewed (a role's, or in their file); keep the old ones if none are found, and
        raise what finding them raises."""
        self._credential_source, found = find_credentials(self._tier, self._credential_source)
        if found != self.credentials:
            self.credentials = found
            self._make_clients()

    def written_s(self, name: str, nbytes: int) -> int | None:
        """When the object of this name was last written, in Unix seconds by the server's clock; 0 if there is none of
        this size that has not expired, None if the answer is an error.

        Blocks, but not for long. Raises what boto3 raises if there is no answer.
        """
        if self.quick_client is None:
            return None
        try:
            found = self.quick_client.head_object(Bucket=self._tier.bucket, Key=name)
        except ClientError as error:
            return 0 if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404 else None
        written_s, now_s = int(found["LastModified"].timestamp()), answered_at_s(found)
        expired = self._tier.max_age is not None and now_s is not None and now_s - written_s > self._tier.max_age
        return max(1, written_s) if found["ContentLength"] == nbytes and not expired else 0

    def server_time_s(self) -> float:
        """Unix seconds by the server's clock, at most a second late; by this machine's before the first answer."""
        if self._server_time is None:
            return time.time()
        date_s, received_s = self._server_time
        return date_s + time.monotonic() - received_s

    def _make_clients(self) -> None:
        times = self._times
        self.client = self._make_client(times.s3_request_s, attempts=2)
        self.endpoint = endpoint_of(self.client)
        self.quick_client = self._make_client((times.s3_quick_s, times.s3_quick_s))
        self.delete_client = self._make_client(times.s3_request_s)

    def _make_client(self, timeouts_s: tuple[float, float], attempts: int = 1) -> Any:
        assert self.credentials is not None
        tier, region = self._tier, self.region.name
        client = make_client(self._session, tier, self.credentials, region, timeouts_s=timeouts_s, attempts=attempts)
        self.denials.watch(client)
        client.meta.events.register("after-call.s3", self._on_response)
        return client

    def _on_response(self, parsed: Mapping[str, Any], **_: object) -> None:
        """Called by botocore with each answer."""
        with contextlib.suppress(ResponseParserError):
            if (date_s := answered_at_s(parsed)) is not None:
                self._server_time = date_s, time.monotonic()


def is_versioned(client: Any, bucket: str) -> bool:
    """Whether a delete leaves an old version. Raises what boto3 raises: not every server knows versions, and the right
    s3:GetBucketVersioning is needed for nothing else."""
    return bool(client.get_bucket_versioning(Bucket=bucket).get("Status") == "Enabled")
