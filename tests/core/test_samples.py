"""Histograms: observed once a job or a request, by tier, and bounded between two reports."""

from __future__ import annotations

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.manager import Lookup, TierManager
from nixl_tiers.core.samples import MAX_SAMPLES, Samples
from nixl_tiers.core.types import TierSpec
from tests.support.core import opened

ROW_BYTES = 4096
KEYS = [b"one", b"two", b"three"]


def cascade(*stored: Key) -> TierManager:
    specs = [TierSpec("file", Write.THROUGH, physical_slots=True), TierSpec("s3", Write.OFF, physical_slots=False)]
    core = TierManager(32, ROW_BYTES, specs, Limits(wait_s=10.0))
    for tier, keys in enumerate(([], stored)):
        opened(core, tier, 100)
        core.events.listed(tier, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
    return core


def scan(core: TierManager, now: float) -> list[Lookup]:
    answers = [core.lookup(key, "request", place, now) for place, key in enumerate(KEYS)]
    core.end_step()
    return answers


def test_a_job_is_one_sample_of_its_tier() -> None:
    core = cascade()
    plan = core.copies.prepare_store(KEYS, "put")
    core.copies.complete_store(core.copies.rows_being_filled(plan.keys), ())
    (job,) = core.events.plan(5.0)
    core.events.finished(0, job.id, [Outcome.OK, Outcome.OK, Outcome.FAILED], 5.5)
    assert core.take_samples() == {("file", "store_seconds"): [0.5], ("file", "store_bytes"): [2 * ROW_BYTES]}
    assert core.take_samples() == {}


def test_a_job_without_any_row_moved_is_no_sample() -> None:
    core = cascade()
    plan = core.copies.prepare_store(KEYS, "put")
    core.copies.complete_store(core.copies.rows_being_filled(plan.keys), ())
    (job,) = core.events.plan(5.0)
    core.events.finished(0, job.id, [Outcome.FAILED] * 3, 5.5)
    assert core.take_samples() == {}


def test_time_to_compute_is_no_wait_of_a_request_that_is_preempted() -> None:
    core = cascade(*KEYS)
    assert scan(core, 1.0) == [Lookup.PENDING] * 3
    (job,) = core.events.plan(2.0)
    assert scan(core, 11.5)[0] is Lookup.MISS, "its deadline has passed, so it computes"
    core.events.finished(1, job.id, [Outcome.OK] * 3, 12.0)
    core.end_step(preempted=["request"])
    assert scan(core, 50.0) == [Lookup.HIT] * 3
    core.copies.prepare_load(KEYS, "request")
    samples = core.take_samples()
    assert samples["s3", "wait_vain"] == [10.5]
    assert ("s3", "wait_loaded") not in samples


def test_a_wait_is_one_sample_of_the_lowest_tier_that_was_asked() -> None:
    core = cascade(*KEYS)
    assert scan(core, 1.0) == [Lookup.PENDING] * 3
    (job,) = core.events.plan(2.0)
    core.events.finished(1, job.id, [Outcome.OK] * 3, 3.0)
    assert scan(core, 3.5) == [Lookup.HIT] * 3
    core.copies.prepare_load(KEYS, "request")
    core.finish_request("request")
    samples = core.take_samples()
    assert samples["s3", "wait_loaded"] == [2.5]
    assert samples["s3", "promotion_seconds"] == [2.0], "queue and load"
    assert samples["s3", "load_seconds"] == [1.0]
    assert len(samples) == 4


def test_a_wait_after_which_nothing_was_loaded_was_in_vain() -> None:
    core = cascade(*KEYS)
    scan(core, 1.0)
    scan(core, 11.5)
    scan(core, 20.0)
    core.finish_request("request")
    assert core.take_samples() == {("s3", "wait_vain"): [10.5]}


def test_a_request_that_never_waited_is_no_sample() -> None:
    core = cascade()
    assert scan(core, 1.0) == [Lookup.MISS] * 3
    core.finish_request("request")
    assert core.take_samples() == {}


def test_samples_between_two_reports_are_bounded() -> None:
    samples = Samples()
    for number in range(2 * MAX_SAMPLES):
        samples.observe("file", "load_seconds", number)
    assert samples.take() == {("file", "load_seconds"): list(range(MAX_SAMPLES))}
    assert samples.take() == {}
