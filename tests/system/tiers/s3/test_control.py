"""The control connection's queue of deletes."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.s3.client import Credentials
from nixl_tiers.tiers.s3.control import S3Control
from tests.system.tiers.s3.harness import TIMES, FaultyS3, connects, wait_until

pytestmark = pytest.mark.usefixtures("server_credentials")


def test_attempt_that_succeeds_too_late_is_used_by_the_next_one() -> None:
    """A source of credentials that takes longer than `connect` waits would never be enough otherwise."""
    bucket = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))
    found, attempts = threading.Event(), list[int]()

    def open_slowly() -> None:
        attempts.append(1)
        assert found.wait(60)
        bucket.connection.credentials = Credentials("id", "secret")

    with mock.patch.object(bucket.connection, "open", open_slowly):
        try:
            with pytest.raises(TierDown, match="does not answer within"):
                bucket.connect(timeout_s=0.01)
            with pytest.raises(TierDown, match="does not answer within"):
                bucket.connect(timeout_s=0.01)
            found.set()
            assert bucket._connecting is not None
            bucket._connecting.result(60)
            bucket.connect()
            assert len(attempts) == 1
            bucket.connect()
            assert len(attempts) == 2  # a result is used once: the server may be another by then
        finally:
            bucket.close()


def test_attempt_that_fails_too_late_is_made_again() -> None:
    bucket = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))
    ended = threading.Event()

    def fail_slowly() -> None:
        assert ended.wait(60)
        if bucket.connection.credentials is None:
            bucket.connection.credentials = Credentials("id", "secret")
            raise TierDown("no longer so")

    with mock.patch.object(bucket.connection, "open", fail_slowly):
        try:
            with pytest.raises(TierDown, match="does not answer within"):
                bucket.connect(timeout_s=0.01)
            ended.set()
            assert bucket._connecting is not None
            bucket._connecting.exception(60)
            bucket.connect()
        finally:
            bucket.close()


@pytest.mark.parametrize(
    ("answer", "warned"),
    [
        ((200, b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"), True),
        ((200, b"<VersioningConfiguration><Status>Suspended</Status></VersioningConfiguration>"), False),
        ((200, b"<VersioningConfiguration/>"), False),
        ((403, b"<Error><Code>AccessDenied</Code></Error>"), False),
        ((501, b"<Error><Code>NotImplemented</Code></Error>"), False),
        ((200, b"<Versioning"), False),
    ],
    ids=["enabled", "suspended", "never", "denied", "unknown", "damaged"],
)
def test_bucket_that_keeps_deleted_rows_is_warned_of(
    answer: tuple[int, bytes],
    warned: bool,
    faulty: FaultyS3,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty.versioning = answer
    config = S3Config(type="s3", bucket="kv-control", endpoint=faulty.endpoint, capacity="1GiB")
    bucket = S3Control(config, times=TIMES)  # asked once, however late the answer
    try:
        assert wait_until(lambda: connects(bucket))
        assert wait_until(lambda: not bucket._versioning_unknown)
    finally:
        bucket.close()
    expected = (
        's3 bucket "kv-control": versioning is on: deleted and overwritten objects stay as old versions, which no '
        "capacity bounds; suspend versioning, or have a lifecycle rule delete noncurrent versions"
    )
    assert [r.getMessage() for r in caplog.records] == [expected] * warned
    assert not bucket.denials.current()
