"""The control connection's queue of deletes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from botocore.exceptions import EndpointConnectionError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.s3 import control
from nixl_tiers.tiers.s3.client import Credentials
from nixl_tiers.tiers.s3.control import S3Control
from tests.system.tiers.s3.harness import HANG_UP, TIMES, FaultyS3, Request, but, connects, wait_until
from tests.tiers.s3.test_control import FailingListing

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


def test_steady_deletes_leave_time_for_everything_else() -> None:
    """Rows are evicted without end while a server is slow to delete."""
    config = S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB")
    bucket = S3Control(config, times=but(s3_credentials_s=0.0))
    listing, renewed = FailingListing(failures=0, pages=3), threading.Event()
    deletes, steady = list[str](), True

    def delete_objects(**_: object) -> dict[str, object]:
        if steady:
            deletes.append(f"nixl-tiers/{len(deletes)}")
            bucket.delete(deletes[-1:])
        return {}

    connection = bucket.connection
    connection.credentials = Credentials("id", "secret")
    connection.client = connection.delete_client = SimpleNamespace(delete_objects=delete_objects)
    with mock.patch.object(connection, "open"), mock.patch.object(connection, "renew", renewed.set):
        try:
            bucket.delete(["nixl-tiers/first"])
            bucket.start_listing(listing)
            bucket.connect()
            assert renewed.wait(30), "credentials are not renewed"
            bucket._times = TIMES
            assert listing.done.wait(30), "no sweep ends"
            before = len(deletes)
            assert wait_until(lambda: len(deletes) > before + 10)  # and deletes go on
        finally:
            steady = False
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


def test_versioning_does_not_matter_where_nothing_is_written(faulty: FaultyS3) -> None:
    config = S3Config(type="s3", bucket="kv-control", endpoint=faulty.endpoint, capacity="1GiB", write="off")
    bucket = S3Control(config)
    try:
        with mock.patch.object(bucket, "_check_versioning", side_effect=AssertionError) as asked:
            assert wait_until(lambda: connects(bucket))
            bucket.close()
        assert not asked.called
    finally:
        bucket.close()


def test_queued_deletes_are_sent_when_they_are_allowed(faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease may be renewed, or the first listing of its tenure end, long after the delete was queued."""
    monkeypatch.setattr(control, "PERMISSION_CHECK_S", 0.05)
    faulty.objects["nixl-tiers/row"] = b"old"
    allowed, refused = threading.Event(), threading.Event()

    def may_delete() -> bool:
        if not allowed.is_set():
            refused.set()
        return allowed.is_set()

    config = S3Config(type="s3", bucket="kv-control", endpoint=faulty.endpoint, capacity="1GiB")
    bucket = S3Control(config, may_delete, but(s3_credentials_s=3600.0))  # nothing else wakes the thread
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
    config = S3Config(type="s3", bucket="kv-control", endpoint=faulty.endpoint, capacity="1GiB")
    bucket = S3Control(config, lambda: allowed, but(s3_backoff_s=(3600.0, 3600.0)))
    try:
        assert wait_until(lambda: connects(bucket))
        bucket.delete(["nixl-tiers/row"])
        assert wait_until(lambda: bucket.deletes_backing_off)
        assert faulty.count("POST") == 1
    finally:
        bucket.close()


@pytest.mark.parametrize("error", [None, EndpointConnectionError(endpoint_url="gone")], ids=["confirmed", "failed"])
def test_delete_is_pending_or_confirmed_at_every_moment(error: Exception | None) -> None:
    """An upload that needs its space waits for it; where nothing is pending, there is no space."""
    bucket = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))
    seen, loops = list[bool](), list[threading.Thread]()

    def delete(**_: object) -> dict[str, object]:
        loops[0].join(60)
        if error is not None:
            raise error
        return {}

    def look() -> None:
        pending = bucket.has_pending_deletes
        seen.append(pending or bool(bucket.confirmed_deletes()))

    class Moved(dict[str, None]):
        """A queue between whose changes the mover's loop looks."""

        def __delitem__(self, name: str) -> None:
            super().__delitem__(name)
            self.look()

        def update(self, *names: Any) -> None:
            self.look()
            super().update(*names)

        def look(self) -> None:
            loops.append(threading.Thread(target=look))
            loops[-1].start()
            loops[-1].join(0.2)  # unless it waits for the change to be complete

    bucket.connection.client = bucket.connection.delete_client = mock.Mock(delete_objects=delete)
    bucket._delete_queue = Moved({"nixl-tiers/row": None})
    bucket._delete_some()
    for loop in loops:
        loop.join(60)
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("error", "confirmed"),
    [
        ("<Key>nixl-tiers/b</Key><Code>InternalError</Code>", {"nixl-tiers/a"}),
        ("<Key>nixl-tiers/b</Key><Code>NoSuchKey</Code>", {"nixl-tiers/a", "nixl-tiers/b"}),
        ("<Key>elsewhere/precious</Key><Code>InternalError</Code>", set()),
        ("<Code>InternalError</Code>", set()),
    ],
    ids=["ours", "is-gone", "another-object", "no-object"],
)
def test_error_deletes_no_object_but_those_that_were_named(error: str, confirmed: set[str], faulty: FaultyS3) -> None:
    """An error that names none of them may be that of any: none of them counts as deleted."""
    faulty.objects |= {"elsewhere/precious": b"", "None": b"", "nixl-tiers/a": b"", "nixl-tiers/b": b""}
    answers = [f"<DeleteResult><Error>{error}</Error></DeleteResult>".encode()]
    faulty.fault = lambda request: answers.pop() if request.method == "POST" and answers else None
    config = S3Config(type="s3", bucket="kv-control", endpoint=faulty.endpoint, capacity="1GiB")
    bucket = S3Control(config, times=but(s3_backoff_s=(3600.0, 3600.0)))

    def answered() -> bool:
        with bucket._wake:
            return not answers and not bucket._in_flight_deletes

    try:
        assert wait_until(lambda: connects(bucket))
        bucket.delete(["nixl-tiers/a", "nixl-tiers/b"])
        assert wait_until(answered)
        assert set(bucket.confirmed_deletes()) == confirmed
        bucket._set_backoff("delete", failed=False)
    finally:
        bucket.close()  # sends those that failed again
    assert {"elsewhere/precious", "None"} <= faulty.objects.keys()
    assert faulty.objects.keys() & {"nixl-tiers/a", "nixl-tiers/b"} == confirmed


def test_unknown_error_of_a_listing_is_logged_and_the_listing_retried(
    faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    config = S3Config(type="s3", bucket="kv-control", endpoint=faulty.endpoint, capacity="1GiB")
    bucket = S3Control(config, times=but(s3_backoff_s=(0.05, 0.1)))
    listing = FailingListing()
    try:
        assert wait_until(lambda: connects(bucket))
        bucket.start_listing(listing)
        assert listing.done.wait(60)
    finally:
        bucket.close()
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == 'listing for s3 bucket "kv-control" has failed, and is retried (ZeroDivisionError)'
