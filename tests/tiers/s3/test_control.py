"""The control connection's queue of deletes."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.parsers import ResponseParserError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3 import control
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.listing import FullListing, Page
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.quota import PrefixQuota
from tests.tiers.s3.harness import HANG_UP, FaultyS3, Request, connects, wait_until

pytestmark = pytest.mark.usefixtures("server_credentials")


def test_queued_deletes_are_sent_when_they_are_allowed(faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease may be renewed, or the first listing of its tenure end, long after the delete was queued."""
    monkeypatch.setattr(control, "CREDENTIALS_CHECK_S", 3600.0)  # nothing else wakes the thread
    monkeypatch.setattr(control, "PERMISSION_CHECK_S", 0.05)
    faulty.objects["nixl-tiers/row"] = b"old"
    allowed, refused = threading.Event(), threading.Event()

    def may_delete() -> bool:
        if not allowed.is_set():
            refused.set()
        return allowed.is_set()

    config = S3Config(type="s3", bucket="kv-control", endpoint=faulty.endpoint, capacity="1GiB")
    bucket = S3Control(config, may_delete)
    try:
        assert wait_until(lambda: connects(bucket))
        bucket.delete(["nixl-tiers/row"])
        assert refused.wait(60)
        with bucket._wake:  # it waits by now
            assert "nixl-tiers/row" in faulty.objects
        allowed.set()
        assert wait_until(lambda: "nixl-tiers/row" not in faulty.objects)
    finally:
        bucket.close()


def test_delete_is_not_tried_again_without_permission(faulty: FaultyS3) -> None:
    """The process may have been paused between two attempts, and the object be another engine's by now."""
    allowed = True

    def hang_up(request: Request) -> int | None:
        nonlocal allowed
        if request.method != "POST":
            return None
        allowed = False
        return HANG_UP

    faulty.fault = hang_up
    bucket = S3Control(
        S3Config(type="s3", bucket="kv-control", endpoint=faulty.endpoint, capacity="1GiB"), lambda: allowed
    )
    try:
        assert wait_until(lambda: connects(bucket))
        bucket.delete(["nixl-tiers/row"])
        assert wait_until(lambda: bucket.deletes_backing_off)
        assert faulty.count("POST") == 1
    finally:
        bucket.close()


def test_dropped_delete_that_fails_is_not_queued_again() -> None:
    bucket = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))

    def fail(**_: object) -> None:
        bucket.drop_deletes()
        raise EndpointConnectionError(endpoint_url="gone")

    bucket.connection.client = bucket.connection.delete_client = mock.Mock(delete_objects=fail)
    bucket.delete(["nixl-tiers/row"])
    bucket._delete_some()
    assert not bucket.has_pending_deletes


def test_damaged_answer_to_the_test_of_uploads_is_none() -> None:
    bucket = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))
    bucket.connection.client = mock.Mock()
    bucket.connection.client.put_object.side_effect = ResponseParserError("damaged")
    bucket._check_uploads()


def test_unknown_error_of_a_listing_is_logged_and_the_listing_retried(
    faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "BACKOFF_S", (0.05, 0.1))
    config = S3Config(type="s3", bucket="kv-control", endpoint=faulty.endpoint, capacity="1GiB")
    bucket = S3Control(config)
    listing = FailingListing()
    try:
        assert wait_until(lambda: connects(bucket))
        bucket.start_listing(listing)
        assert listing.done.wait(60)
    finally:
        bucket.close()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == 'listing for s3 bucket "kv-control" has failed, and is retried (ZeroDivisionError)'


def test_page_that_was_compared_in_part_ends_the_thread() -> None:
    """The next request would begin behind that page, and its other rows would be known to nobody."""
    bucket = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))
    bucket._listing = listing = FullListing(
        PrefixQuota(RowNames("p"), 100, 10**9), RowNames("p"), ("", 100), whole=True, max_age_s=None, deleter=None
    )
    with (
        mock.patch.object(listing, "_fetch", return_value=Page([], "p/a")),
        mock.patch.object(listing, "_compare", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        bucket._list_page()


class FailingListing:
    """Fails twice, then ends."""

    comparing = False

    def __init__(self) -> None:
        self.done = threading.Event()
        self.steps = 0

    def next_step_s(self, now: float) -> float:
        return now

    def step(self, client: object, bucket: str) -> None:
        self.steps += 1
        if self.steps <= 2:
            raise ZeroDivisionError
        self.done.set()
