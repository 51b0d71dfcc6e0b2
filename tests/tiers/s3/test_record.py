"""The usage record: its account, who writes it, and movers, listings and a bucket in any order of events."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_tiers.tiers.s3 import record, sweep
from nixl_tiers.tiers.s3 import takeover as takeover_module
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.record import FAILED_ENDS_S, Account, Counter, Record, UploadQuota
from nixl_tiers.tiers.s3.sweep import Sweeper, Victims
from nixl_tiers.tiers.s3.takeover import CLAIM, COUNTERS, KEEP, PUBLISH, READ, WAIT, WRITE, Ask, Takeover, Terms
from tests.support.replay import examples
from tests.tiers.s3.record_machine import CAPACITY, ROW, ROWS, SHARE, WINDOW, World, explore, world_of


@pytest.fixture(autouse=True)
def _small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "WINDOW_SHARE", SHARE)
    monkeypatch.setattr(sweep, "MIN_VICTIMS", 8)


@settings(max_examples=examples(160), deadline=None)
@given(st.integers(0, 10**9))
def test_the_bound_holds_and_no_record_is_below_the_truth(seed: int) -> None:
    explore(range(seed, seed + 1), 1500)


@pytest.mark.parametrize("seed", range(6))
def test_when_faults_end_uploads_go_on(seed: int) -> None:
    world = world_of(seed, stale_s=30.0)
    world.run(1500)
    world.settle(240.0)
    stored = world.stored
    for _ in range(60):
        for place in world.places:
            world.upload(place)
        world.settle(5.0)
    assert world.stored > stored + 8


class TestUploadQuota:
    @pytest.fixture
    def quota(self) -> UploadQuota:
        return UploadQuota("me", CAPACITY, ROW)

    def test_nothing_is_granted_that_the_record_does_not_count(self, quota: UploadQuota) -> None:
        assert not quota.try_acquire(ROW)
        quota.refresh(Record(0, {"another": 7}))
        assert not quota.try_acquire(ROW)
        quota.refresh(Record(0, {"me": 0}))
        assert quota.try_acquire(ROW)

    def test_one_window_is_granted_until_the_record_has_counted_it(self, quota: UploadQuota) -> None:
        quota.refresh(Record(0, {"me": 0}))
        assert [quota.try_acquire(ROW) for _ in range(9)] == [True] * 8 + [False]
        quota.upload_ended(ROW, 0.0)
        assert quota.counter(0.0) == Counter(ROW)
        assert not quota.try_acquire(ROW), "the record has not counted it"
        quota.refresh(Record(ROW, {"me": ROW}))
        assert [quota.try_acquire(ROW) for _ in range(2)] == [True, False]

    @pytest.mark.parametrize(("free", "room"), [(WINDOW, True), (WINDOW - 1, False)])
    def test_a_whole_window_must_be_free(self, quota: UploadQuota, free: int, room: bool) -> None:
        quota.refresh(Record(CAPACITY - free, {"me": 0}))
        assert quota.try_acquire(ROW) is room

    def test_a_failed_upload_counts_a_minute_later(self, quota: UploadQuota) -> None:
        """It may still arrive."""
        quota.upload_ended(ROW, 10.0, done=False)
        assert quota.counter(10.0 + FAILED_ENDS_S - 0.1) == Counter(0, 0)
        assert quota.counter(10.0 + FAILED_ENDS_S) == Counter(ROW, ROW)

    def test_half_a_window_is_told(self, quota: UploadQuota) -> None:
        told: list[int] = []
        quota.half_used = lambda: told.append(quota.counter(0.0).ended)
        for _ in range(5):
            quota.upload_ended(ROW, 0.0)
        quota.published(quota.counter(0.0))
        quota.upload_ended(ROW, 0.0)
        assert told == [4 * ROW, 5 * ROW]


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"null", b'{"bytes": 1}', b'{"bytes": 1, "counted": [1]}', b'{"bytes": "x"}', b"\xff"]
)
def test_invalid_records_are_rejected(raw: bytes) -> None:
    assert Record.decode(raw) is None
    whole = Record(5, {"me": 7}, 9, "me", "n", 3, 2, 1)
    assert Record.decode(whole.encode()) == whole


def test_records_of_other_releases_are_read() -> None:
    assert Record.decode(b'{"bytes": 5, "counted": {"me": 7}}') == Record(5, {"me": 7}), "an older one"
    newer = b'{"bytes": 5, "counted": {}, "oldest": 9, "new": {"a": [1]}}'
    assert Record.decode(newer) == Record(5, {}, 9)
    assert Record.decode(b'{"bytes": 5, "counted": {}, "oldest": Infinity}') is None


# --- what single steps must do; each with a planted bug that breaks it (test_record_mutants.py) -----------------------


def account(counted: dict[str, int], nbytes: int = 100) -> Account:
    return takeover_module.Account(Record(nbytes, counted, swept=1), WINDOW)


def counters(**ended: int) -> dict[str, Counter]:
    return {mover: Counter(n) for mover, n in ended.items()}


def takeover(kind: type[Takeover] = Takeover) -> Takeover:
    nonces = iter("abcdefghijklmn")
    return kind(UploadQuota("me", CAPACITY, ROW), Terms(), nonce=lambda: next(nonces))


def drive(
    steps: Generator[Ask, Any, Any], there: list[Record | None], found: dict[str, Counter], after: Callable[[], None]
) -> list[Ask]:
    """Answer these steps by the record that is `there`; `after` the first write. Returns what was asked."""
    asked, now, answer = list[Ask](), 1000.0, None
    try:
        ask = next(steps)
        while True:
            asked.append(ask)
            now += 1.0
            etag = None if there[0] is None else there[0].write
            match ask.what:
                case str(what) if what == READ:
                    answer = (etag, there[0])
                case str(what) if what == WRITE:
                    new, condition = ask.given
                    answer = new.write if condition in (etag, "") else None
                    there[0] = new if answer else there[0]
                    if sum(each.what == WRITE for each in asked) == 1:
                        after()
                case str(what) if what == COUNTERS:
                    answer = found
                case str(what) if what in (CLAIM, KEEP):
                    answer = what == KEEP
                case str(what) if what in (WAIT, PUBLISH):
                    answer = None
            ask = steps.send((now, answer))
    except StopIteration:
        return asked


def windows_of_movers_added_during_a_sweep_stay(kind: type[Takeover] = Takeover) -> None:
    a = account({"one": 0})
    a.read(counters(one=0))
    a.begin_sweep(9)
    a.found(30)
    a.read(counters(one=0, two=0))
    a.end_sweep(counters(one=0, two=0), 5)
    assert (a.nbytes, a.windows) == (30 + WINDOW, 1)


def a_counter_above_a_window_waits_for_a_sweep(kind: type[Takeover] = Takeover) -> None:
    a = account({"one": 0})
    a.read(counters(one=0, two=WINDOW + 1, three=WINDOW))
    assert (a.nbytes, a.counted) == (100 + 2 * WINDOW, {"one": 0, "three": WINDOW})
    a.begin_sweep(9)
    a.end_sweep(counters(one=0, two=WINDOW + 2), 5)
    assert a.counted["two"] == WINDOW + 2


def a_taker_goes_on_from_the_record_that_it_replaces(kind: type[Takeover] = Takeover) -> None:
    made, there = takeover(kind), [Record(50, {"one": 5}, 3, "", "z", 7, 1, 2)]
    drive(made.turn(0.0), there, counters(one=9), lambda: None)  # type: ignore[arg-type]
    assert there[0] is not None
    assert (there[0].nbytes, there[0].counted, there[0].oldest, there[0].swept) == (54, {"one": 9}, 3, 7)
    assert (there[0].windows, there[0].failed, there[0].writer) == (1, 2, "me")


def a_write_that_did_not_stay_makes_no_writer(kind: type[Takeover] = Takeover) -> None:
    made, there = takeover(kind), [Record(50, {}, 0, "", "z", 7)]

    def overtaken() -> None:
        there[0] = Record(50, {}, 0, "other", "y", 7)

    drive(made.turn(0.0), there, {}, overtaken)  # type: ignore[arg-type]
    assert made.account is None
    assert there[0].writer == "other"


def counters_are_read_after_the_record_that_is_replaced(kind: type[Takeover] = Takeover) -> None:
    made, there = takeover(kind), [Record(50, {"one": 0}, 0, "", "z", 7)]
    drive(made.turn(0.0), there, counters(one=0), lambda: None)  # type: ignore[arg-type]
    for ended in (5, 9):
        drive(made.turn(2000.0), there, counters(one=ended), lambda: None)  # type: ignore[arg-type]
        assert there[0].counted == {"one": ended}


def a_write_replaces_what_its_writer_has_read(kind: type[Takeover] = Takeover) -> None:
    made, there = takeover(kind), [Record(50, {}, 0, "", "z", 7)]
    asked = drive(made.turn(0.0), there, {}, lambda: None)  # type: ignore[arg-type]
    assert [each.given[1] for each in asked if each.what == WRITE] == ["z", "a"]


def who_finds_another_name_forgets_its_account(kind: type[Takeover] = Takeover) -> None:
    made, there = takeover(kind), [Record(50, {}, 0, "", "z", 7)]
    drive(made.turn(0.0), there, {}, lambda: None)  # type: ignore[arg-type]
    assert made.account is not None
    there[0] = Record(90, {}, 0, "other", "y", 8)
    for _ in range(2):
        drive(made.turn(1001.0), there, {}, lambda: None)  # type: ignore[arg-type]
    assert made.account is None
    assert there[0].writer == "other"


def names_serve_with_their_account(kind: type[Sweeper] = Sweeper) -> None:
    made, there = takeover(), [Record(50, {}, 0, "", "z", 7)]
    drive(made.turn(0.0), there, {}, lambda: None)  # type: ignore[arg-type]
    sweeper = kind(made, RowNames("p"), lambda: 1e6, None)
    assert made.account is not None
    running = sweep._Running(Victims(0), 0.0)
    sweeper._account, sweeper._running = made.account, running
    made.account.begin_sweep(9)
    made.account.ended = 5
    sweeper._swap()
    assert sweeper._victims is not running.victims, "the record could not be written yet"


def an_idle_writer_is_not_replaced(kind: type[Takeover] = Takeover) -> None:
    """Its record says the same all the time, but for what makes each write another one."""
    world = World(random.Random(1), 2, faults=0.0, takeover=kind)
    world.settle(60.0)
    (writer,) = (place for place in world.places if place.takeover.account is not None)
    account = writer.takeover.account
    world.settle(120.0)
    assert writer.takeover.account is account


def refused_uploads_do_not_empty_the_prefix(kind: type[UploadQuota] = UploadQuota) -> None:
    """They count for a minute and more as what may be there."""
    world = World(random.Random(1), 1, faults=0.0)
    world.rows = {name: world.now - number for number, name in enumerate(ROWS[: (CAPACITY - WINDOW) // ROW])}
    (mover,) = world.places
    for _ in range(360):
        while mover.quota.try_acquire(ROW):
            mover.quota.upload_ended(ROW, world.now, done=False)
        world.settle(10.0)
    assert ROW * len(world.rows) >= CAPACITY - 3 * WINDOW


SCENES = [
    an_idle_writer_is_not_replaced,
    refused_uploads_do_not_empty_the_prefix,
    names_serve_with_their_account,
    windows_of_movers_added_during_a_sweep_stay,
    a_counter_above_a_window_waits_for_a_sweep,
    a_taker_goes_on_from_the_record_that_it_replaces,
    a_write_that_did_not_stay_makes_no_writer,
    counters_are_read_after_the_record_that_is_replaced,
    a_write_replaces_what_its_writer_has_read,
    who_finds_another_name_forgets_its_account,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scene(scene: Callable[[], None]) -> None:
    scene()


def names(taken: list[tuple[float, bytes, int]]) -> list[bytes]:
    return [name for _, name, _ in taken]


class TestVictims:
    def test_the_oldest_are_taken_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sweep, "MIN_VICTIMS", 1 << 16)
        ages = list(range(1000))
        random.Random(1).shuffle(ages)
        victims = Victims(1000)
        for age in ages:
            victims.add(float(age), b"%d" % age, ROW)
        assert names(victims.take(10 * ROW, 0.0, 1000)) == [b"%d" % age for age in range(10)]
        assert names(victims.take(0, 15.0, 1000)) == [b"%d" % age for age in range(10, 15)], "the expired ones"
        assert len(victims.take(10**9, 0.0, 7)) == 7
        assert len(victims.take(10**9, 0.0, 10_000)) == 1000 - 22

    def test_what_was_taken_is_older_than_all_that_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sweep, "MIN_VICTIMS", 20)
        assert Victims(0).oldest == 0
        victims = Victims(0)
        for age in random.Random(1).sample(range(1, 1001), 1000):
            victims.add(float(age), b"%d" % age, ROW)
        assert victims.oldest == 1
        taken = victims.take(5 * ROW, 0.0, 1000)
        assert victims.oldest == 6
        for each in taken:
            victims.add(*each)
        assert victims.oldest == 1, "perhaps they are still there"
        taken = victims.take(10**9, 0.0, 10_000)
        assert victims.oldest == len(taken) + 1, "the rows whose names were not kept"
        few = Victims(0)
        few.add(7.5, b"x", ROW)
        few.take(ROW, 0.0, 1000)
        assert few.oldest == 7, "others may have been written at the same time"
