"""Each of these planted bugs in what an engine counts and deletes must be caught by the simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nixl_tiers.tiers.base import expire_if_due
from nixl_tiers.tiers.rowfile.budget import Budget, Swept
from nixl_tiers.tiers.rowfile.evict import Row
from nixl_tiers.tiers.rowfile.expire import Expiry
from tests.tiers.rowfile.directory_machine import File, Files, Process, Store, explore
from tests.tiers.rowfile.test_directory_machine import _small

__all__ = ["_small"]

SEEDS = 200

# --- what is counted


class WritingIsForgotten(Budget):
    """A sweep begins with nothing of its own: what is being written then gets its name behind it."""

    def begin_sweep(self) -> None:
        super().begin_sweep()
        self._next_own_bytes = 0


class OwnIsWhatEndedSince(Budget):
    """Counted when a store ends, not when it begins."""

    def reserve(self, rows: int = 1) -> bool:
        before = self._own_bytes, self._next_own_bytes
        granted = super().reserve(rows)
        self._own_bytes, self._next_own_bytes = before
        return granted

    def ended(self) -> None:
        super().ended()
        self._own_bytes += self.row_bytes
        if self._next_own_bytes is not None:
            self._next_own_bytes += self.row_bytes


class OwnBeginsAtTheEndOfASweep(Budget):
    def end_sweep(self, found: Swept | None) -> None:
        self._next_own_bytes = self._writing_bytes
        super().end_sweep(found)


class RunningSweepTakesReservations(Budget):
    """They count in the account to come, not in the one by which they are granted."""

    def reserve(self, rows: int = 1) -> bool:
        own = self._own_bytes
        granted = super().reserve(rows)
        if self._next_own_bytes is not None:
            self._own_bytes = own
        return granted


class NewProcessStoresFirst(Budget):
    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        super().__init__(capacity_bytes, row_bytes)
        self._found = Swept()


class NoWindow(Budget):
    """Whoever sees room stores."""

    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        super().__init__(capacity_bytes, row_bytes)
        self.window_bytes = capacity_bytes


class WindowIsUsedBeyondItsEnd(Budget):
    """The row that is stored last exceeds it."""

    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        super().__init__(capacity_bytes, row_bytes)
        self.window_bytes += row_bytes


class OwnIsNotAddedToTheBase(Budget):
    def _lacking_bytes(self, nbytes: int) -> float:
        return self._base_bytes - self.capacity_bytes + nbytes


class FailedStoreIsGivenBack(Budget):
    """As if each row that has ended were found by the last sweep: also the one whose file stays."""

    def ended(self) -> None:
        super().ended()
        self._own_bytes -= self.row_bytes


class FailedSweepCounts(Budget):
    """By what little it has found."""

    def end_sweep(self, found: Swept | None) -> None:
        super().end_sweep(found or Swept())


class DeletedRowTakesWhatOwnRowsTake(Budget):
    """Whatever the namespace."""

    def evicted(self, namespace: str, nbytes: int) -> None:
        super().evicted(namespace, nbytes)
        self._base_bytes -= 2 * nbytes - min(nbytes, self.row_bytes)


BUDGETS = (
    WritingIsForgotten,
    OwnIsWhatEndedSince,
    OwnBeginsAtTheEndOfASweep,
    RunningSweepTakesReservations,
    NewProcessStoresFirst,
    NoWindow,
    WindowIsUsedBeyondItsEnd,
    OwnIsNotAddedToTheBase,
    FailedStoreIsGivenBack,
    FailedSweepCounts,
    DeletedRowTakesWhatOwnRowsTake,
)

# --- what is found, and deleted


class SweepIgnoresUnfinishedFiles(Process):
    def read_incoming(self, found: Swept) -> Iterator[None]:
        return iter(())


class SweepIgnoresUnfinishedFilesOfTheDead(Process):
    """They are nobody's."""

    def read_incoming(self, found: Swept) -> Iterator[None]:
        before = found.other_bytes
        yield from super().read_incoming(found)
        found.other_bytes = before


class OtherRowsTakeWhatOwnTake(Process):
    def read_rows(self, found: Swept) -> Iterator[None]:
        yield from super().read_rows(found)
        found.rows = {namespace: (names, self.row_bytes) for namespace, (names, _) in found.rows.items()}


class SweepSeesItsOwnNamespace(Process):
    def read_rows(self, found: Swept) -> Iterator[None]:
        yield from super().read_rows(found)
        found.rows = {namespace: rows for namespace, rows in found.rows.items() if namespace == self.namespace}


class StoreEndsWhileItIsWritten(Process):
    """One that is given up counts as ended, and gets its name later."""

    def reserve(self, place: tuple[str, str, str]) -> bool:
        granted = super().reserve(place)
        if granted and self.world.random.random() < 0.3:
            self.budget.ended()
            self.stores[-1].given_up = True  # type: ignore[attr-defined]
        return granted

    def end(self, store: Store) -> None:
        if hasattr(store, "given_up"):
            self.stores.remove(store)
        else:
            super().end(store)


class DeletesWithoutASecondLook(Process):
    class files(Files):  # noqa: N801
        def is_unchanged(self, file: File, row: Row) -> bool:
            return True


class CorruptRowsAreEvicted(Process):
    """Another thread deletes them, and tells of those that went during a sweep when that has ended."""

    late: tuple[tuple[str, int], ...] = ()

    def corrupted(self, place: tuple[str, str, str], file: File) -> None:
        self.late += ((place[0], file.nbytes),)

    def sweep(self) -> Iterator[None]:
        self.late = ()
        yield from super().sweep()
        for row in self.late:
            self.budget.evicted(*row)


PROCESSES = (
    SweepIgnoresUnfinishedFiles,
    SweepIgnoresUnfinishedFilesOfTheDead,
    OtherRowsTakeWhatOwnTake,
    SweepSeesItsOwnNamespace,
    StoreEndsWhileItIsWritten,
    DeletesWithoutASecondLook,
    CorruptRowsAreEvicted,
)

# --- what expires


class AgeBeginsAtTheLastUse(Expiry):
    def _check(self, rows: Sequence[Row], server_s: float) -> None:
        super()._check([row for row in rows if expire_if_due(row.used_ns / 1e9, server_s, self._max_age_s)], server_s)


class AllSealsAreRead(Expiry):
    def _delete(self, rows: Sequence[Row]) -> None:
        self._files.sealed_at(rows)
        super()._delete(rows)


class PassesAreRare(Expiry):
    def __init__(self, *named: Any) -> None:
        super().__init__(*named)
        self.pass_s = self._max_age_s / 2


class RowsAheadStay(Expiry):
    """Nothing is done about them."""

    def _check(self, rows: Sequence[Row], server_s: float) -> None:
        super()._check([row for row in rows if row.used_ns / 1e9 < server_s], server_s)


class OwnRowsExpire(Process):
    """Those of other namespaces are for others to delete."""

    class files(Files):  # noqa: N801
        def sealed_at(self, rows: Sequence[Row]) -> Sequence[int | None]:
            return [
                at if row.namespace == self.process.namespace else None
                for at, row in zip(super().sealed_at(rows), rows, strict=True)
            ]


EXPIRIES = (AgeBeginsAtTheLastUse, AllSealsAreRead, PassesAreRare, RowsAheadStay)


def named(mutant: type) -> dict[str, Any]:
    """What the simulation is given to have it."""
    if issubclass(mutant, Budget):
        return {"budget": mutant}
    if issubclass(mutant, Expiry):
        return {"process": type("Expires", (Process,), {"expiry": mutant})}
    return {"process": mutant}


HOLDS = r"beyond the bound|below the truth|more than a window|used since|read in vain|expire"


@pytest.mark.parametrize("mutant", [*BUDGETS, *PROCESSES], ids=lambda mutant: mutant.__name__)
def test_planted_bug_is_caught(mutant: type) -> None:
    with pytest.raises(AssertionError, match=HOLDS):
        explore(range(SEEDS), **named(mutant))


@pytest.mark.parametrize("mutant", [*EXPIRIES, OwnRowsExpire], ids=lambda mutant: mutant.__name__)
def test_planted_bug_keeps_rows_from_expiring(mutant: type) -> None:
    with pytest.raises(AssertionError, match=HOLDS):
        explore(range(SEEDS), 300, settle=True, **named(mutant))
