"""The byte budget of a prefix, step by step: several movers over a bucket in memory.

No thread runs, and the bucket's clock is everybody's. What single requests that fail do: test_budget_failures.py; the
protocol alone, in any order of events: record_machine.py.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.tiers.s3 import budget as budget_module
from nixl_tiers.tiers.s3 import deletes
from nixl_tiers.tiers.s3 import record as record_module
from nixl_tiers.tiers.s3.budget import COUNTER_NAME, LEAST_TURN_S, USAGE_NAME, Budget
from nixl_tiers.tiers.s3.deletes import MAX_DELETES
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.record import Record, UploadQuota
from nixl_tiers.tiers.s3.sweep import Sweeper
from nixl_tiers.tiers.s3.takeover import Terms
from tests.tiers.s3.memory_bucket import LISTING, NAMES, ROW, Bucket, failed, lost

CAPACITY_ROWS = 64
WINDOW_ROWS = 8
STEP_S = 5.0
TERMS = Terms(confirm_s=0.0, settle_s=0.0)


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def now_s() -> float:
        return Bucket.made_last.now_s

    monkeypatch.setattr(budget_module, "budget_clock", now_s)
    monkeypatch.setattr(record_module, "WINDOW_SHARE", CAPACITY_ROWS // WINDOW_ROWS)


class Mover:
    """Uploads, the quota that grants them, and what keeps that up to date. `budget_rows`: how many may be there."""

    def __init__(
        self, bucket: Bucket, name: str, budget_rows: int = CAPACITY_ROWS, rows: int = CAPACITY_ROWS, **named: object
    ) -> None:
        self.bucket = bucket
        self.budget_rows = budget_rows
        self.quota = UploadQuota(name, rows * ROW, ROW)
        self.denials = Denials("the bucket", lambda: bucket.now_s)
        connection: Any = SimpleNamespace(client=bucket, delete_client=bucket, denials=self.denials)
        given: dict[str, Any] = {"terms": TERMS, **named}
        self.budget = Budget(connection, "b", "p", quota=self.quota, **given)
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
            self.quota.upload_ended(ROW, self.bucket.now_s)
        assert len(self.bucket.rows) <= self.budget_rows
        self.begun.clear()

    def store(self, *names: str) -> int:
        count = self.begin(*names)
        self.end()
        return count

    def steps(self, count: int = 1, after_s: float = STEP_S) -> None:
        for _ in range(count):
            self.bucket.now_s += after_s
            self.budget.step()

    @property
    def writes(self) -> bool:
        """Whether it writes the usage record, and so lists and deletes."""
        return self.budget.takeover.account is not None


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
            assert steps < 100_000, "uploads go on"  # of the requests of a turn more than a third may fail
        for mover in movers:
            mover.end()
        bucket.before = bucket.after = lambda _: None
        for _ in range(800):  # over an hour, so there was another sweep
            for mover in movers:
                mover.steps()
        assert [mover.denials.current() for mover in movers] == [{}] * count
        assert len(bucket.rows) <= CAPACITY_ROWS - WINDOW_ROWS
        assert bucket.record.nbytes <= (len(bucket.rows) + bucket.record.windows * WINDOW_ROWS) * ROW

    @pytest.mark.parametrize("rows", [1, 2, 3, 7, 9, 64])
    def test_a_batch_of_more_is_stored_in_part_and_what_follows_too(self, rows: int) -> None:
        """Also where a window is one row, as that is more than its share of the capacity."""
        bucket = Bucket()
        mover = Mover(bucket, "me", rows, rows)
        stored = 0
        for number in range(100):
            stored += mover.store(*(name_of(10 * number + n) for n in range(10)))
            mover.steps()
        assert stored >= min(rows, 64) * 4

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

    def test_half_a_window_is_published_at_once(self) -> None:
        """So one engine writes as fast as it can, and not a window in five seconds."""
        bucket = Bucket()
        mover = Mover(bucket, "me")
        mover.steps()
        stored = 0
        for number in range(0, 40, WINDOW_ROWS // 2):
            stored += mover.store(*(name_of(n) for n in range(number, number + WINDOW_ROWS // 2)))
            assert mover.budget._wake.is_set()
            assert mover.budget.takeover.next_s <= bucket.now_s + LEAST_TURN_S, "also between the pages of a listing"
            mover.budget._wake.clear()
            mover.steps(after_s=0.0)
        assert stored == 40

    def test_with_many_counters_rows_are_not_taken_to_be_gone_all_the_time(self) -> None:
        """Those of movers that are gone stay for three hours."""
        bucket = Bucket()
        for number in range(70):
            bucket.store(f"p/{COUNTER_NAME}gone-{number}", b"7")
        fill(bucket, 3)
        mover = Mover(bucket, "me")
        mover.steps(2)
        assert len(bucket.record.counted) == 71
        assert not mover.quota.deletes_soon


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

    def test_rows_that_are_too_old_whether_there_is_room_or_not(self) -> None:
        bucket = Bucket()
        rows = fill(bucket, 6)
        mover = Mover(bucket, "me", max_age_s=100.0)
        mover.steps()
        assert bucket.rows == set(rows)
        bucket.now_s += 100.0 - STEP_S - 3.0
        mover.steps(8)
        assert bucket.rows == set()

    def test_no_others_than_those_that_are_too_old_while_uploads_are_counted(self) -> None:
        bucket = Bucket()
        me, other = (Mover(bucket, name, max_age_s=100.0) for name in ("me", "other"))
        for each in (me, other, me, other):
            each.steps()
        old, young = [name_of(n) for n in range(2)], [name_of(n) for n in range(10, 14)]
        assert other.store(*old) == len(old)
        bucket.now_s += 60.0
        assert other.store(*young) == len(young)
        for each in (other, me, me, me):
            each.steps()
        assert bucket.rows == {*old, *young}

        def slow(request: str) -> None:
            if request == "DELETE rows":
                bucket.now_s += TERMS.renew_s + 1
                other.store(*(name_of(n) for n in range(20, 24)))
                other.steps(after_s=0.0)

        bucket.before = slow
        me.steps(5)
        assert bucket.rows >= {*young}
        assert not bucket.rows & {*old}

    def test_the_record_says_what_was(self) -> None:
        """All that was written before `oldest`, and nothing that was written a second later or more."""
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS)
        one, two = Mover(bucket, "one"), Mover(bucket, "two")
        one.steps()
        two.steps()
        oldest = min(modified_s for name, (_, _, modified_s) in bucket.objects.items() if name in bucket.rows)
        assert one.quota.record.oldest == two.quota.record.oldest == int(oldest)

    @pytest.mark.parametrize("code", ["AccessDenied", "InternalError"])
    def test_what_the_server_has_not_deleted_still_counts(self, code: str) -> None:
        """Also in an answer without an error of its own."""
        bucket = Bucket()
        rows = fill(bucket, CAPACITY_ROWS)
        bucket.delete_errors = tuple({"Key": name, "Code": code} for name in rows[: 2 * WINDOW_ROWS])
        mover = Mover(bucket, "me")
        mover.steps(4)
        assert bucket.record.nbytes == CAPACITY_ROWS * ROW
        assert mover.store(name_of(1000)) == 0
        bucket.delete_errors = ()
        mover.steps(8)
        assert mover.store(name_of(1000)) == 1

    def test_names_that_may_not_be_deleted_were_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else the prefix is listed again when half of them were."""
        monkeypatch.setattr(deletes, "MAX_DELETES", WINDOW_ROWS)
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS)
        monkeypatch.setattr(budget_module, "delete_names", lambda *_: set())
        mover = Mover(bucket, "me", terms=replace(TERMS, sweep_s=0.0))
        mover.steps(CAPACITY_ROWS // WINDOW_ROWS)
        assert bucket.count(LISTING) == 1

    def test_what_a_lock_keeps_is_not_said_to_be_gone(self) -> None:
        bucket = Bucket()
        rows = fill(bucket, CAPACITY_ROWS)
        bucket.delete_errors = tuple({"Key": name, "Code": "AccessDenied"} for name in rows[:3])
        mover = Mover(bucket, "me")
        mover.steps(4)
        assert bucket.record.nbytes <= (CAPACITY_ROWS - WINDOW_ROWS) * ROW
        assert bucket.record.oldest == int(bucket.objects[rows[0]][2])

    def test_nothing_more_when_another_has_taken_the_record_over(self) -> None:
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS + 2 * MAX_DELETES)
        one, two = Mover(bucket, "one"), Mover(bucket, "two")

        def stall(request: str) -> None:
            if request == "DELETE rows" and bucket.count(request) == 1:
                bucket.after = lambda _: None
                two.steps(1, after_s=1.0)
                two.steps(1, after_s=31.0)
                assert two.writes

        bucket.after = stall
        one.steps()
        assert not one.writes
        assert bucket.requests[-1] == f"GET {USAGE_NAME}", "it has read that, and done nothing since"

    def test_nothing_later_than_a_while_after_the_last_own_write(self) -> None:
        """Another may have taken the record over meanwhile. It is deleted once it was renewed."""
        bucket = Bucket()
        mover = Mover(bucket, "me")
        mover.steps()
        fill(bucket, CAPACITY_ROWS)
        mover.budget.takeover.account.nbytes = CAPACITY_ROWS * ROW  # type: ignore[union-attr]

        def stall(request: str) -> None:
            if request == LISTING:
                bucket.now_s += 1.0
            if request == f"PUT {USAGE_NAME}" and bucket.now_s < late_s:
                raise failed(503)

        late_s = bucket.now_s + 60.0
        bucket.before = stall
        while bucket.now_s < late_s - STEP_S:
            mover.steps()
            assert bucket.count("DELETE rows") == 0
        mover.steps(4)
        assert len(bucket.rows) == CAPACITY_ROWS - 2 * WINDOW_ROWS


class TestSweeps:
    """A prefix may have ten million rows: it is listed when that is needed, and no more."""

    def test_an_idle_prefix_is_listed_once_an_hour(self) -> None:
        bucket = Bucket()
        fill(bucket, 5)
        mover = Mover(bucket, "me")
        mover.steps(3 * 720 + 10)
        assert bucket.count(LISTING) == 4

    def test_a_date_that_was_wrong_puts_none_off(self) -> None:
        bucket = Bucket(ahead_s=86400.0)
        mover = Mover(bucket, "me")
        mover.steps()
        bucket.ahead_s = 0.0
        mover.steps(10)
        assert bucket.count(LISTING) == 2

    def test_a_prefix_that_somebody_has_emptied_is_written_to_again_by_all(self) -> None:
        """Which `aws s3 rm --recursive` does while engines run. Their counters are above a window."""
        bucket = Bucket()
        movers = [Mover(bucket, name, CAPACITY_ROWS + 2 * WINDOW_ROWS) for name in ("a", "b", "c")]
        for number in range(20):
            for place, each in enumerate(movers):
                each.steps(after_s=STEP_S / 3)
                each.store(*(name_of(100 * place + n) for n in range(3 * number, 3 * number + 3)))
        bucket.objects.clear()
        for _ in range(20):
            for each in movers:
                each.steps(after_s=STEP_S / 3)
        assert [each.store(name_of(1000 + place)) for place, each in enumerate(movers)] == [1, 1, 1]
        assert bucket.count(LISTING) < 20

    def test_restarts_of_eight_engines_list_nothing_before_more_than_four_windows_are_owed(self) -> None:
        bucket = Bucket()
        fill(bucket, 10)
        movers = [Mover(bucket, f"mover-{number}", CAPACITY_ROWS + 7 * WINDOW_ROWS) for number in range(4)]
        for _ in range(4):
            for mover in movers:
                mover.steps(after_s=1.0)
        assert bucket.count(LISTING) == 1
        assert bucket.record.windows == 3
        movers += [Mover(bucket, f"mover-{number}", CAPACITY_ROWS + 7 * WINDOW_ROWS) for number in range(4, 8)]
        for _ in range(20):
            for mover in movers:
                mover.steps(after_s=1.0)
        assert bucket.count(LISTING) == 2
        assert bucket.record.windows == 0
        assert bucket.record.nbytes == 10 * ROW

    def test_a_restart_stores_at_once_in_a_full_prefix_too(self) -> None:
        """The engine was closed; a sweep deletes what it finds among the oldest before it has ended."""
        bucket = Bucket(page_names=4)
        fill(bucket, CAPACITY_ROWS)
        first = Mover(bucket, "first")
        first.steps(3)
        number = 1000
        while len(bucket.rows) < CAPACITY_ROWS - WINDOW_ROWS:
            number += 1
            first.store(name_of(number))
            first.steps()
        first.budget.end()
        second = Mover(bucket, "second")
        listed: list[int] = []

        def note(request: str) -> None:
            if request == LISTING and second.quota.ready and not listed and second.quota.try_acquire(0):
                listed.append(bucket.count(LISTING))

        bucket.before = note
        before = bucket.count(LISTING)
        second.steps()
        pages = -(-len(bucket.rows) // 4)
        assert listed
        assert listed[0] - before < pages, "before all was listed"

    def test_an_hour_of_refused_uploads_does_not_empty_the_prefix(self) -> None:
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS - 2 * WINDOW_ROWS)
        mover = Mover(bucket, "me")
        mover.steps()
        for number in range(720):
            if mover.quota.try_acquire(ROW):
                mover.quota.upload_ended(ROW, bucket.now_s, done=False)
            mover.steps()
            assert number < 60 or mover.budget.takeover.account.failed > 0 or bucket.count(LISTING) > 1  # type: ignore[union-attr]
        assert len(bucket.rows) == CAPACITY_ROWS - 2 * WINDOW_ROWS


class TestTakeover:
    def test_one_that_is_gone_is_replaced_after_half_a_minute_and_a_closed_one_at_once(self) -> None:
        bucket = Bucket()
        one, two, three = (Mover(bucket, name) for name in ("one", "two", "three"))
        one.steps()
        two.steps(6)
        assert not two.writes
        two.steps(2)
        assert two.writes
        two.budget.end()
        three.steps()
        assert three.writes
        assert bucket.count(LISTING) == 1, "the next ones go on from the record that they replace"

    def test_two_that_a_server_lets_through_together_are_one_a_second_later(self) -> None:
        bucket = Bucket()
        one, two = Mover(bucket, "one"), Mover(bucket, "two")
        one.steps()
        one.budget.end()
        three = Mover(bucket, "three")

        def race(name: str) -> None:
            if name == f"p/{USAGE_NAME}":
                bucket.tested = lambda _: None
                two.steps(after_s=0.0)
                assert two.writes

        bucket.tested = race
        three.steps(after_s=0.0)
        two.steps()
        assert two.writes + three.writes == 1


class TestWhoDoesNotWrite:
    def test_a_reader_writes_nothing_and_knows_the_record(self) -> None:
        bucket = Bucket()
        fill(bucket, 5)
        reader = Mover(bucket, "reader", reads_only=True)
        reader.steps(3)
        assert not any(request.startswith(("PUT", "DELETE", "LIST")) for request in bucket.requests)
        assert reader.quota.record == Record(0)
        Mover(bucket, "writer").steps()
        reader.steps()
        assert reader.quota.record.nbytes == 5 * ROW
        assert not reader.quota.try_acquire(ROW)

    def test_an_engine_without_conditional_writes_stores_and_makes_room_and_another_does_not(self) -> None:
        """Once the server has said so for a minute, which is told."""
        bucket = Bucket(knows_conditions=False)
        fill(bucket, CAPACITY_ROWS)
        one, two = Mover(bucket, "one"), Mover(bucket, "two")
        one.steps(11)
        assert one.store(name_of(1000)) == 0
        assert f"p/{USAGE_NAME}" not in bucket.objects
        one.steps(10)
        assert one.store(name_of(1000)) == 1
        for _ in range(40):
            one.steps(after_s=2.5)
            two.steps(after_s=2.5)
        assert two.store(name_of(1001)) == 0
        assert [*two.denials.current()] == ["conditional writes"], "the record is renewed all the time"
        assert one.store(name_of(1001)) == 1
        (problem,) = one.denials.current().values()
        assert "does not support conditional writes" in problem
        one.budget.end()
        two.steps(2)
        assert two.store(name_of(1002)) == 1
        assert len(bucket.rows) <= CAPACITY_ROWS

    def test_one_good_answer_ends_the_doubt_whether_there_are_conditional_writes(self) -> None:
        bucket = Bucket(knows_conditions=False)
        mover = Mover(bucket, "me")
        mover.steps(11)
        assert "does not support conditional writes" in mover.denials.current()["conditional writes"]
        bucket.knows_conditions = True
        mover.steps()
        assert mover.store(name_of(1)) == 1
        mover.steps()
        assert mover.denials.current() == {}
        assert not mover.quota.alone

    def test_an_answer_without_a_date_is_told_and_nothing_is_stored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        monkeypatch.setattr(budget_module, "answered_at_s", lambda _: None)
        mover.steps(3)
        assert "lack an ETag, a Date or a Last-Modified" in mover.denials.current()["prefix"]
        assert mover.store(name_of(1)) == 0


class TestTheSteps:
    def test_an_unexpected_error_gives_up_the_record_and_is_logged_once(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        mover.steps()
        assert mover.writes

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(Sweeper, "_make_room", fail)
            mover.steps()
            assert not mover.writes
            mover.steps(3)
        assert (
            len([each for each in caplog.records if "unexpected error (ZeroDivisionError)" in each.getMessage()]) == 1
        )
        mover.steps(8)
        assert mover.writes
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
        assert bucket.record.nbytes == 50 * ROW
        assert bucket.count(LISTING) <= 12 * 2 + 12 * 30 // 6, "no page twice for an interruption"

    @pytest.mark.parametrize("stop", [LISTING, "DELETE rows"])
    def test_one_that_is_closed_in_a_sweep_hands_over(self, stop: str) -> None:
        """A listing may take many minutes, and a process that ends has two seconds."""
        bucket = Bucket(page_names=10)
        fill(bucket, 2 * CAPACITY_ROWS)
        mover = Mover(bucket, "me")
        bucket.before = lambda request: mover.budget._stop.set() if request == stop else None
        mover.steps()
        asked = [*bucket.requests]
        mover.budget.end()
        assert asked.count(stop) == 1
        other = Mover(bucket, "other")
        other.steps()
        assert other.writes

    def test_the_thread_makes_them_until_it_is_closed_and_then_hands_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        budget, steps, waits = mover.budget, list[float](), list[float]()
        step = budget.step

        def counted() -> None:
            step()
            steps.append(bucket.now_s)

        def wait(seconds: float) -> bool:
            waits.append(seconds)
            bucket.now_s += seconds
            if len(steps) == 3:
                budget._stop.set()
            return budget._stop.is_set()

        monkeypatch.setattr(budget, "step", counted)
        monkeypatch.setattr(budget._stop, "wait", wait)
        monkeypatch.setattr(budget._wake, "wait", wait)
        budget._run()
        assert len(steps) == 3
        assert [after - before for before, after in itertools.pairwise(steps)] == [TERMS.renew_s] * 2
        assert not mover.writes
        other = Mover(bucket, "other")
        other.steps()
        assert other.writes, "it need not wait until the record is stale"
