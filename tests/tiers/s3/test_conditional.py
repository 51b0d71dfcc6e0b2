"""When it is believed that a server has no conditional writes, and when it is asked again."""

from __future__ import annotations

import pytest

from nixl_tiers.tiers.s3.conditional import ConditionalWrites


@pytest.fixture
def found() -> ConditionalWrites:
    return ConditionalWrites(doubt_s=60.0, retry_s=1.0)


def test_that_they_do_not_work_is_believed_after_a_minute_of_tries(found: ConditionalWrites) -> None:
    now, tries = 100.0, 0
    while found.work is None:
        found.asking(now)
        found.answered(False, now)
        assert found.refused
        tries += 1
        last, now = now, found.next_at_s
    assert (last, tries) == (160.0, 7)
    assert found.next_at_s == float("inf"), "it is known now"


def test_one_good_answer_ends_the_doubt(found: ConditionalWrites) -> None:
    found.answered(False, 0.0)
    found.answered(True, 10.0)
    assert (found.work, found.refused, found.next_at_s) == (True, False, float("inf"))


def test_without_an_answer_it_is_asked_again_soon_and_ever_more_slowly(found: ConditionalWrites) -> None:
    pauses = []
    for _ in range(6):
        found.asking(0.0)
        pauses.append(found.next_at_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    found.answered(False, 0.0)
    found.asking(10.0)
    assert found.next_at_s == 11.0
