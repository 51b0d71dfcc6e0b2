"""The byte budget of a shared prefix, step by step: several movers and their janitors over a bucket in memory.

No thread runs, and the bucket's clock is everybody's. What single requests that fail do: test_janitor_failures.py; the
lease: test_janitor_lease.py; the account alone, against a model: test_usage.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nixl_tiers.tiers.s3 import janitor as janitor_module
from nixl_tiers.tiers.s3 import lease as lease_module
from nixl_tiers.tiers.s3 import usage as usage_module
from nixl_tiers.tiers.s3.deletes import MAX_DELETES
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.janitor import COUNTER_NAME, USAGE_NAME, Janitor, JanitorIntervals
from nixl_tiers.tiers.s3.lease_state import JANITOR_TERMS
from nixl_tiers.tiers.s3.usage import Account, UploadQuota, Usage
from tests.tiers.s3.memory_bucket import LISTING, NAMES, ROW, Bucket, failed, lost

CAPACITY_ROWS = 64
WINDOW_ROWS = 8
STEP_S = 5.0
INTERVALS = JanitorIntervals(lease=replace(JANITOR_TERMS, confirm_s=0.0))


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def now_s() -> float:
        return Bucket.made_last.now_s

    monkeypatch.setattr(lease_module, "lease_clock", now_s)
    monkeypatch.setattr(usage_module, "WINDOW_SHARE", CAPACITY_ROWS // WINDOW_ROWS)
    for module in (janitor_module, usage_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now_s, time=now_s))


class Mover:
    """Its uploads, the quota that grants them, and its janitor. `budget_rows`: what the bucket may hold at any time."""

    def __init__(self, bucket: Bucket, name: str, budget_rows: int = CAPACITY_ROWS, **named: object) -> None:
        self.bucket = bucket
        self.budget_rows = budget_rows
        self.quota = UploadQuota(name, CAPACITY_ROWS * ROW, ROW)
        self.denials = Denials("the bucket", lambda: bucket.now_s)
        given = {"intervals": INTERVALS, **named}
        self.janitor = Janitor(lambda: bucket, "b", "p", quota=self.quota, denials=self.denials, **given)  # type: ignore[arg-type]
        self.begun: list[str] = []

    def begin(self, *names: str) -> int:
        """Begin these uploads, as many as are granted."""
        count = 0
        for name in names:
            if not self.quota.try_acquire(ROW):
                break
            self.begun.append(name)
            count += 1
        return count

    def end(self) -> None:
        """All that were begun arrive."""
        for name in self.begun:
            self.bucket.store(name)
            self.quota.upload_ended(ROW)
        assert len(self.bucket.rows) <= self.budget_rows
        self.begun.clear()

    def store(self, *names: str) -> int:
        count = self.begin(*names)
        self.end()
        return count

    def steps(self, count: int = 1, after_s: float = STEP_S) -> None:
        for _ in range(count):
            self.bucket.now_s += after_s
            self.janitor.step()


def name_of(number: int, namespace: int = 0) -> str:
    return NAMES.name(f"{namespace:02x}" * 16, b"%08d" % number)


def fill(bucket: Bucket, count: int, namespace: int = 0) -> list[str]:
    """Rows of before, each a second younger than the one before it."""
    names = [name_of(number, namespace) for number in range(count)]
    for name in names:
        bucket.now_s += 1.0
        bucket.store(name)
    return names


class TestTheBudget:
    @pytest.mark.parametrize("seed", range(12))
    def test_movers_that_fill_the_prefix_many_times_in_any_order_stay_within_it(self, seed: int) -> None:
        """Each begins uploads whenever it may, and they arrive at any time later. Some requests of janitors fail, and
        some leases expire."""
        chance = random.Random(seed)
        bucket = Bucket(page_names=chance.choice([5, 20, 1000]))
        count = chance.choice([1, 2, 3])
        budget = CAPACITY_ROWS + (count - 1) * WINDOW_ROWS
        failing = chance.choice([0.0, 0.0, 0.05, 0.2])

        def meanwhile(request: str) -> None:
            """Before a request, and before its answer."""
            if chance.random() < 0.1:
                chance.choice(movers).end()
            if chance.random() < failing:
                raise chance.choice([failed(503), lost()])

        bucket.before = bucket.after = meanwhile
        movers = [Mover(bucket, f"mover-{number}", budget) for number in range(count)]
        arrived = number = steps = 0
        while arrived < 6 * CAPACITY_ROWS:
            mover = chance.choice(movers)
            action = chance.randrange(4)
            if action == 0:
                number += 3
                arrived += mover.begin(*(name_of(n, chance.randrange(3)) for n in range(number - 3, number)))
            elif action == 1:
                mover.end()
            else:
                mover.steps(after_s=40.0 if chance.random() < 0.02 else STEP_S / count)
            steps += 1
            assert steps < 40_000, "uploads go on"
        for mover in movers:
            mover.end()
        bucket.before = bucket.after = lambda _: None
        for _ in range(200):  # the next listing is as long after the last one as that took
            for mover in movers:
                mover.steps()
        assert [mover.denials.current() for mover in movers] == [{}] * count
        assert len(bucket.rows) <= CAPACITY_ROWS - WINDOW_ROWS
        assert bucket.usage is not None
        assert bucket.usage.nbytes == len(bucket.rows) * ROW

    def test_nothing_is_uploaded_before_a_listing_that_began_after_the_mover(self) -> None:
        bucket = Bucket()
        one, two = Mover(bucket, "one"), Mover(bucket, "two")
        assert one.store(name_of(1)) == 0
        one.steps()
        assert one.store(name_of(1)) == 1
        two.steps()
        assert two.store(name_of(2)) == 0
        one.steps(7)
        two.steps()
        assert two.store(name_of(2)) == 1

    def test_no_more_than_a_window_is_uploaded_that_the_record_has_not_counted(self) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        mover.steps()
        assert mover.store(*map(name_of, range(50))) == WINDOW_ROWS
        assert mover.store(*map(name_of, range(50, 60))) == 0
        mover.steps()
        assert mover.store(*map(name_of, range(50, 100))) == WINDOW_ROWS

    def test_a_full_prefix_is_written_to_when_rows_were_deleted_and_not_before(self) -> None:
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS)
        mover = Mover(bucket, "me")

        def no_deletes(request: str) -> None:
            if request.startswith("DELETE"):
                raise failed(503)

        bucket.before = no_deletes
        mover.steps(3)
        assert mover.store(name_of(1000)) == 0
        bucket.before = lambda _: None
        mover.steps()
        assert len(bucket.rows) == CAPACITY_ROWS - 2 * WINDOW_ROWS
        assert mover.store(name_of(1000)) == 1

    def test_uploads_go_on_between_listings(self) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me", intervals=replace(INTERVALS, sweep_s=1e6))
        mover.steps()
        number = stored = 0
        while stored < CAPACITY_ROWS - WINDOW_ROWS:
            number += 1
            stored += mover.store(name_of(number))
            mover.steps()
        assert bucket.count(LISTING) == 1
        while stored < 2 * CAPACITY_ROWS:
            number += 1
            stored += mover.store(name_of(number))
            mover.steps()
            assert number < 1000, "out of names to delete, it lists"
        assert bucket.count(LISTING) > 1

    def test_what_one_record_has_counted_no_later_one_forgets(self) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        mover.janitor._account = Account({"me": 5})

        def replaced(record: Usage) -> Usage | None:
            """What this janitor writes in place of another's record."""
            bucket.store(f"p/{USAGE_NAME}", record.encode())
            mover.janitor._read_usage()
            mover.janitor._write_usage()
            return bucket.usage

        assert replaced(Usage(50, {"me": 9})) == Usage(4, {"me": 9})
        late = Usage(50, {"me": 9, "late": 7})
        bucket.store(f"p/{COUNTER_NAME}late", b"7")
        assert replaced(late) == late, "this janitor's listing began before that mover"
        del bucket.objects[f"p/{COUNTER_NAME}late"]
        assert replaced(late) == Usage(4, {"me": 9}), "a mover that is long gone"


class TestWhatIsDeleted:
    def test_the_oldest_rows_of_any_namespace_and_nothing_that_is_no_row(self) -> None:
        bucket = Bucket()
        ours = ["p/notes.txt", f"p/{'00' * 16}/readme", f"p/{'zz' * 16}/{'00' * 8}", "p/deep/er/still", "q/elsewhere"]
        for name in ours:
            bucket.store(name, b"x" * 10 * ROW)
        rows = [*fill(bucket, CAPACITY_ROWS // 2, 7), *fill(bucket, CAPACITY_ROWS // 2, 3)]
        before = set(bucket.objects)
        Mover(bucket, "me").steps()
        gone = before - set(bucket.objects)
        assert gone == set(rows[: 2 * WINDOW_ROWS])

    def test_nothing_while_there_is_room(self) -> None:
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS - WINDOW_ROWS)
        Mover(bucket, "me").steps(20)
        assert len(bucket.rows) == CAPACITY_ROWS - WINDOW_ROWS

    def test_rows_that_are_too_old_whether_there_is_room_or_not(self) -> None:
        bucket = Bucket()
        rows = fill(bucket, 6)
        mover = Mover(bucket, "me", max_age_s=100.0)
        mover.steps()
        assert bucket.rows == set(rows)
        bucket.now_s += 100.0 - STEP_S - 3.0
        mover.steps(8)
        assert bucket.rows == set()

    def test_more_than_one_request_may_name(self) -> None:
        bucket = Bucket()
        extra = 2 * MAX_DELETES + 10
        rows = fill(bucket, CAPACITY_ROWS + extra)
        Mover(bucket, "me").steps()
        assert bucket.rows == set(rows[extra + 2 * WINDOW_ROWS :])
        assert bucket.count("DELETE rows") == 3

    def test_the_record_says_what_was(self) -> None:
        """All that was written before `oldest`, and nothing that was written a second later or more."""
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS)
        one, two = Mover(bucket, "one"), Mover(bucket, "two")
        one.steps()
        two.steps()
        oldest = min(modified_s for name, (_, _, modified_s) in bucket.objects.items() if name in bucket.rows)
        assert one.quota.oldest == two.quota.oldest == int(oldest)

    @pytest.mark.parametrize("code", ["AccessDenied", "InternalError"])
    def test_what_the_server_has_not_deleted_still_counts(self, code: str) -> None:
        """Also in an answer without an error of its own."""
        bucket = Bucket()
        rows = fill(bucket, CAPACITY_ROWS)
        bucket.delete_errors = tuple({"Key": name, "Code": code} for name in rows[: 2 * WINDOW_ROWS])
        mover = Mover(bucket, "me")
        mover.steps(4)
        assert bucket.usage == Usage(CAPACITY_ROWS * ROW, {"me": 0})
        assert mover.store(name_of(1000)) == 0
        bucket.delete_errors = ()
        mover.steps(8)
        assert mover.store(name_of(1000)) == 1

    def test_what_was_gone_already_counts_as_deleted(self) -> None:
        bucket = Bucket()
        rows = fill(bucket, CAPACITY_ROWS)
        bucket.delete_errors = tuple({"Key": name, "Code": "NoSuchKey"} for name in rows[:4])
        mover = Mover(bucket, "me")
        mover.steps()
        assert bucket.usage == Usage((CAPACITY_ROWS - 2 * WINDOW_ROWS) * ROW, {"me": 0})

    def test_nothing_more_when_another_has_the_lease(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS + 2 * MAX_DELETES)
        one, two = Mover(bucket, "one"), Mover(bucket, "two")
        held: list[bool] = []
        delete = one.janitor._delete

        def noted(victims: dict[str, int]) -> int:
            held.append(one.janitor.holds_lease)
            return delete(victims)

        def stall(request: str) -> None:
            if request == "DELETE rows" and len(held) == 1:
                bucket.after = lambda _: None
                two.steps(2, after_s=31.0)
                assert two.janitor.holds_lease

        monkeypatch.setattr(one.janitor, "_delete", noted)
        bucket.after = stall
        one.steps()
        assert held == [True]

    def test_nothing_without_the_lease(self) -> None:
        bucket = Bucket()
        one, two = Mover(bucket, "one"), Mover(bucket, "two")
        one.steps()
        fill(bucket, CAPACITY_ROWS)
        two.steps(3)
        assert len(bucket.rows) == CAPACITY_ROWS
        one.steps(8)
        assert len(bucket.rows) == CAPACITY_ROWS - 2 * WINDOW_ROWS


class TestWhoDoesNotWrite:
    def test_a_reader_writes_nothing_and_knows_the_record(self) -> None:
        bucket = Bucket()
        fill(bucket, 5)
        reader = Mover(bucket, "reader", reads_only=True)
        reader.steps(3)
        assert not any(request.startswith(("PUT", "DELETE", "LIST")) for request in bucket.requests)
        assert reader.quota.used_bytes is None
        Mover(bucket, "writer").steps()
        reader.steps()
        assert reader.quota.used_bytes == 5 * ROW
        assert not reader.quota.try_acquire(ROW)

    def test_without_conditional_writes_nobody_stores_or_deletes_and_that_is_told(self) -> None:
        bucket = Bucket(knows_conditions=False)
        fill(bucket, CAPACITY_ROWS)
        mover = Mover(bucket, "me")
        mover.steps(60)
        assert len(bucket.rows) == CAPACITY_ROWS
        assert f"p/{USAGE_NAME}" not in bucket.objects
        assert mover.store(name_of(1000)) == 0
        (problem,) = mover.denials.current().values()
        assert "does not support conditional writes" in problem

    def test_an_answer_without_a_date_is_told_and_nothing_is_stored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        monkeypatch.setattr(janitor_module, "answered_at_s", lambda _: None)
        mover.steps(3)
        assert "lack an ETag, a Date or a Last-Modified" in mover.denials.current()["shared prefix"]
        assert mover.store(name_of(1)) == 0


class TestTheSteps:
    def test_an_unexpected_error_gives_up_the_lease_and_is_logged_once(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        mover.steps()
        assert mover.janitor.holds_lease

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(Janitor, "_make_room", fail)
            mover.steps()
            assert not mover.janitor.holds_lease
            mover.steps(3)
        assert (
            len([each for each in caplog.records if "unexpected error (ZeroDivisionError)" in each.getMessage()]) == 1
        )
        mover.steps(8)
        assert mover.janitor.holds_lease
        assert mover.store(name_of(1)) == 1

    @pytest.mark.parametrize("stop", [LISTING, f"PUT {USAGE_NAME}", f"LIST {COUNTER_NAME}"])
    def test_a_sweep_that_was_interrupted_goes_on(self, stop: str) -> None:
        bucket = Bucket(page_names=10)
        fill(bucket, 50)
        mover = Mover(bucket, "me")

        def fail(request: str) -> None:
            if request == stop and bucket.count(stop) % 2:
                raise failed(503)

        bucket.before = fail
        mover.steps(30)
        bucket.before = lambda _: None
        assert bucket.usage == Usage(50 * ROW, {"me": 0})
        assert bucket.count(LISTING) <= 12 * 2 + 12 * 30 // 6, "no page twice for an interruption"

    def test_the_thread_makes_them_until_it_is_closed_and_then_hands_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        janitor, steps, waits = mover.janitor, list[float](), list[float]()
        step = janitor.step

        def counted() -> None:
            step()
            steps.append(bucket.now_s)

        def wait(seconds: float) -> bool:
            waits.append(seconds)
            bucket.now_s += seconds
            if len(steps) == 3:
                janitor._stop.set()
            return janitor._stop.is_set()

        monkeypatch.setattr(janitor, "step", counted)
        monkeypatch.setattr(janitor._stop, "wait", wait)
        janitor._run()
        assert len(steps) == 3
        assert [seconds for seconds in waits if seconds] == [INTERVALS.renew_s] * 3, "others are the lease's"
        assert not janitor.holds_lease
        other = Mover(bucket, "other")
        other.steps()
        assert other.janitor.holds_lease, "it need not wait until the lease expires"


def test_two_that_both_believe_they_hold_the_lease_stay_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lease saves work; the bound does not depend on it."""
    monkeypatch.setattr(Janitor, "holds_lease", property(lambda _: True))
    chance, bucket = random.Random(5), Bucket()
    movers = [Mover(bucket, name, CAPACITY_ROWS + WINDOW_ROWS) for name in ("one", "two")]
    arrived = 0
    actions: list[Callable[[Mover], object]] = [Mover.end, Mover.steps, Mover.steps]
    for number in range(2000):
        mover = chance.choice(movers)
        arrived += mover.begin(name_of(number))
        chance.choice(actions)(mover)
    assert arrived > 3 * CAPACITY_ROWS
