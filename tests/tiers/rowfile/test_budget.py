"""What an engine's budget says, step by step, and which rows are evicted, in a directory of the usual shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from nixl_tiers.tiers.rowfile.budget import Budget, Swept
from nixl_tiers.tiers.rowfile.evict import FANOUTS, OLD_SHARE, Evictor, Row

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


# --- eviction --------------------------------------------------------------------------------------------------------

MODELS = {"large": 6000, "small": 2000, "new": 24}  # rows, by namespace


class Directory:
    """Of all ages alike, but of the newest namespace, whose rows are new."""

    def __init__(self, random: Random) -> None:
        ages = iter(random.sample(range(1, 10**6), sum(MODELS.values())))
        self.there = {
            Row(namespace, random.choice(FANOUTS), f"{number}", 10**9 if namespace == "new" else next(ages), ROW)
            for namespace, count in MODELS.items()
            for number in range(count)
        }
        self.by_place: dict[tuple[str, str], set[Row]] = {}
        for row in self.there:
            self.by_place.setdefault(row[:2], set()).add(row)
        self.deleted: list[Row] = []
        self.looked_at = 0

    def namespaces(self) -> Sequence[str]:
        return list(MODELS)

    def rows(self, namespace: str, fanout: str) -> Sequence[Row]:
        rows = sorted(self.by_place.get((namespace, fanout), ()))
        self.looked_at += len(rows)
        return rows

    def unlink(self, rows: Sequence[Row]) -> Sequence[Row]:
        for row in rows:
            self.by_place[row[:2]].remove(row)
            self.there.remove(row)
        self.deleted += rows
        return rows


def refuse_row(budget: Budget, files: Directory) -> None:
    """So that room is made for it."""
    for _ in range(2):
        budget.begin_sweep()
        found = Swept()
        for namespace in MODELS:
            found.rows[namespace] = sum(row.namespace == namespace for row in files.there), ROW
        budget.end_sweep(found)
        budget.reserve()
    assert budget.excess_bytes


def evict(share: float, seed: int = 0, files: Directory | None = None) -> Directory:
    """Room for this share of all rows is made in a full directory."""
    random = Random(seed)
    files = files or Directory(random)
    count = len(files.there)
    budget = Budget(int(count * ROW / (1 + share)), ROW)
    budget.room_bytes = 0
    refuse_row(budget, files)
    assert not any(Evictor(files, budget, random).steps())
    assert not budget.excess_bytes
    assert len(files.there) * ROW <= budget.capacity_bytes, "there is no room"
    assert len(files.there) * ROW > budget.capacity_bytes - ROW, "more was deleted than had to"
    return files


def test_rows_of_about_the_oldest_eighth_go() -> None:
    """All that holds of an eviction of a 64th, a third, and half."""
    starts = set()
    for seed in range(3):
        files = evict(1 / 64, seed)
        starts.add(files.deleted[0].fanout)
        before = sorted((row for row in [*files.there, *files.deleted]), key=lambda row: row.used_ns)
        newest = max(before.index(row) for row in files.deleted)
        assert newest < 1.25 * len(before) / OLD_SHARE, "a row was deleted that is not old"
        assert files.looked_at < len(before) / 2, "more was looked at than had to"
        by_directory = Counter(row.fanout for row in files.deleted)
        rows_of = Counter(row.fanout for row in before)
        assert max(by_directory[name] / rows_of[name] for name in by_directory) < 0.5, "a hole in every prefix"
    assert len(starts) > 1, "engines begin at the same place"
    for share in (0.5, 1.0):
        files = evict(share)
        by_namespace = Counter(row.namespace for row in files.deleted)
        assert by_namespace["new"] == 0, "rows were deleted that are new"
        shares = [by_namespace[name] / MODELS[name] for name in ("large", "small")]
        assert abs(shares[0] - shares[1]) < 0.05, "one namespace pays for another"
    ties = Directory(Random(0))
    ties.there = {row._replace(used_ns=5) for row in ties.there}
    for place, rows in ties.by_place.items():
        ties.by_place[place] = {row._replace(used_ns=5) for row in rows}
    evict(1 / 64, files=ties)
