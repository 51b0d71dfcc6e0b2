"""Counters: each one counts, and every row that came into a tier is there or has left it for a counted reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.rows import CPU
from nixl_tiers.core.stats import MAX_SAMPLES, Counters, Load, Samples, Savings
from nixl_tiers.core.types import Direction, Limits, TierSpec
from tests.support.columns import PlainColumns
from tests.support.core import expire, look_up_key, opened, rows_of

ROW_BYTES = 4096
OUT = ("evictions", "corrupt", "missing", "unreadable", "removed", "reset")


class CountedCascade:
    """A host of four rows over a file tier of six and a shared tier of a hundred, with movers that work on demand."""

    def __init__(self) -> None:
        specs = [
            TierSpec("file", Write.THROUGH, physical_slots=True),
            TierSpec("s3", Write.ON_EVICT, physical_slots=False, asked=True),
        ]
        self.core = TierManager(4, ROW_BYTES, specs, Limits(reserve_share=0.01))
        self.now = 0.0
        self.opened()

    def opened(self) -> None:
        for tier, slots in enumerate((6, 100)):
            opened(self.core, tier, slots, [])

    def put(self, *keys: Key, failed: Sequence[Key] = (), incomplete: Sequence[Key] = ()) -> None:
        plan = self.core.prepare_store("put", keys)
        self.core.complete_store(plan.keys, lambda _: (failed, incomplete))
        self.ends("put")

    def scan(self, key: Key) -> Lookup:
        answer = look_up_key(self.core, key, "get", 0, self.now)
        self.core.end_step()
        return answer

    def get(self, key: Key, outcome: Outcome = Outcome.OK, *, copied: bool = True) -> bool:
        """Look a key up until it is a hit or a miss, on movers that end loads with `outcome`; then load it."""
        for _ in range(20):
            if self.scan(key) is not Lookup.PENDING:
                break
            self.settle(outcome)
            for probe in self.core.events.plan_checks(self.now):
                self.core.events.existence_checked(probe.tier, probe.id, probe.keys, self.now)
        found = look_up_key(self.core, key, "get", 0, self.now) is Lookup.HIT
        if found:
            self.core.prepare_load("get", [key], 0.0, tokens=[16])
            if copied:
                self.core.complete_load("get", 0.0)
            else:
                self.core.complete_load("get", 0.0, failed=True)
        self.ends("get")
        return found

    def settle(self, outcome: Outcome = Outcome.OK) -> None:
        for _ in range(20):
            for job in self.core.events.plan(self.now):
                outcomes = [outcome if job.direction is Direction.LOAD else Outcome.OK] * len(job.moves)
                self.core.events.finished(job.tier, job.id, outcomes, self.now)
                self.check()

    def ends(self, name: str) -> None:
        self.core.finish(name)
        self.core.end_step()
        self.check()

    def check(self) -> None:
        held = {"cpu": len(self.core.host.index)}
        for tier in self.core.tiers:
            unwritten = sum(not row.stored for row in rows_of(tier).values())
            held[tier.spec.name] = len(tier.index.slots) - unwritten
        for name, stats in self.core.counters().items():
            numbers = asdict(stats.counters)
            came = numbers["stored"] + numbers["promoted"] + numbers["found"]
            assert came == stats.rows + sum(numbers[reason] for reason in OUT), name
            assert stats.rows == held[name], name

    def __getitem__(self, name: str) -> Counters:
        return self.core.counters()[name].counters


def test_every_counter_counts_what_it_says() -> None:
    life = CountedCascade()
    cpu, file, s3 = life["cpu"], life["file"], life["s3"]

    life.put(b"a", b"b", b"c", b"d", b"bad", failed=[b"d"])
    assert (cpu.stored, cpu.bytes_written) == (3, 3 * ROW_BYTES)
    assert (cpu.failed, cpu.dropped, cpu.incomplete) == (1, 1, 0), "a host of four rows"
    life.settle()
    assert (file.stored, file.bytes_written) == (3, 3 * ROW_BYTES)
    assert life.get(b"a")
    assert (cpu.hits, cpu.hit_tokens, cpu.bytes_read) == (1, 16, ROW_BYTES)

    life.put(b"hole", incomplete=[b"hole"])
    assert (cpu.incomplete, cpu.failed) == (1, 1), "a chunk that the engine has not all of is no failure"

    for key in (b"e", b"f", b"g", b"h", b"i"):
        life.put(key)
        life.settle()
    assert cpu.evictions == 8 + cpu.promoted - 4
    assert file.evictions == s3.stored == 3, "one of the file tier's six places is kept free"
    assert s3.bytes_written == 3 * ROW_BYTES
    assert cpu.promoted == file.bytes_read // ROW_BYTES, "what was brought up to be written below"

    demoted = next(key for key in rows_of(life.core.tiers[1]) if key not in life.core.host.index)
    promoted = cpu.promoted
    assert life.get(demoted)
    assert (s3.hits, s3.bytes_read) == (1, ROW_BYTES)
    assert cpu.promoted > promoted
    assert not life.get(b"nowhere")
    assert s3.probes == 1

    assert life.get(demoted, copied=False)
    assert (cpu.unreadable, cpu.failed) == (1, 2)
    for count, (outcome, reason) in enumerate([(Outcome.CORRUPT, "corrupt"), (Outcome.MISSING, "missing")]):
        life.core.events.listed(1, [(count, b"other %d" % count, 0)], last=False)
        assert s3.found == count + 1
        assert not life.get(b"other %d" % count, outcome)
        assert getattr(s3, reason) == 1
    life.core.events.listed(1, [(2, b"third", 0)], last=False)
    life.core.events.listed(1, [(-1, b"third", 0)], last=False)
    assert s3.removed == 1
    life.check()

    take_all(life.core.events.columns_listed(1, PlainColumns([(0, b"cold", 0), (1, b"colder", 0)])))
    assert s3.found == 5
    life.core.events.lost(1, life.now)
    opened(life.core, 1, 100, [])
    assert (s3.deaths, s3.found, s3.removed) == (1, 5, 1), "what is known of a tier that is asked stays"
    life.check()

    held, found, removed = rows_of(life.core.tiers[0]), file.found, file.removed
    kept, row = next(iter(held.items()))
    life.core.events.lost(0, life.now)
    opened(life.core, 0, 6)
    take_all(life.core.events.columns_listed(0, PlainColumns([(row.slot, kept, 0)])))
    life.core.events.listed(0, [], last=True)
    assert (file.deaths, file.found) == (1, found), "what is listed again was there all the time"
    assert file.removed == removed + len(held) - 1
    life.check()

    assert life.scan(b"cold") is Lookup.PENDING
    assert life.core.events.plan(life.now)
    life.now += life.core.limits.wait_s + 1
    expire(life.core, life.now)
    assert s3.late == 1
    life.core.events.killed(1, life.now)
    life.core.events.lost(1, life.now)
    assert (s3.kills, s3.deaths, s3.failed) == (1, 2, 1)
    life.ends("get")

    held = {name: stats.rows for name, stats in life.core.counters().items()}
    life.core.reset(keep_tiers=False)
    assert held == {"cpu": cpu.reset, "file": file.reset, "s3": s3.reset}
    life.check()

    life.opened()
    life.core.tiers[1].members[0].breakers[Direction.STORE].trip(life.now)
    for number in range(8):
        life.put(b"late %d" % number)
        life.settle()
    assert s3.dropped + s3.stored - 3 == file.evictions - 3, "what leaves the file tier was written, or is counted"
    assert s3.dropped

    for name in asdict(Counters()):
        if name.startswith(("dropped_", "missed_", "saved_", "lost_", "unused")):
            continue  # test_reasons.py
        assert any(getattr(counters, name) for counters in (cpu, file, s3)), f"nothing counts {name}"


def test_samples_between_two_reports_are_bounded() -> None:
    samples = Samples()
    for number in range(2 * MAX_SAMPLES):
        samples.observe("file", "load_seconds", number)
    assert samples.take() == {("file", "load_seconds"): list(range(MAX_SAMPLES))}
    assert samples.take() == {}


@pytest.mark.parametrize(
    ("tokens", "took_s", "waited_s", "found"),
    [
        ({"s3": 1000}, 0.5, 3.0, {"s3": (1.0, 0.0, 2.5)}),  # longer than computing, and still prefill not spent
        ({CPU: 3000, "s3": 1000}, 0.4, 0.5, {CPU: (3.0, 2.7, 0.0), "s3": (1.0, 0.4, 0.0), "file": (0.0, 0.0, 0.0)}),
    ],
)
def test_a_wait_is_the_lower_tiers_and_the_copy_is_shared_by_tokens(
    tokens: dict[str, int], took_s: float, waited_s: float, found: dict[str, tuple[float, ...]]
) -> None:
    tiers = {name: Counters() for name in (CPU, "file", "s3")}
    savings = Savings(PrefillEstimate(1000), tiers.__getitem__)
    savings.load_began("r", Load(100, 100 + sum(tokens.values()), 50.0, ("s3", waited_s), tokens))
    savings.load_ended("r", 50.0 + took_s)
    for name, seconds in found.items():
        each = tiers[name]
        assert (each.saved_prefill_s, each.saved_first_token_s, each.lost_slower_s) == pytest.approx(seconds)
        assert each.lost_vain_s == 0
