"""Denials: found out, reported in one sentence for each kind of request, and cleared when they are over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.s3.budget import COUNTER_NAME
from tests.system.tiers.s3.harness import Fault, FaultyS3, Request, TierDriver, but, is_listing, wait_until

SMALL = Geometry(cells=1, cell_payload=64 << 10)
SHORT = but(s3_denial_s=0.05)

pytestmark = pytest.mark.usefixtures("server_credentials", "fast_budget")


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


def counters(server: FaultyS3) -> int:
    return sum(request.method == "PUT" and COUNTER_NAME in request.name for request in server.requests)


@pytest.fixture
def driver(faulty: FaultyS3) -> Iterator[TierDriver]:
    with TierDriver(SMALL, 32, bucket="kv-rights", endpoint=faulty.endpoint, times=SHORT) as driver:
        driver.open_ready()
        yield driver


FOREIGN = {
    "a page": b"<?xml version='1.0'?><!DOCTYPE html>\n<html><body><Contents/>please log in</body></html>",
    "nothing": b"",
    "half a listing": b"<ListBucketResult><Name>kv-rights</Name></ListBucketResult>",
}


@pytest.mark.parametrize("kind", ["put", "get", "list"])
def test_denials_are_found_though_nothing_is_uploaded(faulty: FaultyS3, kind: str) -> None:
    """Nothing is ever uploaded by NIXL there, because there is no record of what the prefix holds."""
    faulty.fault = denying(KINDS[kind])
    with TierDriver(SMALL, 4, bucket="kv-rights", endpoint=faulty.endpoint, times=SHORT) as driver:
        driver.open()
        assert wait_until(lambda: kind in driver.tier.denials)


@pytest.mark.parametrize(
    ("status", "code", "told"), [(400, "XMinioAdminBucketQuotaExceeded", True), (507, "XMinioStorageFull", False)]
)
def test_full_server_has_a_name_for_its_quota_only(faulty: FaultyS3, status: int, code: str, told: bool) -> None:
    """As MinIO answers."""
    with TierDriver(SMALL, 256, bucket="kv-rights", endpoint=faulty.endpoint, times=SHORT) as driver:
        driver.open()
        assert wait_until(lambda: driver.store([1]) == [Outcome.OK])
        faulty.fault = denying(is_put, status, code)
        before = counters(faulty)
        assert driver.store([2]) == [Outcome.FAILED]
        sentence = f"uploads are denied ({code}; "
        assert wait_until(lambda: counters(faulty) > before)
        assert wait_until(lambda: any(sentence in text for text in driver.tier.denials.values()) == told)
        assert driver.load([1]) == [Outcome.OK]


@pytest.mark.parametrize(("answer", "denied"), [(b"", False), (b"<html>please log in</html>", True)])
def test_delete_of_a_bad_row_that_is_answered_without_a_body_has_succeeded(
    driver: TierDriver, faulty: FaultyS3, answer: bytes, denied: bool
) -> None:
    """As some servers do in quiet mode. A page has not."""
    faulty.objects[driver.name(1)] = b"bad"
    faulty.fault = lambda request: answer if is_delete(request) else None
    assert driver.load([1]) == [Outcome.CORRUPT]
    assert wait_until(lambda: faulty.count("POST") > 0)
    assert wait_until(lambda: ("perhaps a proxy's page" in driver.tier.denials.get("delete", "")) == denied)
    faulty.fault = no_fault
    assert driver.load([1]) == [Outcome.CORRUPT]
    assert wait_until(lambda: driver.tier.denials == {})
