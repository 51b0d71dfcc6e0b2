"""A shared bucket that lies, denies, is late or away: what becomes of a row, what is told, and what is asked again.

The tier is the real one, with boto3's real clients; the bucket is in memory (stepped.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.tiers.base import ExistenceAnswer, Move, TierDown, TierRefused
from nixl_tiers.tiers.s3 import tier as tier_module
from nixl_tiers.tiers.s3.client import Credentials
from nixl_tiers.tiers.s3.concurrency import FIRST
from nixl_tiers.tiers.s3.data import SLOWEST_BYTES_PER_S
from nixl_tiers.tiers.s3.record import Record
from tests.support.times import changed
from tests.tiers.s3.stepped import (
    GEOMETRY,
    NAMESPACE,
    OTHER_NAMESPACE,
    ROW,
    UNREACHABLE,
    Bucket,
    Fault,
    Request,
    SteppedTier,
    key_of,
)
from tests.tiers.s3.test_compat import stored_before

OK, CORRUPT, MISSING = Outcome.OK, Outcome.CORRUPT, Outcome.MISSING
FAILED, NO_SPACE = Outcome.FAILED, Outcome.NO_SPACE


@pytest.fixture
def tier(make_tier: Callable[..., SteppedTier]) -> SteppedTier:
    """Open, with a usage record that grants uploads."""
    tier = make_tier()
    tier.open()
    assert tier.store(0) == [OK], "in one step, as nothing is in the way"
    return tier


def get(request: Request) -> bool:
    return request.method == "GET" and request.by_nixl


class TestBatchesAboveAWindow:
    """A window is two rows here."""

    @pytest.fixture
    def writer(self, make_tier: Callable[..., SteppedTier]) -> SteppedTier:
        tier = make_tier(capacity_rows=128)
        tier.open()
        return tier

    def test_the_writer_of_the_record_stores_all_of_one(self, writer: SteppedTier) -> None:
        batch = writer.begin_store(*range(8))
        for _ in range(8):
            writer.round()
            writer.round()
            writer.clock.now += 1.0
            writer.budget_step()
        assert writer.finished[batch] == [OK] * 8

    def test_if_that_is_not_counted_the_rest_has_no_room(self, writer: SteppedTier, bucket: Bucket) -> None:
        bucket.fault = lambda request: 503 if request.name.endswith(".usage") else None
        batch = writer.begin_store(*range(4))
        for seconds in (0.0, 0.0, PRODUCTION.s3_ready_s - 0.1):
            writer.clock.now += seconds
            writer.round()
            writer.budget_step()
            assert batch not in writer.finished
        writer.clock.now += 0.2
        writer.round()
        assert writer.finished[batch] == [OK] * 2 + [NO_SPACE] * 2


def test_no_more_transfers_run_than_are_allowed_and_measured(
    make_tier: Callable[..., SteppedTier], bucket: Bucket
) -> None:
    tier = make_tier(capacity_rows=4000)  # a window is 62 rows
    tier.open()
    for begin, limit in ((tier.tier.load, tier.tier._downloads), (tier.tier.store, tier.tier._uploads)):
        for most in (FIRST, 3):
            limit._limit = most
            batch = begin(tier.moves(range(24), seal=True))
            for _ in range(3):
                tier.round(moves=False)
                assert len(bucket.on_their_way) == most
            tier.end(batch)
            tier.pass_time(5.0)


class TestRowsThatAreNotTheExpectedOnes:
    """Bytes are a hit only after their seal is verified."""

    @pytest.fixture(params=["flipped bit", "other key", "other namespace", "other epoch", "cut", "longer", "no seal"])
    def damaged(self, request: pytest.FixtureRequest, tier: SteppedTier) -> bytes:
        body = tier.sealed(1)
        match request.param:
            case "flipped bit":
                body[1234] ^= 4
            case "other key":
                body = tier.sealed(2)
            case "other namespace":
                body = tier.sealed(1, OTHER_NAMESPACE)
            case "other epoch":
                body = tier.sealed(1, epoch=7)
            case "cut":
                del body[ROW // 2 :]
            case "longer":
                body[:0] = bytes(512)
            case "no seal":
                body[-512:] = bytes(512)
        return bytes(body)

    def test_one_is_corrupt_deleted_and_written_again(self, tier: SteppedTier, bucket: Bucket, damaged: bytes) -> None:
        bucket.put(tier.name(1), damaged)
        assert tier.load(1, 0) == [CORRUPT, OK]
        tier.round()
        assert bucket.rows() == {tier.name(0)}, "nobody else is to load it"
        questions = bucket.count("HEAD")
        assert tier.store(1) == [OK]
        assert bucket.count("HEAD") == questions, "it is known to be gone"
        assert tier.load(1) == [OK]

    def test_one_is_loaded_twice_before_it_is_deleted(self, tier: SteppedTier, bucket: Bucket, damaged: bytes) -> None:
        """What is damaged on its way may be good the next time."""
        good = bytes(tier.sealed(1))
        bucket.put(tier.name(1), good)
        bodies = [damaged, good]

        def once(request: Request) -> Fault:
            if get(request) and request.name == tier.name(1):
                bucket.objects[request.name] = (bodies.pop(0), bucket.clock.now)
            return None

        bucket.fault = once
        assert tier.load(1) == [OK]
        tier.round()
        assert tier.name(1) in bucket.objects

    def test_a_reader_deletes_none(self, make_tier: Callable[..., SteppedTier], bucket: Bucket) -> None:
        reader = make_tier(write="off")
        reader.tier.open(NAMESPACE, 0)
        bucket.put(reader.name(1), b"nothing")
        assert reader.load(1) == [CORRUPT]
        reader.pass_time(40.0)
        assert reader.name(1) in bucket.objects
        assert not any(request.is_listing for request in bucket.requests)
        assert not any(request.method in {"PUT", "POST", "DELETE"} for request in bucket.requests)

    @pytest.mark.parametrize("ahead_s", [0.0, 7200.0, -7200.0])
    def test_a_row_that_is_too_old_is_a_miss_and_deleted(
        self, make_tier: Callable[..., SteppedTier], bucket: Bucket, monkeypatch: pytest.MonkeyPatch, ahead_s: float
    ) -> None:
        """By the server's clock. Who has another one stores none that seems too old."""
        tier = make_tier(max_age=600)
        tier.open()
        now_s = int(bucket.clock.now)
        own = SimpleNamespace(monotonic=bucket.clock, time=lambda: bucket.clock.now + ahead_s)
        monkeypatch.setattr(tier_module, "time", own)
        for number, age_s in ((1, 700), (2, 500)):
            bucket.put(tier.name(number), bytes(tier.sealed(number, sealed_at=now_s - age_s)))
        assert tier.load(1, 2) == [MISSING, OK]
        assert tier.store(3) == [OK]
        assert tier.load(3) == [OK]
        tier.round()
        assert bucket.rows() == {tier.name(2), tier.name(3)}

    def test_an_error_page_is_retried_once_and_is_neither_a_row_nor_its_absence(
        self, tier: SteppedTier, bucket: Bucket
    ) -> None:
        bucket.fault = lambda request: (503, "SlowDown") if get(request) else None
        assert tier.load(0) == [FAILED]
        assert sum(map(get, bucket.requests)) == 2
        assert tier.name(0) in bucket.objects
        bucket.fault = lambda _: None
        assert tier.load(0) == [OK]

    def test_an_old_error_page_is_not_taken_for_an_answer(self, tier: SteppedTier, bucket: Bucket) -> None:
        tier.load(1)  # its page stays in the staging row
        bucket.fault = lambda request: 500 if get(request) else None
        assert tier.load(0) == [FAILED]

    @pytest.mark.parametrize("typical_s", [0.05, 1.5, 60.0])
    def test_one_that_takes_far_longer_than_others_is_given_up_sooner(
        self, tier: SteppedTier, bucket: Bucket, typical_s: float
    ) -> None:
        """The row of host memory that waits for it is one of few, perhaps."""
        tier.tier._downloads.typical_s = typical_s
        batch = tier.tier.load(tier.moves([0]))
        longest_s = PRODUCTION.s3_download_s + ROW / SLOWEST_BYTES_PER_S
        given_up_s = min(longest_s, max(PRODUCTION.late_job_s, 8 * typical_s))
        for late_s in (-0.1, 0.2):
            bucket.clock.now += (given_up_s if late_s < 0 else 0.0) + late_s
            for _ in range(2):
                tier.round(moves=False)
            assert tier.finished.get(batch) == ([FAILED] if late_s > 0 else None)

    def test_bursts_that_take_longer_than_single_downloads_do_not_fail_for_ever(
        self, tier: SteppedTier, bucket: Bucket
    ) -> None:
        numbers = list(range(8))
        tier.tier._downloads.typical_s = 0.4
        tier.store(*numbers)
        outcomes = []
        for _ in range(2):
            batch = tier.tier.load(tier.moves(numbers))
            bucket.clock.now += 5.5
            for _ in range(2):
                tier.round(moves=False)
            outcomes.append(tier.end(batch))
        assert outcomes == [[FAILED] * 8, [OK] * 8]

    def test_a_download_that_does_not_end_is_given_up_and_its_row_is_used_again_when_it_has(
        self, tier: SteppedTier, bucket: Bucket
    ) -> None:
        """Its bytes may still land there."""
        batch = tier.tier.load(tier.moves([0]))
        free = len(tier.tier._data.free_staging)
        bucket.clock.now += PRODUCTION.s3_download_s + ROW / SLOWEST_BYTES_PER_S + 0.1
        tier.round(moves=False)
        tier.round(moves=False)
        assert tier.finished[batch] == [FAILED]
        assert len(tier.tier._data.free_staging) == free
        assert tier.tier.busy
        bucket.move()
        tier.round()
        assert len(tier.tier._data.free_staging) == free + 1
        assert not tier.tier.busy


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_rows_of_an_earlier_version_are_loaded_and_none_is_deleted(
    make_tier: Callable[..., SteppedTier], bucket: Bucket, kind: str
) -> None:
    """Of its only engine, or shared: there is one kind now."""
    for name, body in stored_before(f"{kind}-closed").items():
        bucket.put(name, body)
    before = bucket.rows()
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        tier = make_tier(rows=32)
        tier.open(namespace)
        batch = tier.tier.load([Move(number, number, b"key-%08d" % number, number) for number in range(12)])
        assert tier.end(batch) == [OK] * 12
        assert all((tier.region.rows_view[number][: GEOMETRY.cell_payload] == number + 1).all() for number in range(12))
        tier.pass_time(60.0)
    assert bucket.rows() == before


def test_a_download_that_drips_over_their_change_holds_up_nothing(
    make_tier: Callable[..., SteppedTier], bucket: Bucket
) -> None:
    """Those of a role change every hour."""
    tier = make_tier(times=changed(stores_held_s=0.0))
    tier.open()
    assert tier.store(0, 1, 2) == [OK] * 3
    slow = tier.tier.load(tier.moves([0]))
    dripping = bucket.on_their_way.pop()
    (first, _) = made_with(tier)
    for number in range(3):
        tier.control.connection.credentials = Credentials(f"key-{number}", "secret")
        assert tier.load(1, 2) == [OK, OK]
        assert tier.store(10 + number) == [OK]
        assert made_with(tier) == [first] + [f"key-{number}"] * 2, "one agent for each direction, and its own"
    dripping.end()
    assert tier.end(slow) == [OK], "it goes on"
    tier.round()
    assert made_with(tier) == ["key-2"] * 2, "the old ones end with what they had begun"
    assert not tier.tier.busy


def made_with(tier: SteppedTier) -> list[str]:
    """The access keys of the agents that there are."""
    return [each.access_key for each in tier.bucket.agents if each.memory]


class TestQuestions:
    @pytest.mark.parametrize(
        ("fault", "absent"),
        [((404, "NoSuchKey"), True), ((403, "AccessDenied"), False), (500, False), (503, False), (UNREACHABLE, False)],
    )
    def test_only_an_answer_that_a_row_is_not_there_says_so(
        self, tier: SteppedTier, bucket: Bucket, fault: Fault, absent: bool
    ) -> None:
        bucket.fault = lambda request: fault if request.method == "HEAD" else None
        tier.ask(0)
        tier.round()
        assert tier.tier.existence_answers() == [ExistenceAnswer(1, [key_of(0)] if absent else [])]
        assert tier.tier.found() == []

    def test_a_row_of_another_size_or_age_is_absent(
        self, make_tier: Callable[..., SteppedTier], bucket: Bucket
    ) -> None:
        tier = make_tier(max_age=600)
        tier.open()
        bucket.put(tier.name(1), bytes(ROW - 1))
        bucket.put(tier.name(2), bytes(ROW))
        bucket.clock.now += 601.0
        bucket.put(tier.name(3), bytes(ROW))
        tier.ask(1, 2, 3)
        tier.round()
        assert tier.tier.existence_answers() == [ExistenceAnswer(1, [key_of(1), key_of(2)])]

    def test_rows_of_others_are_found_with_when_they_were_written(self, tier: SteppedTier, bucket: Bucket) -> None:
        bucket.put(tier.name(1), bytes(tier.sealed(1)))
        written_s = int(bucket.clock.now)
        bucket.clock.now += 50.0
        tier.found.clear()
        tier.ask(1)
        tier.round()
        tier.tier.existence_answers()
        assert [(entry.key, entry.tick) for entry in tier.tier.found()] == [(key_of(1), written_s)]
        assert tier.load(1) == [OK]

    def test_after_a_reset_none_of_before_is_answered(self, tier: SteppedTier) -> None:
        tier.ask(0)
        tier.tier.open(OTHER_NAMESPACE, 0)
        tier.round()
        assert tier.tier.existence_answers() == []
        assert tier.tier.found() == []

    def test_one_that_stores_alone_asks_nothing_before_uploads(self, tier: SteppedTier, bucket: Bucket) -> None:
        """A question costs as much as an upload of 64 KiB. Rows that are there are found by what requests ask."""
        for rows in range(2):  # as one that was killed, and is counted once more
            tier.other_has_stored(rows)
        assert tier.store(1, 2) == [OK, OK]
        assert bucket.count("HEAD") == 1, "of the bucket"

    def test_a_row_that_is_there_is_not_uploaded(self, tier: SteppedTier, bucket: Bucket) -> None:
        for rows in range(3):
            tier.other_has_stored(rows)
        bucket.put(tier.name(1), bytes(tier.sealed(1)))
        uploads = bucket.count("PUT")
        assert tier.store(1) == [Outcome.FOUND]
        assert bucket.count("PUT") == uploads

    def test_an_upload_that_may_have_arrived_is_found(self, tier: SteppedTier, bucket: Bucket) -> None:
        for rows in range(3):
            tier.other_has_stored(rows)
        batch = tier.begin_store(1)
        tier.round(moves=False)
        (upload,) = bucket.on_their_way
        bucket.put(upload.name, bytes(tier.sealed(1)))
        bucket.fault = lambda request: 504 if request.by_nixl else None
        assert tier.end(batch) == [FAILED]
        bucket.fault = lambda _: None
        assert tier.store(1) == [Outcome.FOUND]


KINDS: dict[str, tuple[Callable[[Request], bool], str]] = {
    "put": (lambda request: request.method == "PUT", "s3:PutObject"),
    "get": (lambda request: request.method == "GET" and bool(request.name), "s3:GetObject"),
    "head": (lambda request: request.method == "HEAD" and bool(request.name), "s3:GetObject"),
    "delete": (lambda request: request.method == "POST", "s3:DeleteObject"),
    "list": (lambda request: request.is_listing, "s3:ListBucket"),
}


class TestDenials:
    @pytest.mark.parametrize("kind", KINDS)
    def test_each_kind_is_told_with_its_right_and_cleared_when_it_is_allowed_again(
        self, tier: SteppedTier, bucket: Bucket, kind: str
    ) -> None:
        matches, right = KINDS[kind]
        numbers = itertools.count(2)

        def use() -> dict[str, str]:
            """Every kind of request; what is told then, but for what follows from it."""
            bucket.put(tier.name(1), b"of another size")
            tier.load(0, 1)
            tier.store(next(numbers))
            tier.ask(next(numbers))
            tier.pass_time(120.0)
            return {kind: text for kind, text in tier.tier.denials.items() if kind != "unreachable"}

        assert use() == {}
        bucket.fault = lambda request: (403, "AccessDenied") if matches(request) else None
        told = use()
        assert set(told) == {kind}
        assert f"; the right is {right}" in told[kind]
        bucket.fault = lambda _: None
        assert use() == {}
        assert tier.tier.denials == {}
        assert tier.store(next(numbers)) == [OK]

    @pytest.mark.parametrize("status", [408, 409, 429, 500, 503, 507])
    def test_errors_of_a_busy_server_are_none(self, tier: SteppedTier, bucket: Bucket, status: int) -> None:
        bucket.fault = lambda request: (status, "SlowDown")
        tier.load(0)
        tier.store(2)
        tier.ask(3)
        tier.pass_time(40.0)
        assert tier.tier.denials == {}

    def test_a_page_that_is_not_s3s_is_told_and_counts_nothing(self, tier: SteppedTier, bucket: Bucket) -> None:
        before = tier.tier.used_bytes
        bucket.fault = lambda request: b"<html><body>Sign in</body></html>" if request.is_listing else None
        bucket.clock.now += 40.0
        tier.budget_step()
        assert "not S3's" in tier.tier.denials["list"]
        assert tier.tier.used_bytes == before == 0

    @pytest.mark.parametrize(("answer", "denied"), [(b"", False), (b"<html>please log in</html>", True)])
    def test_a_delete_that_is_answered_without_a_body_has_succeeded(
        self, tier: SteppedTier, bucket: Bucket, answer: bytes, denied: bool
    ) -> None:
        """As some servers do in quiet mode. A page has not."""
        bucket.put(tier.name(1), b"bad")
        bucket.fault = lambda request: answer if request.method == "POST" else None
        assert tier.load(1) == [CORRUPT]
        tier.round()
        assert ("perhaps a proxy's page" in tier.tier.denials.get("delete", "")) == denied

    def test_why_uploads_fail_is_learned_from_the_counter(self, tier: SteppedTier, bucket: Bucket) -> None:
        """NIXL does not say why. It is written until one has come through, though it has not changed."""
        bucket.fault = lambda request: (403, "QuotaExceeded") if request.method == "PUT" else None
        assert tier.store(2) == [FAILED]
        assert "put" not in tier.tier.denials
        tier.pass_time(5.0)
        assert "QuotaExceeded" in tier.tier.denials["put"]
        bucket.fault = lambda _: None
        tier.pass_time(11.0)
        assert tier.tier.denials == {}


class TestWhatOthersDelete:
    def test_what_may_be_deleted_next_is_not_promised(self, tier: SteppedTier) -> None:
        assert tier.tier.gone_before == 0
        quota, now_s = tier.rows.upload_quota, int(tier.clock.now)
        for age_s, margin_s in ((6400, 200), (10, 0), (-100, 0)):
            quota.refresh(Record(quota.capacity_bytes, {}, now_s - age_s))
            assert tier.tier.gone_before == now_s - age_s + margin_s
        room = quota.capacity_bytes - 2 * quota.window_bytes  # for the one that stores, and what must stay free
        for nbytes, early in ((room, False), (room + 1, True)):
            for stored in (1, 2):
                quota.refresh(Record(nbytes, {"one": stored, "two": 1}, now_s - 6400))
            assert (tier.tier.gone_before > now_s - 6400) is early

    def test_a_row_that_was_stored_is_no_older_than_its_object(self, tier: SteppedTier, bucket: Bucket) -> None:
        """Else it is gone by `oldest`, the Last-Modified of the first object that is left."""
        tier.found.clear()
        batch = tier.begin_store(1)
        tier.round(moves=False)
        bucket.clock.now += 3.7
        assert tier.end(batch) == [OK]
        (stored,) = tier.found
        assert stored.tick >= bucket.objects[tier.name(1)][1]


class TestDeletes:
    def test_an_upload_waits_for_the_delete_of_its_name_that_is_on_its_way(
        self, tier: SteppedTier, bucket: Bucket
    ) -> None:
        """One that arrives after the upload would delete the new object."""
        name = tier.name(1)
        tier.control._in_flight_deletes = frozenset({name})
        batch = tier.begin_store(1)
        for _ in range(5):
            tier.round()
        assert batch not in tier.finished
        assert name not in bucket.objects
        tier.control._in_flight_deletes = frozenset()
        assert tier.end(batch) == [OK]

    def test_a_queued_one_is_cancelled_by_an_upload(self, tier: SteppedTier, bucket: Bucket) -> None:
        tier.control.delete([tier.name(1)])
        batch = tier.begin_store(1)
        tier.questions.run()
        tier.tier.poll()
        assert not tier.control._delete_queue
        assert tier.end(batch) == [OK]
        tier.round()
        assert tier.name(1) in bucket.objects

    def test_what_this_engine_evicts_stays_for_others(self, tier: SteppedTier, bucket: Bucket) -> None:
        tier.tier.delete([(0, key_of(0))])
        tier.round()
        assert tier.name(0) in bucket.objects


class TestOpening:
    def test_a_bucket_that_there_is_not_is_refused(self, make_tier: Callable[..., SteppedTier], bucket: Bucket) -> None:
        bucket.fault = lambda _: (404, "NoSuchBucket")
        with pytest.raises(TierRefused, match=r"^bucket: there is no"):
            make_tier().open()

    @pytest.mark.parametrize("fault", [UNREACHABLE, 500, 503, (403, "Forbidden"), (400, "ExpiredToken")])
    def test_anything_else_is_down_and_opens_when_it_is_over(
        self, make_tier: Callable[..., SteppedTier], bucket: Bucket, fault: Fault
    ) -> None:
        tier = make_tier()
        bucket.fault = lambda _: fault
        with pytest.raises(TierDown) as error:
            tier.open()
        assert "tiers-test" not in str(error.value), "no credential"
        bucket.fault = lambda _: None
        tier.open()
        assert tier.store(1) == [OK]


def test_no_thread_is_waited_for_longer_than_its_time(make_tier: Callable[..., SteppedTier]) -> None:
    """However the server hangs."""
    tier = make_tier(times=changed(s3_close_s=7.0))
    tier.open()
    waited: list[float] = []
    hung = SimpleNamespace(join=waited.append, is_alive=lambda: True)
    tier.control._thread = hung  # type: ignore[assignment]
    tier.budget._thread = hung  # type: ignore[assignment]
    tier.ask(1)
    tier.questions.begin(1)
    tier.tier.close()
    assert waited == [7.0, 7.0]
    assert not tier.questions.was_waited_for


# --- servers that are not quite S3: listings that end early or repeat a name, deletes in one form only ----------------

FULL_ROWS = 64  # so a window is one row


@pytest.fixture
def full(make_tier: Callable[..., SteppedTier]) -> SteppedTier:
    """Its bucket was filled by others; it is to be opened."""
    return make_tier(capacity_rows=FULL_ROWS)


def fill(full: SteppedTier, rows: int) -> None:
    for number in range(rows):
        full.bucket.clock.now += 1.0
        full.bucket.put(full.name(number), bytes(ROW))


@pytest.mark.parametrize("repeats_name", [False, True])
@pytest.mark.parametrize("ends_early", [False, True])
class TestListingsThatEndEarlyOrRepeatAName:
    @pytest.fixture(autouse=True)
    def _habits(self, bucket: Bucket, ends_early: bool, repeats_name: bool) -> None:
        bucket.page_names, bucket.ends_early, bucket.repeats_name = 50, ends_early, repeats_name

    def test_a_sweep_counts_each_row_once(self, full: SteppedTier) -> None:
        """So the budget holds, and is used."""
        fill(full, 400)
        full.open()
        assert FULL_ROWS - 2 <= len(full.bucket.rows()) <= FULL_ROWS - 1
        assert full.tier.used_bytes == len(full.bucket.rows()) * ROW
        assert full.name(399) in full.bucket.rows()
        full.pass_time(60.0)
        assert full.tier.denials == {}

    def test_a_sweep_that_was_interrupted_goes_on_behind_its_last_row(self, full: SteppedTier, bucket: Bucket) -> None:
        fill(full, 60)
        full.open()
        listings: list[object] = []

        def fail(request: Any) -> int | None:
            listings.extend([request] * request.is_listing)
            return 500 if request.is_listing and 3 <= len(listings) < 6 else None

        bucket.fault = fail
        full.pass_time(60.0)
        assert full.tier.used_bytes == len(bucket.rows()) * ROW == 60 * ROW


@pytest.mark.parametrize("form", ["Content-MD5", "one by one"])
class TestFormsOfDeletes:
    @pytest.fixture(autouse=True)
    def _habits(self, bucket: Bucket, form: str) -> None:
        bucket.deletes = form

    def test_sweeps_and_the_queue_delete_and_try_no_form_twice(self, full: SteppedTier, form: str) -> None:
        bucket = full.bucket
        fill(full, 100)
        full.open()
        assert len(bucket.rows()) == FULL_ROWS - 2
        assert bucket.count("POST") == 2
        bucket.put(full.name(1), b"bad")
        deletes = bucket.count("DELETE")
        assert full.load(1) == [CORRUPT]
        full.round()
        assert full.name(1) not in bucket.rows()
        assert bucket.count("POST") == 3 - (form == "one by one")
        assert bucket.count("DELETE") == deletes + (form == "one by one")
        assert full.tier.denials == {}, "no right is missing"

    def test_what_is_denied_is_told(self, full: SteppedTier, form: str) -> None:
        """Of one object, and of all: in the last form that was tried."""
        full.open()
        for status, code in ((403, "AccessDenied"), (400, "ExpiredToken")):
            full.bucket.put(full.name(1), b"bad")
            full.bucket.fault = lambda request: (status, code) if request.method in {"POST", "DELETE"} else None  # noqa: B023
            full.load(1)
            full.round()
            assert code in full.tier.denials["delete"]
            assert full.name(1) in full.bucket.rows()
            full.bucket.fault = lambda _: None
            full.load(1)
            full.round()
            assert full.name(1) not in full.bucket.rows(), "who meets it again tries again"
