"""What a server denies: it is found out, told in a sentence for each kind of request, and forgotten when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import boto3
import pytest

from nixl_tiers.chunk import Geometry, Outcome
from nixl_tiers.tiers.s3 import control, denials
from nixl_tiers.tiers.s3.denials import Denials
from tests.tiers.s3.objects import NAMESPACE, Driver, Fault, FaultyS3, Request, is_listing, wait_until

SMALL = Geometry(cells=1, cell_payload=64 << 10)
PROBE = "nixl-tiers/.probe"
SECRET_PAGE = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"

pytestmark = pytest.mark.usefixtures("object_credentials")


def is_put(request: Request) -> bool:
    return request.method == "PUT"


def is_get(request: Request) -> bool:
    return request.method == "GET" and request.name != ""


def is_delete(request: Request) -> bool:
    return request.method == "POST"


KINDS = {"put": is_put, "get": is_get, "delete": is_delete, "list": is_listing}


def denying(meant: Callable[[Request], bool], status: int = 403, code: str = "AccessDenied") -> Fault:
    return lambda request: (status, code) if meant(request) else None


def work(_: Request) -> None:
    """No fault."""


def probes(server: FaultyS3) -> int:
    return sum(request.method == "PUT" and request.name == PROBE for request in server.requests)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CHECK_S", 0.05)
    monkeypatch.setattr(control, "BACKOFF_S", (0.05, 0.1))
    monkeypatch.setattr(denials, "CALM_S", 0.05)


@pytest.fixture
def driver(faulty: FaultyS3) -> Iterator[Driver]:
    with Driver(SMALL, 32, bucket="kv-rights", endpoint=faulty.endpoint) as driver:
        driver.open()
        yield driver


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("soon")
def test_each_kind_is_told_with_its_right_and_heals(driver: Driver, faulty: FaultyS3, kind: str) -> None:
    assert driver.store([1, 2]) == [Outcome.OK] * 2
    assert driver.tier.denials == {}
    faulty.fault = denying(KINDS[kind])
    driver.tier.open(NAMESPACE, 0)
    listing = driver.tier.list_rows()
    driver.drop(2)

    def told() -> bool:
        driver.store([3])
        driver.load([1])
        next(listing, None)
        return kind in driver.tier.denials

    assert wait_until(told)
    right = {"put": "PutObject", "get": "GetObject", "delete": "DeleteObject", "list": "ListBucket"}[kind]
    sentence = driver.tier.denials[kind]
    assert sentence.startswith(f's3 bucket "kv-rights" at {faulty.endpoint}: ')
    assert f"denied (AccessDenied; the right is s3:{right})" in sentence
    assert set(driver.tier.denials) == {kind}
    faulty.fault = work
    driver.open()

    def forgotten() -> bool:
        driver.store([4])
        driver.load([4])
        return driver.tier.denials == {}

    assert wait_until(forgotten)


@pytest.mark.usefixtures("soon")
def test_uploads_are_asked_for_until_they_are_allowed(driver: Driver, faulty: FaultyS3) -> None:
    """Also where nothing more is stored."""
    faulty.fault = denying(is_put)
    assert driver.store([1]) == [Outcome.FAILED]
    assert wait_until(lambda: "put" in driver.tier.denials)
    faulty.fault = work
    assert wait_until(lambda: driver.tier.denials == {})


@pytest.mark.usefixtures("soon")
def test_a_delete_that_is_denied_for_one_object(driver: Driver, faulty: FaultyS3) -> None:
    """The answer as a whole is 200 then."""
    driver.store([1])
    error = f"<Error><Key>{driver.name(1)}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
    answer = f"<DeleteResult>{error}</DeleteResult>".encode()
    faulty.fault = lambda request: answer if is_delete(request) else None
    driver.drop(1)
    assert wait_until(lambda: "AccessDenied" in driver.tier.denials.get("delete", ""))
    faulty.fault = work
    assert wait_until(lambda: driver.tier.denials == {})
    assert driver.settled(0)


def test_why_uploads_fail_is_asked_once_a_minute(driver: Driver, faulty: FaultyS3) -> None:
    faulty.fault = denying(is_put)
    for number in range(8):
        assert driver.store([number]) == [Outcome.FAILED]
    assert wait_until(lambda: "put" in driver.tier.denials)
    assert driver.store([8]) == [Outcome.FAILED]
    driver.drop(8)
    assert driver.settled(0), "the control thread has had its turn"
    assert probes(faulty) == 1


@pytest.mark.usefixtures("soon")
def test_the_probe_is_one_object_that_is_no_row(driver: Driver, faulty: FaultyS3) -> None:
    faulty.fault = lambda request: 503 if is_put(request) and request.name != PROBE else None
    for number in range(4):
        assert driver.store([number]) == [Outcome.FAILED]
        assert wait_until(lambda number=number: probes(faulty) > number)
    assert driver.tier.denials == {}, "small objects may be written"
    faulty.fault = work
    assert driver.settled(0)
    assert set(faulty.objects) == {PROBE}
    assert driver.open() == []
    assert driver.tier.used_bytes == 0


def test_a_tier_that_only_reads_never_asks_for_uploads(faulty: FaultyS3) -> None:
    with Driver(SMALL, 4, bucket="kv-rights", endpoint=faulty.endpoint, write="off") as driver:
        driver.open()
        faulty.fault = denying(is_get)
        driver.load([1])
        driver.drop(1)
        assert wait_until(lambda: set(driver.tier.denials) == {"get"})
    assert faulty.count("PUT") == faulty.count("POST") == 0


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.usefixtures("soon")
def test_a_server_that_is_busy_denies_nothing(driver: Driver, faulty: FaultyS3, status: int) -> None:
    driver.store([1])
    faulty.fault = lambda request: None if request.method == "HEAD" else (status, "SlowDown")
    assert driver.store([2]) == [Outcome.FAILED]
    assert driver.load([1]) == [Outcome.FAILED]
    driver.drop(1)
    assert wait_until(lambda: probes(faulty) > 0 and faulty.count("POST") > 0)
    assert driver.tier.denials == {}


def knows_conditions(request: Request, count: list[int]) -> tuple[int, str] | None:
    """What a server that knows conditions does with the janitor's three probes."""
    if request.name != PROBE:
        return None
    count[0] += 1
    return None if count[0] % 3 == 1 else (412, "PreconditionFailed")


@pytest.mark.usefixtures("brisk", "soon")
def test_a_server_whose_answers_lack_something_does_not_end_the_janitor(faulty: FaultyS3) -> None:
    """This one sends no ETag."""
    count = [0]
    faulty.fault = lambda request: knows_conditions(request, count)
    with Driver(SMALL, 4, bucket="kv-rights", endpoint=faulty.endpoint, shared=True) as driver:
        driver.open()
        assert wait_until(lambda: "shared prefix" in driver.tier.denials)
        asked = len(faulty.requests)
        assert wait_until(lambda: len(faulty.requests) > asked + 4)
        assert driver.store([1]) == [Outcome.NO_SPACE]


@pytest.mark.parametrize("kind", ["put", "get", "list"])
@pytest.mark.usefixtures("brisk", "soon")
def test_on_a_shared_prefix_the_janitor_hears_of_it(faulty: FaultyS3, kind: str) -> None:
    """Nothing is ever uploaded by NIXL there, because there is no record of what the prefix holds."""
    count = [0]
    denied = denying(KINDS[kind])
    faulty.fault = lambda request: denied(request) or knows_conditions(request, count)
    with Driver(SMALL, 4, bucket="kv-rights", endpoint=faulty.endpoint, shared=True) as driver:
        driver.tier.open(NAMESPACE, 0)
        assert wait_until(lambda: kind in driver.tier.denials)


class TestDenials:
    @pytest.fixture
    def clock(self) -> list[float]:
        return [100.0]

    @pytest.fixture
    def book(self, clock: list[float]) -> Denials:
        return Denials("here", lambda: clock[0])

    def test_success_counts_when_nothing_was_denied_for_a_while(self, book: Denials, clock: list[float]) -> None:
        """A server that denies every other request would be news again and again."""
        for _ in range(20):
            book.denied("put", "AccessDenied")
            clock[0] += 1
            book.worked("put")
            assert set(book.current()) == {"put"}
        clock[0] += denials.CALM_S
        assert book.current() == {}

    def test_a_failure_of_unknown_cause_prolongs_what_is_known(self, book: Denials, clock: list[float]) -> None:
        book.failed("put")
        assert book.current() == {}
        book.denied("put", "AccessDenied")
        clock[0] += 3600
        book.failed("put")
        book.worked("get")
        assert set(book.current()) == {"put"}

    def test_what_a_server_says_is_shown_as_a_code_at_most(self, book: Denials) -> None:
        book.denied("put", "Access\nDenied " + 1000 * "x")
        sentence = book.current()["put"]
        assert "\n" not in sentence
        assert len(sentence) < 200

    def test_a_page_counts_only_with_a_code_of_denial(self, book: Denials) -> None:
        for page in (b"", b"\x00<Code>", b"<Code>NoSuchKey</Code>", b"<Code>SlowDown</Code>"):
            book.page("get", page)
        assert book.current() == {}
        book.page("get", SECRET_PAGE)
        assert set(book.current()) == {"get"}

    def test_botocore_still_calls_it_as_it_did(self, book: Denials) -> None:
        """The event is one of botocore's documented ones; its arguments are what this counts on."""
        client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
        book.watch(client)
        logging.getLogger("botocore.hooks").setLevel(logging.WARNING)

        class Response:
            status_code = 403

        client.meta.events.emit(
            "after-call.s3.PutObject",
            http_response=Response(),
            parsed={"Error": {"Code": "AccessDenied"}},
            model=None,
            context={},
        )
        assert set(book.current()) == {"put"}
