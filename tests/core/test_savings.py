"""What loads brought: seconds saved and lost, by tier, through the calls of a scheduler."""

from __future__ import annotations

import pytest

from nixl_tiers.core.counters import Counters
from nixl_tiers.core.host import CPU
from nixl_tiers.core.manager import Lookup, TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.savings import Load, Savings

SPEED = 1000  # tokens a second


class Books:
    def __init__(self, prefill: PrefillEstimate | None = None) -> None:
        self.tiers = {name: Counters() for name in (CPU, "file", "s3")}
        self.savings = Savings(prefill or PrefillEstimate(SPEED), self.tiers.__getitem__)

    def load(self, tokens: dict[str, int], took_s: float, waited: tuple[str, float] | None = None) -> None:
        start = 100
        load = Load(start, start + sum(tokens.values()), 50.0, waited, tokens)
        self.savings.load_began("r", load)
        self.savings.load_ended("r", 50.0 + took_s)

    def of(self, name: str) -> tuple[float, float, float, float]:
        found = self.tiers[name]
        seconds = (found.saved_prefill_s, found.saved_first_token_s, found.lost_slower_s, found.lost_vain_s)
        return tuple(pytest.approx(value) for value in seconds)  # type: ignore[return-value]


@pytest.fixture
def books() -> Books:
    return Books()


def test_first_token_comes_earlier_by_what_loading_did_not_take(books: Books) -> None:
    books.load({"file": 4000}, 0.5, ("file", 1.5))
    assert books.of("file") == (4.0, 2.0, 0.0, 0.0)


def test_load_that_took_longer_than_computing_is_a_loss_and_still_prefill_not_spent(books: Books) -> None:
    books.load({"s3": 1000}, 0.5, ("s3", 3.0))
    assert books.of("s3") == (1.0, 0.0, 2.5, 0.0)


def test_wait_is_the_lower_tiers_and_the_copy_is_shared_by_tokens(books: Books) -> None:
    books.load({CPU: 3000, "s3": 1000}, 0.4, ("s3", 0.5))
    assert books.of(CPU) == (3.0, 2.7, 0.0, 0.0)
    assert books.of("s3") == (1.0, 0.4, 0.0, 0.0)
    assert books.of("file") == (0.0, 0.0, 0.0, 0.0)


def test_wait_for_a_tier_that_brought_nothing_is_its_loss(books: Books) -> None:
    books.load({CPU: 3000}, 0.0, ("s3", 2.0))
    assert books.of(CPU) == (3.0, 3.0, 0.0, 0.0)
    assert books.of("s3") == (0.0, 0.0, 2.0, 0.0)


def test_load_that_fails_saves_nothing_and_its_time_is_lost_in_vain(books: Books) -> None:
    books.savings.load_began("r", Load(0, 4000, 50.0, ("file", 1.0), {"file": 4000}))
    books.savings.load_failed("r", 50.5)
    assert books.of("file") == (0.0, 0.0, 0.0, 1.5)
    books.savings.load_ended("r", 60.0)
    assert books.of("file") == (0.0, 0.0, 0.0, 1.5)


def test_nothing_is_counted_while_the_speed_is_unknown() -> None:
    books = Books(PrefillEstimate())
    books.load({"file": 4000}, 0.5, ("file", 1.0))
    assert books.of("file") == (0.0, 0.0, 0.0, 0.0)


def test_end_of_a_long_prompt_is_worth_more_than_its_beginning() -> None:
    learned = PrefillEstimate()
    for start in (0, 2000, 4000, 6000) * 3:
        learned.observe(2000, start + 1000.0, 2000 * (1e-3 + 1e-6 * (start + 1000)))
    early, late = Books(learned), Books(learned)
    early.savings.load_began("r", Load(0, 2000, 0.0, None, {CPU: 2000}))
    late.savings.load_began("r", Load(6000, 8000, 0.0, None, {CPU: 2000}))
    for books in (early, late):
        books.savings.load_ended("r", 0.0)
    assert early.tiers[CPU].saved_prefill_s == pytest.approx(4.0, rel=0.05)
    assert late.tiers[CPU].saved_prefill_s == pytest.approx(16.0, rel=0.05)


def stored(core: TierManager, *keys: bytes) -> None:
    plan = core.copies.prepare_store(keys, "writer")
    core.copies.complete_store(core.copies.rows_being_filled(keys), ())
    assert plan.keys == list(keys)


def test_load_of_a_request_that_ended_or_of_before_a_reset_is_not_counted() -> None:
    for end in (lambda core: core.finish_request("r"), lambda core: core.reset(True)):
        core = TierManager(8, 4096, [], prefill=PrefillEstimate(SPEED))
        stored(core, b"a", b"b")
        assert [core.lookup(key, "r", None, 1.0) for key in (b"a", b"b")] == [Lookup.HIT, Lookup.HIT]
        core.copies.prepare_load((b"a", b"b"), "r", tokens=(64, 64), load=Load(0, 128, 1.0))
        end(core)
        core.savings.load_ended("r", 2.0)
        assert core.host.counters.saved_prefill_s == 0


def test_tokens_of_a_load_are_those_of_the_tier_that_they_came_from() -> None:
    core = TierManager(8, 4096, [], prefill=PrefillEstimate(SPEED))
    stored(core, b"a", b"b")
    core.copies.prepare_load((b"a", b"b"), "r", tokens=(64, 64), load=Load(0, 128, 1.0))
    core.savings.load_ended("r", 1.028)
    assert core.host.counters.saved_prefill_s == pytest.approx(0.128)
    assert core.host.counters.saved_first_token_s == pytest.approx(0.1)
