"""What an engine's budget says, step by step; and the smallest stories in which less would not keep the bound."""

from __future__ import annotations

import pytest

from nixl_tiers.tiers.rowfile.budget import Budget, Swept

ROW = 4096
ROWS = 1024
WINDOW = 16


@pytest.fixture
def budget() -> Budget:
    budget = Budget(ROWS * ROW, ROW)
    sweep(budget, 0)
    return budget


def found(rows: int) -> Swept:
    return Swept({"own": (rows, ROW)})


def sweep(budget: Budget, rows: int) -> None:
    budget.begin_sweep()
    budget.end_sweep(found(rows))


def reserve(budget: Budget) -> int:
    """How many rows may be stored."""
    count = 0
    while budget.reserve():
        count += 1
    return count


def evict_window(budget: Budget) -> None:
    """As often as free space is measured, which others have taken."""
    assert not budget.reserve()
    sweep(budget, 500)
    assert budget.excess_bytes == WINDOW * ROW
    for _ in range(WINDOW):
        budget.limit_growth(-1.0)
        budget.evicted("own", ROW)


def test_below_min_free_rows_are_replaced_and_the_room_of_one_is_not_made_again(budget: Budget) -> None:
    """Else a window would go each time that free space is measured, until none is left."""
    budget.limit_growth(100 * ROW)
    for _ in range(3):
        budget.limit_growth(-1.0)
        evict_window(budget)
        assert not budget.excess_bytes
        assert reserve(budget) == WINDOW
        for _ in range(WINDOW):
            budget.ended(fits=True)


def test_file_system_that_is_full_without_saying_so_gets_rows_in_place_of_old_ones(budget: Budget) -> None:
    """A quota, or no inodes: what it says is free has no room for a row."""
    for _ in range(8):
        budget.reserve()
    budget.limit_growth(1e9)
    for _ in range(8):
        budget.ended(fits=False)
    budget.limit_growth(1e9)
    evict_window(budget)
    for _ in range(100):  # deleting has not helped: no more goes
        budget.limit_growth(1e9)
        assert budget.reserve()
        budget.ended(fits=False)
        sweep(budget, 500)
        assert not budget.excess_bytes
    assert budget.reserve()
    budget.ended(fits=True)
    budget.limit_growth(100 * ROW)
    assert reserve(budget) == WINDOW - 1
