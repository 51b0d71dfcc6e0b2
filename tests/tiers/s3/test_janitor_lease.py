"""Who is the janitor: of this release's engines, and of those of releases before this rule, on one prefix.

Each turn of a janitor's is a step of the test, over a bucket in memory, whose clock is everybody's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nixl_tiers.tiers.s3 import deletes
from nixl_tiers.tiers.s3 import lease as lease_module
from nixl_tiers.tiers.s3.answers import age_s
from nixl_tiers.tiers.s3.conditional import get_object, put_if, write_test_name
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.janitor import USAGE_NAME, Janitor, JanitorIntervals
from nixl_tiers.tiers.s3.lease import Lease
from nixl_tiers.tiers.s3.lease_state import JANITOR_TERMS, OWNER_TERMS, JanitorRecord, LeaseTerms, Record
from nixl_tiers.tiers.s3.usage import UploadQuota, Usage
from tests.tiers.s3.memory_bucket import LISTING, ROW, Bucket, row

NAME = JANITOR_TERMS.name
TURN_S = JANITOR_TERMS.renew_s
CAPACITY_ROWS, WINDOW_ROWS = 640, 10


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket()
    monkeypatch.setattr(lease_module, "lease_clock", lambda: made.now_s)
    return made


class Stop:
    """A janitor's, which passes the time that it waits for."""

    def __init__(self, bucket: Bucket, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.bucket, self.meanwhile = bucket, meanwhile

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self.bucket.now_s += seconds
        self.meanwhile()
        return False


def janitor(bucket: Bucket, name: str, meanwhile: Callable[[], None] = lambda: None) -> Janitor:
    quota = UploadQuota(name, CAPACITY_ROWS * ROW, ROW)
    made = Janitor(lambda: bucket, "b", "p", quota=quota, intervals=JanitorIntervals(), denials=Denials("the bucket"))
    made._stop = Stop(bucket, meanwhile)  # type: ignore[assignment]
    return made


class TestClaim:
    def test_a_janitor_lists_nothing_before_its_second_write(self, bucket: Bucket) -> None:
        one, began_s = janitor(bucket, "one"), bucket.now_s
        one.step()
        requests = [each for each in bucket.requests if each.endswith(NAME) or each == LISTING]
        assert requests == [f"GET {NAME}", f"PUT {NAME}", f"GET {NAME}", f"PUT {NAME}", LISTING]
        assert bucket.now_s == began_s + JANITOR_TERMS.confirm_s

    def test_it_is_none_if_another_ones_write_has_stayed(self, bucket: Bucket) -> None:
        one = janitor(bucket, "one", lambda: bucket.store(f"p/{NAME}", b"two 1"))
        one.step()
        assert not one.holds_lease
        assert bucket.count(LISTING) == 0

    @pytest.mark.parametrize("terms", [OWNER_TERMS, JANITOR_TERMS], ids=lambda terms: terms.name)
    def test_of_two_that_a_server_lets_through_at_once_one_holds_the_lease(
        self, bucket: Bucket, terms: LeaseTerms
    ) -> None:
        one, two = (
            Lease(lambda: bucket, "b", "p", name, Denials(name), lambda: bucket.now_s, terms) for name in ("one", "two")
        )
        for lease in (one, two):
            lease.step()

        def let_the_other_write(_: str) -> None:
            bucket.tested = lambda _: None
            two.step()

        bucket.tested = let_the_other_write
        one.step()
        for _ in range(10):
            bucket.now_s += 1.0
            two.step()
            one.step()
            assert not two.tenure()
        assert one.tenure()
        assert bucket.count(f"PUT {terms.name}") >= 3


def test_without_conditional_writes_there_is_no_janitor(bucket: Bucket) -> None:
    one, bucket.knows_conditions = janitor(bucket, "one"), False
    for _ in range(100):
        one.step()
        assert not one.holds_lease
        bucket.now_s += TURN_S
    written = {request for request in bucket.requests if request.startswith(("PUT", "DELETE"))}
    assert written == {f"PUT {write_test_name('one')}"}


class TestEndOfATenure:
    def test_a_listing_in_which_it_ends_goes_on_with_the_next(self, bucket: Bucket) -> None:
        one, bucket.page_names = janitor(bucket, "one"), 4
        for number in range(5):
            bucket.store(row(number))

        def takes_long(request: str) -> None:
            bucket.now_s += 21.0 if request == LISTING else 0.0

        bucket.before = takes_long
        one.step()
        assert not one.holds_lease
        assert bucket.count(LISTING) == 1
        assert f"p/{USAGE_NAME}" not in bucket.objects
        bucket.before = lambda _: None
        one.step()
        assert bucket.count(LISTING) == 2, "from the last row on"
        assert bucket.usage == Usage(5 * ROW, {"one": 0})

    def test_deletes_end_with_it(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deletes, "MAX_DELETES", 2)
        one = janitor(bucket, "one")
        for number in range(CAPACITY_ROWS):
            bucket.store(row(number))

        def takes_long(request: str) -> None:
            bucket.now_s += 21.0 if request == "DELETE rows" else 0.0

        bucket.before = takes_long
        one.step()
        assert bucket.count("DELETE rows") == 1
        bucket.before = lambda _: None
        one.step()
        assert len(bucket.rows) == CAPACITY_ROWS - 2 * WINDOW_ROWS

    @pytest.mark.parametrize("error", [KeyError("date"), ValueError(), RuntimeError()], ids=repr)
    def test_it_ends_with_an_error_that_is_not_understood(self, bucket: Bucket, error: Exception) -> None:
        def fail(request: str) -> None:
            if request == f"PUT {USAGE_NAME}":
                raise error

        one = janitor(bucket, "one")
        one.step()
        assert one.holds_lease
        bucket.before = fail
        one.step()
        assert not one.holds_lease


@dataclass
class OldJanitor:
    """How earlier releases held the lease: one conditional write makes a janitor, every turn renews it, and it is free
    30 s after its Last-Modified, by the Date of the same answer."""

    bucket: Bucket
    name: str
    etag: str | None = None
    turns: int = 0

    @property
    def holds_lease(self) -> bool:
        return self.etag is not None

    def step(self) -> None:
        self.turns += 1
        condition = {"IfMatch": self.etag} if self.etag is not None else self._condition()
        if condition is not None:
            self._put(f"{self.name} {self.turns}".encode(), condition)

    def release(self) -> None:
        assert self.etag is not None
        self._put(b"", {"IfMatch": self.etag})
        self.etag = None

    def _condition(self) -> dict[str, str] | None:
        found = get_object(self.bucket, "b", f"p/{NAME}")
        if found is None:
            return {"IfNoneMatch": "*"}
        holder = found["Body"].read().partition(b" ")[0].decode("ascii", "replace")
        return None if holder not in ("", self.name) and age_s(found) <= 30.0 else {"IfMatch": found["ETag"]}

    def _put(self, body: bytes, condition: dict[str, str]) -> None:
        answer = put_if(self.bucket, "b", f"p/{NAME}", body, condition)
        self.etag = None if answer is None else str(answer["ETag"])


MAKERS = {"old": OldJanitor, "new": janitor}


@pytest.mark.parametrize(("first", "second"), [("old", "new"), ("new", "old")])
class TestOldAndNewEngines:
    """As in a rolling upgrade, and back."""

    def passes(self, bucket: Bucket, seconds: float, *janitors: Janitor | OldJanitor) -> float | None:
        """Each has a turn every 5 s. After how long the last of them became the janitor; None: it did not."""
        began_s = bucket.now_s
        while bucket.now_s < began_s + seconds:
            bucket.now_s += TURN_S
            for each in janitors:
                each.step()
            assert sum(each.holds_lease for each in janitors) <= 1
            if janitors[-1].holds_lease:
                return bucket.now_s - began_s
        return None

    def test_one_that_lives_stays_the_janitor(self, bucket: Bucket, first: str, second: str) -> None:
        one, two = MAKERS[first](bucket, "one"), MAKERS[second](bucket, "two")
        assert self.passes(bucket, 600.0, one, two) is None
        assert one.holds_lease

    def test_one_that_dies_is_replaced_and_does_nothing_when_it_is_back(
        self, bucket: Bucket, first: str, second: str
    ) -> None:
        one, two = MAKERS[first](bucket, "one"), MAKERS[second](bucket, "two")
        self.passes(bucket, 60.0, one, two)
        assert one.holds_lease
        after_s = self.passes(bucket, 60.0, two)
        assert after_s is not None
        assert 30.0 <= after_s <= 36.0
        listings = bucket.count(LISTING)
        assert first == "old" or not one.holds_lease, "its time was over before"
        one.step()
        assert not one.holds_lease
        assert bucket.count(LISTING) == listings
        assert self.passes(bucket, 600.0, two, one) is None
        assert two.holds_lease

    def test_one_that_ends_hands_the_lease_over(self, bucket: Bucket, first: str, second: str) -> None:
        one, two = MAKERS[first](bucket, "one"), MAKERS[second](bucket, "two")
        self.passes(bucket, 60.0, one, two)
        one._lease.release() if isinstance(one, Janitor) else one.release()
        assert bucket.small(NAME) == b""
        after_s = self.passes(bucket, 60.0, two)
        assert after_s is not None
        assert after_s <= TURN_S + JANITOR_TERMS.confirm_s


def test_records_of_earlier_releases_are_understood_and_theirs_understand_ours() -> None:
    old = b'{"engine": "host/7/ab", "since": 12.5, "lease": 60.0, "write": "0011223344556677"}'
    assert Record.decode(old) == Record("host/7/ab", 12.5, 60.0)
    found = json.loads(Record("host/7/ab", 12.5, 60.0).encode())
    assert len(found.pop("write")) == 16
    assert found == {"engine": "host/7/ab", "since": 12.5, "lease": 60.0}
    assert JanitorRecord.decode(b"ab12 7").engine == "ab12"
    assert JanitorRecord.decode(b"").engine == JanitorRecord("", 0.0, 0.0).encode().decode() == ""
    name, turn = JanitorRecord("ab12", 0.0, 0.0).encode().split(b" ")
    assert (name, turn.isdigit()) == (b"ab12", True)


def test_terms() -> None:
    """An owner of an earlier release relies on these; docs/internals/s3-tier.md."""
    owner, ours = OWNER_TERMS, JANITOR_TERMS
    assert (owner.renew_s, owner.lease_s - owner.margin_s, owner.lease_s, owner.name) == (15.0, 40.0, 60.0, ".owner")
    assert (ours.renew_s, ours.lease_s - ours.margin_s, ours.lease_s, ours.name) == (5.0, 20.0, 30.0, ".janitor")
    assert JanitorIntervals().renew_s == ours.renew_s
    assert JanitorIntervals().usage_timeout_s >= ours.lease_s + 4 * ours.renew_s, "time for the next one's first sweep"
