"""The control connection's queue of deletes."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.parsers import ResponseParserError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.listing import FullListing, Page
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.quota import PrefixQuota

pytestmark = pytest.mark.usefixtures("server_credentials")


def test_versioning_is_asked_for_after_all_else() -> None:
    """The listing that first hits wait for comes before it."""
    bucket = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))
    bucket.connection.client = mock.Mock()
    bucket._listing = FailingListing()
    assert bucket._next(0.0) == bucket._list_page
    bucket._listing = None
    assert bucket._next(0.0) == bucket._check_versioning


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


def test_page_that_was_compared_in_part_ends_the_thread() -> None:
    """The next request would begin behind that page, and its other rows would be known to nobody."""
    bucket = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))
    bucket._listing = listing = FullListing(
        PrefixQuota(RowNames("p"), 100, 10**9), RowNames("p"), ("", 100), max_age_s=None, deleter=None
    )
    with (
        mock.patch.object(listing, "_fetch", return_value=Page([], "p/a")),
        mock.patch.object(listing, "_compare", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        bucket._list_page()


class FailingListing:
    """Fails at its first steps, then has this many pages."""

    comparing = False

    def __init__(self, failures: int = 2, pages: int = 1) -> None:
        self.done = threading.Event()
        self.failures, self.pages = failures, pages
        self.steps = 0

    def next_step_s(self, now: float) -> float:
        return now

    def step(self, client: object, bucket: str) -> None:
        self.steps += 1
        if self.steps <= self.failures:
            raise ZeroDivisionError
        if self.steps == self.failures + self.pages:
            self.done.set()
