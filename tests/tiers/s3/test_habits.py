"""Servers that are not quite S3: listings that end early or repeat a name, deletes in one form only. Whoever lists and
deletes copes with them: sweeps, the delete queue, the commands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.tiers.s3 import stored
from tests.support.fake_movers import Clock
from tests.tiers.s3.stepped import ROW, Bucket, SteppedTier, install

CAPACITY_ROWS = 64  # so a window is one row


@pytest.fixture
def bucket(server_credentials: None, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(Clock(1_800_000_000.0))
    install(monkeypatch, bucket)
    return bucket


@pytest.fixture
def tier(bucket: Bucket) -> Iterator[SteppedTier]:
    """Its bucket was filled by others; it is to be opened."""
    tier = SteppedTier(bucket, capacity_rows=CAPACITY_ROWS)
    yield tier
    bucket.fault = lambda _: None
    tier.release()


def fill(tier: SteppedTier, rows: int) -> None:
    for number in range(rows):
        tier.bucket.clock.now += 1.0
        tier.bucket.put(tier.name(number), bytes(ROW))


@pytest.fixture
def command(tier: SteppedTier, monkeypatch: pytest.MonkeyPatch) -> Callable[[], stored.ObjectNamespace]:
    """The only namespace, as `inspect` and `purge` have it."""

    def find() -> stored.ObjectNamespace:
        monkeypatch.setattr(stored, "client_of", lambda *_, **__: tier.control.connection.client)
        (found,) = stored.find(tier.tier._config, None)
        return found

    return find


@pytest.mark.parametrize("repeats_name", [False, True])
@pytest.mark.parametrize("ends_early", [False, True])
class TestListings:
    @pytest.fixture(autouse=True)
    def _habits(self, bucket: Bucket, ends_early: bool, repeats_name: bool) -> None:
        bucket.page_names, bucket.ends_early, bucket.repeats_name = 50, ends_early, repeats_name

    def test_a_sweep_counts_each_row_once(self, tier: SteppedTier) -> None:
        """So the budget holds, and is used."""
        fill(tier, 400)
        tier.open()
        assert CAPACITY_ROWS - 2 <= len(tier.bucket.rows()) <= CAPACITY_ROWS - 1
        assert tier.tier.used_bytes == len(tier.bucket.rows()) * ROW
        assert tier.name(399) in tier.bucket.rows()
        tier.pass_time(60.0)
        assert tier.tier.denials == {}

    def test_the_writer_finds_all_movers(self, tier: SteppedTier, bucket: Bucket) -> None:
        """One that is not counted uploads nothing, for ever."""
        for number in range(120):
            bucket.put(f"p/.landed-{number:03}", b"7")
        tier.open()
        tier.pass_time(10.0)
        assert {f"{number:03}" for number in range(120)} <= tier.rows.upload_quota.record.counted.keys()

    def test_a_sweep_that_was_interrupted_goes_on_behind_its_last_row(self, tier: SteppedTier, bucket: Bucket) -> None:
        fill(tier, 60)
        tier.open()
        listings: list[object] = []

        def fail(request: Any) -> int | None:
            listings.extend([request] * request.is_listing)
            return 500 if request.is_listing and 3 <= len(listings) < 6 else None

        bucket.fault = fail
        tier.pass_time(60.0)
        assert tier.tier.used_bytes == len(bucket.rows()) * ROW == 60 * ROW

    def test_commands_count_and_purge_all(self, tier: SteppedTier, command: Callable[[], Any]) -> None:
        tier.open()
        fill(tier, 400)
        namespace = command()
        assert namespace.rows == 400
        namespace.delete(lambda _: None)
        assert not namespace.problem
        assert tier.bucket.rows() == set()


@pytest.mark.parametrize("form", ["Content-MD5", "one by one"])
class TestDeletes:
    @pytest.fixture(autouse=True)
    def _habits(self, bucket: Bucket, form: str) -> None:
        bucket.deletes = form

    def test_sweeps_and_the_queue_delete_and_try_no_form_twice(self, tier: SteppedTier, form: str) -> None:
        bucket = tier.bucket
        fill(tier, 100)
        tier.open()
        assert len(bucket.rows()) == CAPACITY_ROWS - 2
        assert bucket.count("POST") == 2
        bucket.put(tier.name(1), b"bad")
        deletes = bucket.count("DELETE")
        assert tier.load(1) == [Outcome.CORRUPT]
        tier.round()
        assert tier.name(1) not in bucket.rows()
        assert bucket.count("POST") == 3 - (form == "one by one")
        assert bucket.count("DELETE") == deletes + (form == "one by one")
        assert tier.tier.denials == {}, "no right is missing"

    def test_the_writer_keeps_the_record_while_it_finds_out(self, tier: SteppedTier) -> None:
        """Also where each delete takes its time."""
        bucket, renewed_s = tier.bucket, []
        fill(tier, 400)

        def slow(request: Any) -> None:
            bucket.clock.now += 0.1 * (request.method == "DELETE")
            renewed_s.extend([bucket.clock.now] * (request.name == "p/.usage" and request.method == "PUT"))

        bucket.fault = slow
        tier.open()
        assert len(bucket.rows()) == CAPACITY_ROWS - 2
        renewed_s.append(bucket.clock.now)
        assert max(after - before for before, after in itertools.pairwise(renewed_s)) < 20.0

    def test_what_is_denied_is_told(self, tier: SteppedTier, form: str) -> None:
        """Of one object, and of all: in the last form that was tried."""
        tier.open()
        for status, code in ((403, "AccessDenied"), (400, "ExpiredToken")):
            tier.bucket.put(tier.name(1), b"bad")
            tier.bucket.fault = lambda request: (status, code) if request.method in {"POST", "DELETE"} else None  # noqa: B023
            tier.load(1)
            tier.round()
            assert code in tier.tier.denials["delete"]
            assert tier.name(1) in tier.bucket.rows()
            tier.bucket.fault = lambda _: None
            tier.load(1)
            tier.round()
            assert tier.name(1) not in tier.bucket.rows(), "who meets it again tries again"

    def test_commands_delete(self, tier: SteppedTier, command: Callable[[], Any]) -> None:
        tier.open()
        fill(tier, 50)
        namespace = command()
        namespace.delete(lambda _: None)
        assert not namespace.problem
        assert tier.bucket.rows() == set()


class TestListingsThatKeepFailing:
    def test_those_of_sweeps_are_a_problem_after_the_third_time(self, tier: SteppedTier, bucket: Bucket) -> None:
        tier.open()
        bucket.clock.now += 40.0
        bucket.fault = lambda request: (500, "InternalError") if request.is_listing else None
        told = []
        for _ in range(4):
            bucket.clock.now += 5.0
            tier.budget_step()
            told.append("list" in tier.tier.denials)
        assert told == [False, False, True, True]
        assert "(InternalError): rows are not deleted" in tier.tier.denials["list"]
        bucket.fault = lambda _: None
        tier.pass_time(40.0)
        assert tier.tier.denials == {}
