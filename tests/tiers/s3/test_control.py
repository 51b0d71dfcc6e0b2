"""The control connection's queue of deletes."""

from __future__ import annotations

import threading

import pytest

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3 import control
from nixl_tiers.tiers.s3.control import S3Control
from tests.tiers.s3.harness import FaultyS3, connects, wait_until

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


class FailingListing:
    """Fails twice, then ends."""

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
