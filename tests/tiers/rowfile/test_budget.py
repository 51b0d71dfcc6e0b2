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
    found = Swept()
    found.add_rows("own", rows, [ROW])
    return found


def sweep(budget: Budget, rows: int) -> None:
    budget.begin_sweep()
    budget.end_sweep(found(rows))


def reserve(budget: Budget) -> int:
    """How many rows may be stored."""
    count = 0
    while budget.reserve():
        count += 1
    return count


def test_new_process_sweeps_first() -> None:
    budget = Budget(ROWS * ROW, ROW)
    assert budget.sweep_due
    assert not budget.reserve()
    sweep(budget, 0)
    assert not budget.sweep_due
    assert budget.reserve()


def test_window_is_a_64th_of_the_capacity_and_16_rows_at_least() -> None:
    assert Budget(64 << 20, ROW).window_bytes == 1 << 20
    assert Budget(1 << 20, ROW).window_bytes == 16 * ROW


def test_sweep_is_due_when_half_of_the_window_is_used_up(budget: Budget) -> None:
    for _ in range(WINDOW // 2):
        assert budget.reserve()
    assert not budget.sweep_due
    assert budget.reserve()
    assert budget.sweep_due
    sweep(budget, WINDOW // 2 + 1)
    assert budget.sweep_due, "they are still being written"
    for _ in range(WINDOW // 2 + 1):
        budget.ended()
    sweep(budget, WINDOW // 2 + 1)
    assert not budget.sweep_due


def test_sweep_keeps_what_is_being_written_and_what_was_reserved_since_it_began(budget: Budget) -> None:
    """16 rows are reserved, none has its name yet, and a sweep finds nothing: 16 others would be twice the window."""
    for _ in range(10):
        budget.reserve()
    for _ in range(4):
        budget.ended()
    budget.begin_sweep()
    for _ in range(3):
        assert budget.reserve()
    budget.end_sweep(found(4))
    assert budget.used_bytes == (4 + 6 + 3) * ROW
    assert reserve(budget) == WINDOW - 6 - 3


def test_sweep_that_failed_changes_nothing(budget: Budget) -> None:
    assert reserve(budget) == WINDOW
    budget.begin_sweep()
    budget.end_sweep(None)
    assert budget.sweep_due
    assert not budget.reserve()


def test_full_directory_is_swept_before_anything_is_evicted(budget: Budget) -> None:
    """Others may have made room."""
    sweep(budget, ROWS - 4)
    assert reserve(budget) == 4
    assert budget.sweep_due
    assert not budget.excess_bytes
    sweep(budget, ROWS - 50)
    assert not budget.excess_bytes
    assert budget.reserve()


def test_eviction_frees_a_window_for_a_row_that_was_refused(budget: Budget) -> None:
    sweep(budget, ROWS)
    assert not budget.excess_bytes  # nobody wants to store
    assert not budget.reserve()
    sweep(budget, ROWS)
    while budget.excess_bytes:
        budget.evicted("own", ROW)
    assert budget.used_bytes == (ROWS - WINDOW) * ROW
    assert reserve(budget) == WINDOW


def test_row_is_stored_as_soon_as_there_is_room_while_more_is_made(budget: Budget) -> None:
    sweep(budget, ROWS)
    budget.reserve()
    sweep(budget, ROWS)
    budget.evicted("own", ROW)
    assert budget.reserve()
    assert budget.excess_bytes == WINDOW * ROW


def test_nothing_that_can_be_evicted_is_no_reason_to_go_on(budget: Budget) -> None:
    sweep(budget, ROWS)
    budget.reserve()
    sweep(budget, ROWS)
    budget.no_room(others=True)
    assert not budget.excess_bytes
    assert not budget.full
    assert budget.sweep_due
    sweep(budget, ROWS)
    budget.no_room(others=False)
    assert budget.full
    assert not budget.excess_bytes
    assert not budget.sweep_due
    assert not budget.reserve()
    assert budget.sweep_due
    sweep(budget, ROWS)
    assert not budget.full


def test_very_small_directory_keeps_three_quarters() -> None:
    budget = Budget(8 * ROW, ROW)
    sweep(budget, 8)
    budget.reserve()
    sweep(budget, 8)
    assert budget.excess_bytes == 2 * ROW


def test_rows_of_other_namespaces_count_as_the_largest_of_some() -> None:
    budget = Budget(ROWS * ROW, ROW)
    budget.begin_sweep()
    swept = found(100)
    swept.add_rows("other", 10, [3 * ROW, ROW])
    swept.add_unfinished(100, ROW)
    swept.add_unfinished(5 * ROW, ROW)
    budget.end_sweep(swept)
    assert budget.used_bytes == (100 + 30 + 1 + 5) * ROW
    budget.evicted("other", ROW)
    assert budget.used_bytes == (100 + 29 + 1 + 5) * ROW
    budget.evicted("other", 4 * ROW)  # no more than it was counted
    assert budget.used_bytes == (100 + 26 + 1 + 5) * ROW
    budget.evicted("new", 4 * ROW)  # it was not counted at all
    assert budget.used_bytes == (100 + 26 + 1 + 5) * ROW


def test_row_is_not_evicted_while_a_sweep_runs(budget: Budget) -> None:
    """The sweep has not come to it, so its base never had it."""
    budget.begin_sweep()
    with pytest.raises(AssertionError):
        budget.evicted("own", ROW)


def test_below_min_free_only_what_this_process_evicts_makes_room(budget: Budget) -> None:
    """With each counting what all evict, free space would drain."""
    sweep(budget, 500)
    budget.limit_growth(2 * ROW)
    assert reserve(budget) == 2
    sweep(budget, 400)
    assert not budget.reserve()
    assert budget.excess_bytes == WINDOW * ROW
    budget.evicted("own", ROW)
    assert reserve(budget) == 1
