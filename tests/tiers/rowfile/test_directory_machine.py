"""The bound of a directory that engines share, and what else holds there, in any order of events."""

from __future__ import annotations

import pytest

from tests.tiers.rowfile.directory_machine import CAPACITY, SIZES, WINDOW, explore, world_of

pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.parametrize("engines", [1, 2, 8])
def test_bound_holds_in_any_order_of_events(engines: int) -> None:
    assert explore(range(100, 120), engines=engines) > 1500


def test_rows_expire_and_engines_go_on_storing() -> None:
    explore(range(200, 224), 400, settle=True)


@pytest.mark.parametrize("engines", [1, 2, 8])
def test_simulation_comes_near_the_bound(engines: int) -> None:
    """Else it would show little."""
    bound = CAPACITY + (engines - 1) * WINDOW
    most = 0
    for seed in range(40):
        world = world_of(seed, engines=engines, faults=0.0, rates={"together": 4.0, "cleans": 4.0})
        world.run(150)
        most = max(most, world.most)
    assert most > bound - max(SIZES.values()) - WINDOW * (engines == 8)
