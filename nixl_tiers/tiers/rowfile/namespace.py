"""What the core knows of a namespace of row files, compared with what is there: others write and delete in it too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from nixl_tiers.chunk import Key
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import GONE, Entry
from nixl_tiers.tiers.disk import HealthMonitor
from nixl_tiers.tiers.rowfile.quota import DirQuota, RowPath

_SPARE_SLOTS: Final = 64  # left to stores by listings: a listed row without a slot would be deleted


@dataclass
class NamespaceRows:
    """The open namespace. `is_hidden`: whether a row whose age begins then (Unix seconds) is a miss although its file
    stays."""

    name: str
    sealer: Sealer
    slots: int
    health: HealthMonitor
    quota: DirQuota
    is_hidden: Callable[[int], bool]
    known: set[Key] = field(default_factory=set)
    """Keys that were listed to the core or stored by it, and that it has not deleted."""
    known_before: set[Key] = field(default_factory=set)
    """Keys that the core knew before the medium went away, until the first listing after that."""
    storing: Counter[Key] = field(default_factory=Counter)
    deleting: Counter[Key] = field(default_factory=Counter)
    tick: int = 0

    def compare(self) -> tuple[list[tuple[int, Key, RowPath]], list[Key]]:
        """On the lister's thread: rows that the core may not know, as (modification time, key, path), oldest first, and
        keys that it may know although they are gone. `confirm_new` and `confirm_gone` check both on the tier's thread.
        """
        if not self.quota.wait_for_scan():
            return [], []
        row_bytes = self.sealer.geometry.row_bytes
        here, new = set[Key](), []
        for stat, path in self.quota.rows(self.name):
            key = path.key
            if key is None or self.is_hidden(stat.age_from):
                continue
            here.add(key)
            if stat.size == row_bytes and key not in self.known:
                new.append((stat.mtime_ns, key, path))
        new.sort()
        return new, [key for key in self.known.copy() if key not in here]

    def confirm_gone(self, keys: list[Key]) -> Iterator[Entry]:
        """Those that are still gone, as entries for the core; forgets them."""
        for key in keys:
            unknown = key not in self.known or self.storing[key]
            stat = self.quota.stat(RowPath.of(self.name, key))
            if not unknown and (stat is None or self.is_hidden(stat.age_from)):
                self.known.remove(key)
                yield Entry(GONE, key, 0)

    def confirm_new(self, rows: list[tuple[int, Key, RowPath]]) -> Iterator[Entry]:
        """Those that are still there, as entries for the core; the newest if they are too many."""
        most = self.slots - min(_SPARE_SLOTS, self.slots // 16)
        rows = rows[max(0, len(rows) - max(0, most - len(self.known))) :]
        last_ns, slot = -1, 0
        for mtime_ns, key, path in rows:
            if len(self.known) >= most:
                return
            if key not in self.known and not self.deleting[key] and self.quota.stat(path) is not None:
                self.tick += mtime_ns > last_ns
                last_ns = mtime_ns
                self.known.add(key)
                yield Entry(slot, key, self.tick)
                slot += 1
