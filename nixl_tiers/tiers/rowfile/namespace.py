"""What the engine knows of a namespace of row files, and what it has to be told: others write and delete there too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from nixl_tiers.chunk import Key
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import GONE, Entry
from nixl_tiers.tiers.disk import HealthMonitor
from nixl_tiers.tiers.rowfile.quota import Place
from nixl_tiers.tiers.rowfile.scanner import DirScanner

_SPARE_SLOTS: Final = 64  # that listings leave to stores: what the engine has no slot for it would have deleted


@dataclass
class NamespaceRows:
    """The namespace being served. `known`: what the engine has been told of, or has stored, and not forgotten.

    `is_old` tells whether a row whose age counts from then, in Unix seconds, is too old and yet to be left where it is.
    """

    name: str
    sealer: Sealer
    slots: int
    health: HealthMonitor
    shelves: DirScanner
    is_old: Callable[[int], bool]
    known: set[Key] = field(default_factory=set)
    before: set[Key] = field(default_factory=set)  # what the engine was told of before the medium went away
    storing: Counter[Key] = field(default_factory=Counter)
    dropping: Counter[Key] = field(default_factory=Counter)
    tick: int = 0

    def compare(self) -> tuple[list[tuple[int, Key, Place]], list[Key]]:
        """On the lister's thread: (modification time, key, place) of what the engine may not know of, the oldest
        first, and keys that it may believe in for no reason. Both to be looked at again by the tier's own thread."""
        if not self.shelves.scan():
            return [], []
        row_bytes = self.sealer.geometry.row_bytes
        here, new = set[Key](), []
        for seen, place in self.shelves.rows_of(self.name):
            key = place.key
            if key is None or self.is_old(seen.sealed_at):
                continue
            here.add(key)
            if seen.size == row_bytes and key not in self.known:
                new.append((seen.modified_ns, key, place))
        new.sort()
        return new, [key for key in self.known.copy() if key not in here]

    def still_gone(self, keys: list[Key]) -> Iterator[Entry]:
        """Forget those of them that are still not there, and tell the engine."""
        for key in keys:
            unknown = key not in self.known or self.storing[key]
            place = Place.of(self.name, key)
            if not unknown and (not self.shelves.has(place) or self.is_old(self.shelves.sealed_at(place))):
                self.known.remove(key)
                yield Entry(GONE, key, 0)

    def still_new(self, rows: list[tuple[int, Key, Place]]) -> Iterator[Entry]:
        """Tell the engine of those that are still there, the newest if there are too many."""
        most = self.slots - min(_SPARE_SLOTS, self.slots // 16)
        rows = rows[max(0, len(rows) - max(0, most - len(self.known))) :]
        before_ns, slot = -1, 0
        for modified_ns, key, place in rows:
            if len(self.known) >= most:
                return
            if key not in self.known and not self.dropping[key] and self.shelves.has(place):
                self.tick += modified_ns > before_ns
                before_ns = modified_ns
                self.known.add(key)
                yield Entry(slot, key, self.tick)
                slot += 1
