"""Streams: which loads are told early, what is prepared for them, and what cuts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.base.row_words import MAX_STREAMS, WAITING
from nixl_tiers.core import streams
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.copies import LoadPlan
from nixl_tiers.core.key_lookup import Lookup
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.lookup import Scan
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.rows import RowState
from nixl_tiers.core.stats import Load
from nixl_tiers.core.streams import GRACE_S
from nixl_tiers.core.types import Direction, Job, TierSpec
from tests.support.core import expire, opened, put
from tests.support.stream_words import FakeWords

TOKENS = 16
ROW_BYTES = 1000
KEYS = [b"k%d" % number for number in range(8)]
END = TOKENS * len(KEYS)
FILE, S3 = 0, 1
LIMITS = Limits(wait_s=10.0, pin_s=30.0, soft_deadline_min_s=5.0, moves_per_job=4)
EARLY = Scan(False, END, len(KEYS))


class Engine:
    """A core over a file tier and an S3 tier, whose movers do what a test says. To compute a chunk takes 0.1 s, to
    load one from a file 0.01 s."""

    def __init__(
        self,
        rows: int = 256,
        *,
        row_s: float | None = 0.01,
        chunk_s: float | None = 0.1,
        held: Sequence[Key] = KEYS,
        quotas: Sequence[float] = (),
        words: bool = True,
        asked: bool = False,
    ) -> None:
        self.words = FakeWords()
        specs = [TierSpec("file", Write.THROUGH, True), TierSpec("s3", Write.THROUGH, False, asked=asked)]
        prefill = PrefillEstimate(None if chunk_s is None else TOKENS / chunk_s)
        streams = self.words if words else None
        self.core = TierManager(rows, ROW_BYTES, specs, LIMITS, prefill=prefill, quotas=quotas, streams=streams)
        for tier in range(2):
            opened(self.core, tier, 1000)
        self.now = 100.0
        self.list(FILE, held)
        if row_s is not None:
            self.speed(FILE, row_s)
        self.core.take_samples()

    def list(self, tier: int, keys: Sequence[Key]) -> None:
        self.core.events.listed(tier, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)

    def speed(self, tier: int, row_s: float) -> None:
        """The tier's last loads, one after the other, were like that."""
        for count in range(40):
            self.core.tiers[tier].loads.record(
                (1 + count % 9) * ROW_BYTES, (1 + count % 9) * row_s, self.now - 40 + count
            )

    def scan(self, name: str = "r", early: int = END, *, keys: Sequence[Key] = KEYS, ends: bool = False) -> Scan:
        scan = self.core.scan(name, Chain((Group(keys, TOKENS),)), 0, self.now, early=early)
        if ends:
            self.core.end_step()
        return scan

    def prepare(self, name: str = "r", keys: Sequence[Key] = KEYS, *, load: Load | None = None) -> LoadPlan:
        plan = self.core.copies.prepare_load(keys, name, tokens=[TOKENS] * len(keys), load=load)
        self.core.end_step()
        return plan

    def begin(self, name: str = "r", keys: Sequence[Key] = KEYS, *, load: Load | None = None) -> LoadPlan:
        """A stream of all of `keys`."""
        assert self.scan(name, keys=keys) == Scan(False, TOKENS * len(keys), len(keys))
        return self.prepare(name, keys, load=load)

    def turn(self) -> list[Job]:
        expire(self.core, self.now)
        return self.core.events.plan(self.now)

    def end(self, job: Job, outcome: Outcome = Outcome.OK) -> None:
        self.core.events.finished(job.mover, job.id, [outcome] * len(job.moves), self.now)

    def limit(self, plan: LoadPlan) -> int:
        assert plan.stream is not None
        return self.words.limit_of(plan.stream.slot, plan.stream.stream)

    def cuts(self, reason: str, tier: int = FILE) -> int:
        return int(getattr(self.core.tiers[tier].counters, f"streams_cut_{reason}"))

    def is_idle(self) -> bool:
        """Whether nothing of any stream is left once movers have ended."""
        while jobs := [job for job in self.turn() if job.direction is Direction.LOAD]:
            for job in jobs:
                self.end(job)
        core = self.core
        rows = list(core.host.index.values())
        used = core.host.used == len(rows) and not any(row.referenced for row in rows)
        return used and not (core.streams._open or core.streams._of_row or any(tier.to_stream for tier in core.tiers))


# --- acceptance ------------------------------------------------------------------------------------------------------


def test_a_request_is_told_early_and_its_rows_come_while_it_loads() -> None:
    engine = Engine()
    assert engine.scan() == EARLY
    plan = engine.prepare()
    stream = plan.stream
    assert stream is not None
    assert stream.coming == tuple(range(8))
    assert stream.deadline_s == engine.now + LIMITS.wait_s + GRACE_S
    assert plan.sources == ["file"] * 8
    assert engine.limit(plan) == 8
    assert [engine.words.words[row] for row in plan.rows] == [WAITING] * 8
    assert engine.core.where(KEYS[0], engine.now) == "file", "a row is a hit only once it has come"
    jobs = engine.turn()
    assert [move.row.index for job in jobs for move in job.moves] == plan.rows
    for job in jobs:
        engine.end(job)
    assert engine.core.where(KEYS[0], engine.now) == "cpu"
    engine.core.copies.complete_load("r", 8)
    assert engine.core.host.counters.bytes_read == 8 * ROW_BYTES
    assert engine.core.tiers[FILE].counters.hits == 8
    assert engine.core.tiers[FILE].counters.streams == 1
    assert engine.is_idle()


def test_what_is_in_host_memory_is_no_row_to_come() -> None:
    engine = Engine()
    put(engine.core, KEYS[:3])
    assert engine.scan() == Scan(False, END, 5)
    plan = engine.prepare()
    assert plan.stream is not None
    assert plan.stream.coming == (3, 4, 5, 6, 7)
    assert plan.sources == ["cpu"] * 3 + ["file"] * 5


def test_rows_that_movers_load_already_are_joined() -> None:
    engine = Engine()
    assert engine.scan("other", 0, ends=True).waits
    (job, _) = engine.turn()
    assert engine.scan() == EARLY
    plan = engine.prepare()
    assert [move.row.index for move in job.moves] == plan.rows[:4]
    assert engine.turn() == [], "nothing is loaded twice"


def _refusals() -> dict[str, Callable[[], tuple[Engine, int]]]:
    """By the rule: an engine, and up to which token a stream may go."""

    def after(event: Callable[[Engine], object], early: int = END, **named: object) -> Callable[[], tuple[Engine, int]]:
        def make() -> tuple[Engine, int]:
            engine = Engine(**named)  # type: ignore[arg-type]
            event(engine)
            return engine, early

        return make

    def filled(engine: Engine) -> None:
        engine.core.copies.prepare_store(KEYS[:1], "writer")

    def read(engine: Engine) -> None:
        put(engine.core, KEYS[:1])
        engine.core.copies.prepare_load(KEYS[:1], "reader")

    def streamed(engine: Engine) -> None:
        engine.begin("other")
        engine.turn()

    def full(engine: Engine) -> None:
        put(engine.core, [b"%d" % number for number in range(250)])

    def tenant(engine: Engine) -> None:
        engine.core.set_tenant("r", 1)

    def many(engine: Engine) -> None:
        for number in range(MAX_STREAMS):
            key = b"many%d" % number
            engine.core.events.listed(FILE, [(100 + number, key, 0)], last=True)
            engine.begin(f"many{number}", [key])
            for job in engine.turn():
                engine.end(job)

    def nothing(engine: Engine) -> None:
        pass

    return {
        "there are no streams": after(nothing, words=False),
        "the front end refuses": after(nothing, early=0),
        "the front end has no room for all of it": after(nothing, early=END - 1),
        "the tier is not measured": after(nothing, row_s=None),
        "the speed of prefill is not known": after(nothing, chunk_s=None),
        "the wait is long": after(nothing, row_s=0.07),
        "workers fill a row": after(filled),
        "another load reads a row": after(read),
        "another stream has the rows": after(streamed),
        "the host is full of rows that are still to be written": after(full),
        "the tenant has no room": after(tenant, quotas=(0.02,)),
        "the window is full": after(nothing, rows=120),
        "the slots are used up": after(many, rows=2048),
        "other engines may have stored more": after(nothing, held=KEYS[:7], asked=True),
    }


@pytest.mark.parametrize("rule", list(_refusals()))
def test_a_request_goes_the_ordinary_way_if(rule: str) -> None:
    engine, early = _refusals()[rule]()
    assert engine.scan(early=early).waits


def test_a_request_with_more_rows_to_come_than_are_inserted_at_once_goes_the_ordinary_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_ROWS", len(KEYS) - 1)
    assert Engine().scan().waits
    monkeypatch.setattr(streams, "MAX_ROWS", len(KEYS))
    assert Engine().scan() == EARLY


def test_in_a_full_host_rows_that_were_written_give_way_and_the_requests_own_do_not() -> None:
    """A cache is full as a rule."""
    engine = Engine()
    engine.list(S3, [])
    put(engine.core, KEYS[:2])  # used least recently
    put(engine.core, [b"%d" % number for number in range(254)])
    for _ in range(200):
        engine.now += 1.0
        for job in engine.turn():
            engine.end(job)
    assert not engine.core.host.free
    assert engine.scan() == Scan(False, END, len(KEYS) - 2)
    plan = engine.prepare()
    assert plan.stream is not None
    assert plan.stream.coming == tuple(range(2, 8))
    assert engine.limit(plan) == 8
    assert engine.core.host.counters.evictions == 6


def test_beside_rows_that_are_still_to_be_written_older_ones_give_way() -> None:
    """While others compute, some always are."""
    engine = Engine()
    engine.list(S3, [])
    put(engine.core, [b"old%d" % number for number in range(7)])
    for _ in range(20):
        for job in engine.turn():
            engine.end(job)
    new = [b"new%d" % number for number in range(249)]
    put(engine.core, new)
    queued = engine.core.backlog()
    assert (queued, engine.core.host.free) == (len(new), 0)
    assert engine.scan("waits").waits, "the eighth row is a new one"
    assert (engine.core.host.counters.evictions, engine.core.backlog()) == (0, queued)
    assert engine.scan(early=END - TOKENS, keys=KEYS[:7]) == Scan(False, END - TOKENS, 7)
    assert engine.limit(engine.prepare(keys=KEYS[:7])) == 7
    assert (engine.core.host.counters.evictions, engine.core.backlog()) == (7, queued)
    assert all(key in engine.core.host.index for key in new)


def test_a_request_is_told_early_once() -> None:
    """Whether it then loaded or not."""
    engine = Engine()
    assert engine.scan(ends=True) == EARLY
    assert engine.scan(ends=True) == Scan(True, END), "its load was not prepared: it waits for the rows"
    for _ in range(2):
        for job in engine.turn():
            engine.end(job)
    assert engine.scan() == Scan(False, END)
    assert engine.prepare().stream is None
    engine.core.copies.complete_load("r")
    assert engine.is_idle()


def test_a_request_whose_load_was_cut_goes_the_ordinary_way() -> None:
    engine = Engine()
    engine.begin()
    engine.core.copies.complete_load("r", 0)
    engine.core.end_step()
    assert engine.scan(ends=True).waits


def test_a_row_that_was_called_a_hit_is_there_when_the_load_is_prepared() -> None:
    engine = Engine(rows=160)
    put(engine.core, KEYS[:1])
    assert engine.scan() == Scan(False, END, 7)
    put_plan = engine.core.copies.prepare_store([b"x%d" % number for number in range(160)], "writer")
    assert len(put_plan.rows) == 159
    assert engine.prepare().rows[0] == engine.core.host.index[KEYS[0]].index


# --- what prepare_load finds -----------------------------------------------------------------------------------------


def test_a_load_is_cut_at_the_first_row_that_no_tier_can_load_any_more() -> None:
    engine = Engine()
    assert engine.scan() == EARLY
    engine.core.tiers[FILE].index.forget(KEYS[5])
    plan = engine.prepare()
    assert plan.stream is not None
    assert engine.limit(plan) == 5
    assert plan.stream.coming == tuple(range(8))
    assert engine.cuts("gone") == 1
    assert engine.core.host.used == 5
    engine.turn()
    engine.core.copies.complete_load("r", 5)
    assert engine.core.tiers[FILE].counters.hits == 5


def test_a_load_is_cut_at_its_beginning_if_the_tier_is_down_by_then() -> None:
    engine = Engine()
    assert engine.scan() == EARLY
    engine.core.events.down(FILE, engine.now)
    plan = engine.prepare()
    assert engine.limit(plan) == 0
    assert plan.rows == [0] * 8
    engine.core.copies.complete_load("r", 0)
    assert engine.is_idle()


def test_a_load_is_cut_where_the_host_is_full_by_then_and_nothing_is_evicted() -> None:
    engine = Engine(rows=160)
    assert engine.scan() == EARLY
    put_keys = [b"x%d" % number for number in range(157)]
    engine.core.copies.prepare_store(put_keys, "writer")
    plan = engine.prepare()
    assert engine.limit(plan) == 3
    assert engine.core.host.counters.evictions == 0


def test_a_load_of_which_all_has_come_by_then_is_no_stream() -> None:
    engine = Engine()
    assert engine.scan("other", 0, ends=True).waits
    jobs = engine.turn()
    assert engine.scan() == EARLY
    for job in jobs:
        engine.end(job)
    assert engine.prepare().stream is None


def test_a_load_of_rows_that_were_not_told_early_is_an_error() -> None:
    engine = Engine()
    assert engine.scan(ends=True) == EARLY
    engine.core.end_step()
    assert engine.scan(early=0).waits
    with pytest.raises(AssertionError, match="not ready"):
        engine.core.copies.prepare_load(KEYS, "r")


# --- cuts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.MISSING, Outcome.CORRUPT])
def test_a_row_that_fails_cuts_there_and_the_rows_are_freed_once(outcome: Outcome) -> None:
    engine = Engine()
    plan = engine.begin()
    first, second = engine.turn()
    engine.core.events.rows_ended(FILE, first.id, plan.rows[:2], [Outcome.OK, outcome], engine.now)
    assert engine.limit(plan) == 1
    assert engine.cuts("failed") == 1
    assert engine.core.host.used == 8, "the row's number stays until workers are done with the load"
    engine.core.copies.complete_load("r", 1)
    assert engine.core.host.used == 7
    assert engine.core.host.counters.bytes_read == ROW_BYTES
    engine.end(second)
    assert engine.core.where(KEYS[4], engine.now) == "cpu", "what was under way is an ordinary row"
    assert [row.state for row in engine.core.host.index.values()].count(RowState.LOADING) == 2
    engine.end(first)
    assert engine.is_idle()


def test_a_row_that_lacks_sub_blocks_cuts_there_and_is_a_row_like_any_other() -> None:
    engine = Engine()
    plan = engine.begin()
    first, _ = engine.turn()
    engine.core.events.finished(FILE, first.id, [Outcome.OK] * 4, engine.now, [(2, 1)])
    assert engine.limit(plan) == 2
    assert engine.core.where(KEYS[2], engine.now) == "cpu"


def test_a_late_job_cuts_at_its_first_row() -> None:
    engine = Engine(chunk_s=100.0)
    plan = engine.begin()
    first, second = engine.turn()
    engine.end(first)
    engine.now = second.soft_deadline_s + 0.1
    assert engine.now < 110
    engine.turn()
    assert engine.limit(plan) == 4
    assert engine.cuts("late") == 1
    engine.core.copies.complete_load("r", 4)
    assert engine.core.host.used == 8, "a mover may still write them"
    engine.end(second)
    assert engine.core.host.used == 4
    assert engine.is_idle()


@pytest.mark.parametrize("how", ["killed", "lost", "down"])
def test_a_mover_that_is_gone_cuts(how: str) -> None:
    engine = Engine()
    plan = engine.begin()
    if how == "down":
        engine.core.events.down(FILE, engine.now)
        engine.turn()
        assert engine.cuts("gone") == 1
    else:
        engine.turn()
        getattr(engine.core.events, how)(FILE, engine.now)
        engine.turn()
        assert engine.cuts("late" if how == "killed" else "failed") == 1
    assert engine.limit(plan) == 0
    engine.core.copies.complete_load("r", 0)
    if how == "killed":
        assert engine.core.host.used == 8, "it may still write them"
        engine.core.events.lost(FILE, engine.now)
        engine.turn()
    assert engine.core.host.used == 0
    assert engine.is_idle()


def test_a_stream_is_cut_once_to_compute_the_rest_is_quicker() -> None:
    """What has come is kept."""
    engine = Engine()
    plan = engine.begin()
    first, _ = engine.turn()
    engine.end(first)
    engine.now += 0.3
    engine.turn()
    assert engine.limit(plan) == 8
    engine.now += 0.3  # 0.5 s late, and computing the rest takes 0.4 s
    engine.turn()
    assert engine.limit(plan) == 4
    assert engine.cuts("slower") == 1
    assert engine.core.tiers[FILE].members[0].loads.closed


def test_the_longest_wait_cuts_and_the_tier_is_blamed() -> None:
    engine = Engine(chunk_s=100.0)
    plan = engine.begin()
    (first, _) = engine.turn()
    for job in engine.core.tiers[FILE].jobs.values():
        job.soft_deadline_s = job.hard_deadline_s = 1000.0
    blamed: list[bool] = []
    engine.core.movers[first.mover].loads.record = lambda good, now: blamed.append(good)  # type: ignore[method-assign]
    engine.now += LIMITS.wait_s + 0.1
    engine.turn()
    assert engine.limit(plan) == 0
    assert engine.cuts("waited") == 1
    assert blamed == [False]


def test_rows_that_wait_for_the_window_are_dropped_once_their_stream_is_cut() -> None:
    engine = Engine()
    engine.core._state.load_window = 4
    engine.core.tiers[FILE].rows_loading = -4
    plan = engine.begin()
    engine.core.tiers[FILE].rows_loading = 0
    (job,) = engine.turn()
    assert len(engine.core.tiers[FILE].to_stream) == 4
    engine.core.streams.cut("r", 2)
    engine.turn()
    assert not engine.core.tiers[FILE].to_stream
    assert engine.core.host.used == 8, "workers may not be done with them"
    engine.core.copies.complete_load("r", 2)
    assert engine.core.host.used == 4
    engine.end(job)
    assert engine.limit(plan) == 2
    assert engine.is_idle()


def test_what_waits_behind_a_dropped_row_asks_for_it_itself() -> None:
    engine = Engine()
    engine.begin()
    assert engine.scan("second", ends=True) == Scan(True, END), "another stream's rows: the ordinary way"
    assert engine.core.is_being_loaded(KEYS[0])
    engine.core.finish_request("r")
    engine.turn()
    assert engine.scan("second", ends=True) == Scan(True, END)
    for _ in range(2):
        for job in engine.turn():
            engine.end(job)
    assert engine.scan("second") == Scan(False, END)
    engine.core.copies.complete_load("r", 0)


def test_an_abort_cuts_at_the_beginning() -> None:
    engine = Engine()
    plan = engine.begin()
    jobs = engine.turn()
    engine.core.finish_request("r")
    assert engine.limit(plan) == 0
    assert engine.cuts("aborted") == 1
    for job in jobs:
        engine.end(job)
    engine.core.copies.complete_load("r", 0)
    assert engine.core.host.counters.bytes_read == 0
    assert engine.is_idle()


def rows_are_free_once_workers_have_ended(engine: Engine, jobs: Sequence[Job]) -> None:
    """Those of a stream of before a reset, whose movers end now."""
    for job in jobs:
        engine.end(job)
    engine.turn()
    assert engine.core.host.used == 8
    engine.core.flushed()
    engine.turn()
    assert engine.core.host.used == 0


@pytest.mark.parametrize("keep", [True, False])
def test_a_reset_cuts_and_the_rows_are_free_once_workers_have_ended(keep: bool) -> None:
    engine = Engine()
    plan = engine.begin()
    jobs = engine.turn()
    engine.core.reset(keep, engine.now)
    assert engine.limit(plan) == 0
    assert engine.cuts("reset") == 1
    engine.core.copies.complete_load("r", 8)  # of a job of before: nothing
    engine.turn()
    assert engine.core.host.used == 8
    rows_are_free_once_workers_have_ended(engine, jobs)


def test_a_row_that_was_given_up_before_a_reset_is_free_once_workers_have_ended() -> None:
    engine = Engine()
    plan = engine.begin()
    first, second = engine.turn()
    engine.core.events.rows_ended(FILE, first.id, plan.rows[:1], [Outcome.FAILED], engine.now)
    engine.core.reset(True, engine.now)
    rows_are_free_once_workers_have_ended(engine, [first, second])


def test_a_slot_of_before_a_reset_cuts_whoever_still_reads_it() -> None:
    engine = Engine()
    old = engine.begin()
    engine.core.reset(True, engine.now)
    new = engine.begin("new")
    assert old.stream is not None
    assert new.stream is not None
    assert old.stream.slot == new.stream.slot
    assert (engine.limit(old), engine.limit(new)) == (0, 8)


def test_a_limit_is_never_raised() -> None:
    engine = Engine()
    plan = engine.begin()
    engine.core.streams.cut("r", 3)
    engine.core.streams.cut("r", 5)
    assert engine.limit(plan) == 3
    assert engine.cuts("aborted") == 1
    engine.core.streams.cut_all()
    assert engine.limit(plan) == 0


def test_a_request_of_the_same_name_has_a_stream_of_its_own() -> None:
    engine = Engine(held=[*KEYS, b"other"])
    old = engine.begin()
    engine.core.finish_request("r")
    new = engine.begin("r", [b"other"])
    assert (engine.limit(old), engine.limit(new)) == (0, 1)
    engine.core.copies.complete_load("r", 0)
    assert engine.limit(new) == 1
    for job in engine.turn():
        engine.end(job)
    engine.core.copies.complete_load("r")
    assert engine.core.host.counters.bytes_read == ROW_BYTES
    assert engine.is_idle()


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_load_that_failed_leaves_what_a_mover_still_writes() -> None:
    engine = Engine()
    engine.begin()
    first, second = engine.turn()
    engine.end(first)
    engine.core.copies.fail_load("r")
    assert engine.core.host.counters.unreadable == 4
    engine.end(second)
    assert [engine.core.where(key, engine.now) for key in KEYS] == ["file"] * 4 + ["cpu"] * 4
    assert engine.core.lookup(KEYS[4], "r", TOKENS, engine.now) is Lookup.MISS
    assert engine.is_idle()


def test_savings_are_of_what_came_before_the_gap() -> None:
    engine = Engine()
    load = Load(0, END, engine.now)
    engine.begin(load=load)
    for job in engine.turn():
        engine.end(job)
    engine.core.copies.complete_load("r", 4)
    engine.core.savings.load_ended("r", engine.now)
    assert engine.core.tiers[FILE].counters.saved_prefill_s == pytest.approx(0.4)


def test_only_what_has_come_is_told_to_routers() -> None:
    engine = Engine()
    announced = engine.core.announce(8)
    announced.take()
    engine.begin()
    told: list[Key] = []
    engine.core.host.changed = told.append
    first, _ = engine.turn()
    assert told == []
    engine.end(first)
    assert told == KEYS[:4]
