"""Row words, limits and the doorbell: they are nobody else's bytes, and other processes see and hear them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.row_words import ARRIVED, MAX_STREAMS, WAITING
from nixl_tiers.memory import arrivals
from nixl_tiers.memory.region import STEPS_KEPT, HostRegion

ROWS = 5


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(Geometry(cells=3, cell_payload=4096, sub_blocks=4), ROWS) as region:
        yield region


def test_words_limits_and_bell_are_nobody_elses_bytes(region: HostRegion) -> None:
    for step in range(STEPS_KEPT):
        region.publish_step(step, 1.0)
    region.stores_held_until_s = 5.0
    region.ranks.publish(2, b"2" * 16, "n" * 400)
    region.ranks.publish_recompute(1)
    region.ranks.publish_weights(1, changing=True)
    region.control[:] = region.rows_view[:] = 0xFF
    assert not any(words.any() for words in (region.words, region.limits, region.bell))
    region.words[:] = region.limits[:] = region.bell[:] = 0
    assert [region.step_seconds(step) for step in range(STEPS_KEPT)] == [1.0] * STEPS_KEPT
    assert region.stores_held_until_s == 5.0
    assert region.ranks.published() == [None, None, (b"2" * 16, "n" * 400)]
    assert region.ranks.weights == (0, 1, 0)
    assert all((rest == 0xFF).all() for rest in (region.control, region.rows_view))
    assert (region.words.shape, region.limits.shape, region.bell.shape) == ((ROWS,), (MAX_STREAMS,), (1,))


def test_only_the_rows_that_arrived_are_marked_and_the_bell_rings_once(region: HostRegion) -> None:
    region.words[:] = WAITING
    with HostRegion.attach(os.dup(region.fd)) as mover:
        mover.arrive([4, 1])
        mover.arrive([])
    assert region.words.tolist() == [WAITING, ARRIVED, WAITING, WAITING, ARRIVED]
    assert region.bell[0] == 1


def test_a_row_outside_the_region_is_refused(region: HostRegion) -> None:
    with pytest.raises(IndexError, match="row 5 has no word: there are 5"):
        region.arrive([0, ROWS])
    assert not region.words.any()


def test_every_rank_has_to_publish_that_it_recomputes(region: HostRegion) -> None:
    with HostRegion.attach(os.dup(region.fd)) as worker:
        for rank in range(3):
            assert not region.ranks.all_recompute
            worker.ranks.publish_recompute(rank)
    assert region.ranks.all_recompute


def test_without_the_library_nothing_arrives(region: HostRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    assert region.streams_possible
    monkeypatch.setattr(arrivals, "_library", lambda: None)
    assert not region.streams_possible
    region.arrive([0])
    assert not any(words.any() for words in (region.words, region.bell))


def test_a_closed_region_has_no_words(region: HostRegion) -> None:
    region.close()
    assert not len(region.words)
    with pytest.raises(IndexError):
        region.arrive([0])
