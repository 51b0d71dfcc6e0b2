"""What the core knows of a namespace of row files, compared with what is there: others write and delete in it too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_tiers.base.chunk import Key
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.disk import HealthMonitor
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.packed_rows import (
    INDEXED,
    PRESENT,
    SERVABLE,
    WAS_INDEXED,
    PackedRows,
    decoded,
    encoded,
    key_array,
    without,
)
from nixl_tiers.tiers.rowfile.quota import DirQuota

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nixl_tiers.tiers.rowfile.packed_rows import Keys, Places

_SPARE_SLOTS: Final = 64  # left to stores by listings: a listed row without a slot would be deleted
_BAND_ROWS: Final = 1 << 16  # listed at a time, or this fraction of all:
_BAND_SHARE: Final = 32
_GONE_ROWS: Final = 4096  # found before they are listed


@dataclass(frozen=True)
class NewRows:
    """Rows to be listed."""

    mtimes_ns: NDArray[np.int64]
    keys: Keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, places: slice | Places) -> NewRows:
        return NewRows(self.mtimes_ns[places], self.keys[places])

    def pairs(self) -> Iterator[tuple[int, Key]]:
        """(modification time, key)"""
        return zip(self.mtimes_ns.tolist(), map(decoded, self.keys.tolist()), strict=True)


@dataclass
class NamespaceRows:
    """The open namespace. `hidden_until`: a row whose age begins by then (Unix seconds) is a miss although its file
    stays; 0: none. Iterators run on the lister's thread, all else on the tier's."""

    name: str
    sealer: Sealer
    slots: int
    health: HealthMonitor
    quota: DirQuota
    hidden_until: Callable[[], int]
    storing: Counter[Key] = field(default_factory=Counter)
    deleting: Counter[Key] = field(default_factory=Counter)
    tick: int = 0

    def begin(self, *, again: bool) -> None:
        """The core's index has no row yet; `again`: it may have those that it had before the medium went away."""
        for (namespace, _), directory in self.quota.directories():
            with self.quota.lock:
                flags = directory.rows.flags
                if again and namespace == self.name:
                    flags |= (flags & INDEXED) * np.uint8(WAS_INDEXED // INDEXED)
                else:
                    flags &= ~np.uint8(WAS_INDEXED)
                flags &= ~np.uint8(INDEXED)
                directory.rows.recount()

    # --- rows to be listed ------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more rows may be listed."""
        indexed = sum(directory.rows.indexed for _, directory in self.quota.directories(self.name))
        return self.slots - min(_SPARE_SLOTS, self.slots // 16) - indexed - len(self.storing)

    def new_rows(self) -> Iterator[NewRows]:
        """Rows that the core does not know, oldest first; the newest if they are too many.
        They count as INDEXED from now on: what is not listed after all goes to `unlist`."""
        times = [np.empty(0, np.int64)]
        for _, directory in self.quota.directories(self.name):
            with self.quota.lock:
                times.append(directory.rows.columns["mtime_ns"][self._new(directory.rows)])
        all_ns = np.concatenate(times)
        del times
        all_ns.sort()
        first = max(0, len(all_ns) - max(0, self.room))
        band = max(_BAND_ROWS, len(all_ns) // _BAND_SHARE)
        edges = [
            (int(all_ns[at]), int(all_ns[min(at + band, len(all_ns)) - 1])) for at in range(first, len(all_ns), band)
        ]
        skipped = first - int(all_ns.searchsorted(edges[0][0])) if edges else 0  # as old as the first one
        del all_ns
        after_ns = -(1 << 63)
        for from_ns, to_ns in edges:
            rows = self._take(max(from_ns, after_ns), to_ns, skipped)
            after_ns, skipped = to_ns + 1, 0
            if len(rows):
                yield rows

    def _take(self, from_ns: int, to_ns: int, skipped: int) -> NewRows:
        """New rows of these times, oldest first, but for the first `skipped` ones."""
        times_ns, keys = [np.empty(0, np.int64)], [np.empty(0, "S1")]
        for _, directory in self.quota.directories(self.name):
            with self.quota.lock:
                rows, mtimes_ns = directory.rows, directory.rows.columns["mtime_ns"]
                new = self._new(rows) & (mtimes_ns >= from_ns) & (mtimes_ns <= to_ns)
                places = self._without_moves(rows, np.flatnonzero(new))
                rows.flags[places] |= INDEXED
                rows.indexed += len(places)
                times_ns.append(mtimes_ns[places])
                keys.append(rows.keys[places])
        taken = NewRows(np.concatenate(times_ns), np.concatenate(keys))
        order = np.argsort(taken.mtimes_ns, kind="stable")
        self.unlist(taken[order[:skipped]])
        return taken[order[skipped:]]

    def unlist(self, rows: NewRows) -> None:
        """Rows of `new_rows` that are not listed: a later listing has them again. On any thread."""
        for raw in rows.keys.tolist():
            self.quota.forget(RowPath.of(self.name, decoded(raw)))

    # --- rows that are gone -----------------------------------------------------------------------------------------

    def gone_rows(self) -> Iterator[list[Key]]:
        """Keys that the core has in its index although they are gone; see `confirm_gone`."""
        found = list[Key]()
        for _, directory in self.quota.directories(self.name):
            with self.quota.lock:
                rows = directory.rows
                gone = (rows.flags & (PRESENT | INDEXED) == INDEXED) | (rows.flags & INDEXED != 0) & self._hidden(rows)
                found += self._keys(rows, np.flatnonzero(gone))
            if len(found) >= _GONE_ROWS:
                yield found
                found = []
        if found:
            yield found

    def confirm_gone(self, key: Key) -> bool:
        """Whether it is still gone; the core's index has it no more then."""
        path = RowPath.of(self.name, key)
        row = self.quota.get(path)
        gone = key not in self.storing and (row is None or 0 < row.age_from <= self.hidden_until())
        return gone and self.quota.forget(path)

    def lost_rows(self) -> Iterator[list[Key]]:
        """After the first listing: keys that the core had before the medium went away, and that were not listed."""
        lost = list[Key]()
        for _, directory in self.quota.directories(self.name):
            with self.quota.lock:
                rows = directory.rows
                places = np.flatnonzero(rows.flags & (WAS_INDEXED | INDEXED) == WAS_INDEXED)
                lost += self._keys(rows, places)
                rows.flags[:] &= ~np.uint8(WAS_INDEXED)
            if len(lost) >= _GONE_ROWS:
                yield lost
                lost = []
        if lost:
            yield lost

    # --- inside, with the lock held ---------------------------------------------------------------------------------

    def _new(self, rows: PackedRows) -> NDArray[np.bool_]:
        new: NDArray[np.bool_] = rows.flags & (PRESENT | SERVABLE | INDEXED) == PRESENT | SERVABLE
        return new & ~self._hidden(rows)

    def _hidden(self, rows: PackedRows) -> NDArray[np.bool_]:
        if not self.hidden_until():
            return np.zeros(len(rows.flags), np.bool_)
        age_from = rows.columns["age_from"]
        hidden: NDArray[np.bool_] = (age_from > 0) & (age_from <= self.hidden_until())
        return hidden

    def _without_moves(self, rows: PackedRows, places: Places) -> Places:
        """Of these rows those that are neither stored nor deleted now."""
        if not len(places):
            return places
        moving = key_array(encoded(key) for key in [*self.storing, *self.deleting])
        return places[without(rows.keys[places], moving)]

    def _keys(self, rows: PackedRows, places: Places) -> list[Key]:
        return [decoded(raw) for raw in rows.keys[self._without_moves(rows, places)].tolist()]
