"""Denials: found out, reported in one sentence for each kind of request, and cleared when they are over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.s3.lease import PrefixLease
from tests.system.tiers.s3.harness import NAMESPACE, Fault, FaultyS3, Request, TierDriver, but, is_listing, wait_until

SMALL = Geometry(cells=1, cell_payload=64 << 10)
TEST_OBJECT = "nixl-tiers/.probe"
SHORT = but(s3_test_upload_s=0.05, s3_backoff_s=(0.05, 0.1), s3_denial_s=0.05)

pytestmark = pytest.mark.usefixtures("server_credentials")


def is_put(request: Request) -> bool:
    return request.method == "PUT"


def is_get(request: Request) -> bool:
    return request.method == "GET" and request.name != ""


def is_delete(request: Request) -> bool:
    return request.method == "POST"


KINDS = {"put": is_put, "get": is_get, "delete": is_delete, "list": is_listing}


def denying(matches: Callable[[Request], bool], status: int = 403, code: str = "AccessDenied") -> Fault:
    return lambda request: (status, code) if matches(request) else None


def no_fault(_: Request) -> None:
    """Serve every request."""


def upload_tests(server: FaultyS3) -> int:
    return sum(request.method == "PUT" and request.name == TEST_OBJECT for request in server.requests)


@pytest.fixture
def says_nothing_of_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixLease, "_report", lambda _: None)


@pytest.fixture
def driver(faulty: FaultyS3) -> Iterator[TierDriver]:
    with TierDriver(SMALL, 32, bucket="kv-rights", endpoint=faulty.endpoint, times=SHORT) as driver:
        driver.open()
        yield driver


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("says_nothing_of_conditions")
def test_each_kind_is_reported_with_its_right_and_cleared(driver: TierDriver, faulty: FaultyS3, kind: str) -> None:
    assert driver.store([1, 2]) == [Outcome.OK] * 2
    assert driver.tier.denials == {}
    faulty.fault = denying(KINDS[kind])
    driver.open_only(NAMESPACE, 0)
    listing = driver.tier.list_rows()
    driver.delete(2)

    def reported() -> bool:
        driver.store([3])
        driver.load([1])
        next(listing, None)
        return kind in driver.tier.denials

    assert wait_until(reported)
    right = {"put": "PutObject", "get": "GetObject", "delete": "DeleteObject", "list": "ListBucket"}[kind]
    sentence = driver.tier.denials[kind]
    assert sentence.startswith(f's3 bucket "kv-rights" at {faulty.endpoint}: ')
    assert f"denied (AccessDenied; the right is s3:{right})" in sentence
    assert set(driver.tier.denials) == {kind}
    faulty.fault = no_fault
    driver.open()

    def cleared() -> bool:
        driver.store([4])
        driver.load([4])
        return driver.tier.denials == {}

    assert wait_until(cleared)


@pytest.mark.usefixtures("says_nothing_of_conditions")
def test_uploads_are_tested_until_they_are_allowed(driver: TierDriver, faulty: FaultyS3) -> None:
    """Also if nothing more is stored."""
    faulty.fault = denying(is_put)
    assert driver.store([1]) == [Outcome.FAILED]
    assert wait_until(lambda: "put" in driver.tier.denials)
    faulty.fault = no_fault
    assert wait_until(lambda: driver.tier.denials == {})


@pytest.mark.usefixtures("says_nothing_of_conditions")
def test_a_delete_denied_for_one_object_is_a_denial(driver: TierDriver, faulty: FaultyS3) -> None:
    """The status of the answer is 200 then."""
    driver.store([1])
    error = f"<Error><Key>{driver.name(1)}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
    answer = f"<DeleteResult>{error}</DeleteResult>".encode()
    faulty.fault = lambda request: answer if is_delete(request) else None
    driver.delete(1)
    assert wait_until(lambda: "AccessDenied" in driver.tier.denials.get("delete", ""))
    faulty.fault = no_fault
    assert wait_until(lambda: driver.tier.denials == {})
    assert driver.settled(0)


def test_failing_uploads_cause_one_test_upload_a_minute(driver: TierDriver, faulty: FaultyS3) -> None:
    driver.tier._control._times = but(s3_test_upload_s=3600.0)  # a minute of a machine that is slow
    faulty.fault = denying(is_put)
    for number in range(8):
        assert driver.store([number]) == [Outcome.FAILED]
    assert wait_until(lambda: "put" in driver.tier.denials)
    assert driver.store([8]) == [Outcome.FAILED]
    driver.delete(8)
    assert driver.settled(0), "the control thread has worked off its queue"
    assert upload_tests(faulty) == 1


@pytest.mark.usefixtures("says_nothing_of_conditions")
def test_the_test_object_is_not_a_row(driver: TierDriver, faulty: FaultyS3) -> None:
    faulty.fault = lambda request: 503 if is_put(request) and request.name != TEST_OBJECT else None
    for number in range(4):
        assert driver.store([number]) == [Outcome.FAILED]
        assert wait_until(lambda number=number: upload_tests(faulty) > number)
    assert driver.tier.denials == {}, "small objects may be written"
    faulty.fault = no_fault
    assert driver.settled(0)
    assert set(faulty.objects) == {TEST_OBJECT}
    assert driver.open() == []
    assert driver.tier.used_bytes == 0


def test_a_read_only_tier_never_tests_uploads(faulty: FaultyS3) -> None:
    with TierDriver(SMALL, 4, bucket="kv-rights", endpoint=faulty.endpoint, write="off") as driver:
        driver.open()
        faulty.fault = denying(is_get)
        driver.load([1])
        driver.delete(1)
        assert wait_until(lambda: set(driver.tier.denials) == {"get"})
    assert faulty.count("PUT") == faulty.count("POST") == 0


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.usefixtures("says_nothing_of_conditions")
def test_errors_of_a_busy_server_are_no_denials(driver: TierDriver, faulty: FaultyS3, status: int) -> None:
    driver.store([1])
    faulty.fault = lambda request: None if request.method == "HEAD" else (status, "SlowDown")
    assert driver.store([2]) == [Outcome.FAILED]
    assert driver.load([1]) == [Outcome.FAILED]
    driver.delete(1)
    assert wait_until(lambda: upload_tests(faulty) > 0 and faulty.count("POST") > 0)
    assert driver.tier.denials == {}


FOREIGN = {
    "a page": b"<?xml version='1.0'?><!DOCTYPE html>\n<html><body><Contents/>please log in</body></html>",
    "nothing": b"",
    "half a listing": b"<ListBucketResult><Name>kv-rights</Name></ListBucketResult>",
}


@pytest.mark.parametrize("answer", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.usefixtures("says_nothing_of_conditions")
def test_answer_that_is_no_listing_forgets_no_row(driver: TierDriver, faulty: FaultyS3, answer: bytes) -> None:
    driver.store([1, 2])
    faulty.fault = lambda request: answer if is_listing(request) else None
    driver.open_only(NAMESPACE, 0)
    listing = driver.tier.list_rows()
    assert wait_until(lambda: next(listing) == [] and "list" in driver.tier.denials)
    assert driver.tier.denials["list"].endswith(
        "listings get answers that are not S3's, perhaps a proxy's page: rows stored earlier, or by others, are not "
        "found"
    )
    faulty.fault = no_fault
    assert len(driver.open()) == 2
    assert wait_until(lambda: driver.tier.denials == {})


@pytest.mark.usefixtures("says_nothing_of_conditions")
def test_answer_that_is_no_delete_result_frees_no_space(driver: TierDriver, faulty: FaultyS3) -> None:
    driver.store([1])
    faulty.fault = lambda request: FOREIGN["a page"] if is_delete(request) else None
    driver.delete(1)
    assert wait_until(lambda: "perhaps a proxy's page: evicted rows stay" in driver.tier.denials.get("delete", ""))
    assert driver.tier.used_bytes == SMALL.row_bytes
    faulty.fault = no_fault
    assert driver.settled(0)
    assert set(faulty.objects) == set()


@pytest.mark.usefixtures("says_nothing_of_conditions")
def test_delete_that_is_answered_without_a_body_has_succeeded(driver: TierDriver, faulty: FaultyS3) -> None:
    """As some servers do in quiet mode."""

    def quiet(request: Request) -> bytes | None:
        if not is_delete(request):
            return None
        faulty.objects.clear()
        return b""

    driver.store([1])
    faulty.fault = quiet
    driver.delete(1)
    assert driver.settled(0)
    assert driver.tier.denials == {}


@pytest.mark.usefixtures("fast_janitor", "says_nothing_of_conditions")
def test_incomplete_answers_do_not_end_the_janitor(faulty: FaultyS3) -> None:
    """This one sends no Last-Modified."""
    faulty.tests_conditions = True
    with TierDriver(SMALL, 4, bucket="kv-rights", endpoint=faulty.endpoint, shared=True, times=SHORT) as driver:
        driver.open()
        assert wait_until(lambda: "shared prefix" in driver.tier.denials)
        asked = len(faulty.requests)
        assert wait_until(lambda: len(faulty.requests) > asked + 4)
        assert driver.store([1]) == [Outcome.NO_SPACE]


@pytest.mark.parametrize("kind", ["put", "get", "list"])
@pytest.mark.usefixtures("fast_janitor", "says_nothing_of_conditions")
def test_on_a_shared_prefix_the_janitor_finds_denials(faulty: FaultyS3, kind: str) -> None:
    """Nothing is ever uploaded by NIXL there, because there is no record of what the prefix holds."""
    faulty.tests_conditions = faulty.tells_times = True
    faulty.fault = denying(KINDS[kind])
    with TierDriver(SMALL, 4, bucket="kv-rights", endpoint=faulty.endpoint, shared=True, times=SHORT) as driver:
        driver.open_only(NAMESPACE, 0)
        assert wait_until(lambda: kind in driver.tier.denials)


@pytest.mark.parametrize(
    ("status", "code", "told"), [(400, "XMinioAdminBucketQuotaExceeded", True), (507, "XMinioStorageFull", False)]
)
@pytest.mark.usefixtures("fast_janitor", "says_nothing_of_conditions")
def test_full_server_has_a_name_for_its_quota_only(faulty: FaultyS3, status: int, code: str, told: bool) -> None:
    """As MinIO answers. Uploads of a shared prefix end with the usage record, which cannot be renewed either."""
    faulty.tests_conditions = faulty.tells_times = True
    with TierDriver(SMALL, 256, bucket="kv-rights", endpoint=faulty.endpoint, shared=True, times=SHORT) as driver:
        driver.open()
        assert wait_until(lambda: driver.store([1]) == [Outcome.OK])
        faulty.fault = denying(is_put, status, code)
        assert driver.store([2]) == [Outcome.FAILED]
        assert wait_until(lambda: driver.store([2]) == [Outcome.NO_SPACE])
        assert [f"uploads are denied ({code}; " in text for text in driver.tier.denials.values()] == [True] * told
        assert driver.load([1]) == [Outcome.OK]
