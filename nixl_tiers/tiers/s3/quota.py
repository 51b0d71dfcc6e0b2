"""What stands in a prefix of a bucket, as far as it is known, and what that leaves of the budget. Pure book-keeping."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nixl_tiers.chunk import Key


class PrefixQuota:
    """Every object below the prefix is in one of four books: held rows, rows not adopted yet, strangers, the doomed.

    An upload counts from its start, a delete until it is confirmed: `used_bytes` is never less than the truth.
    """

    def __init__(self, row_bytes: int, capacity_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._capacity_bytes = capacity_bytes
        self._held: set[Key] = set()
        self._unmet = 0
        self._strangers: dict[str, int] = {}  # bytes by name, oldest first
        self._strangers_bytes = 0
        self._doomed: dict[str, int] = {}  # bytes by name
        self._doomed_bytes = 0

    @property
    def used_bytes(self) -> int:
        return (len(self._held) + self._unmet) * self._row_bytes + self._strangers_bytes + self._doomed_bytes

    @property
    def held(self) -> Collection[Key]:
        """The rows that are held; changes with the book."""
        return self._held

    def meet(self, strangers: Sequence[tuple[str, int]], rows: int) -> None:
        """A listing has ended: `strangers` (name, bytes; oldest first), and `rows` rows that adopt will name."""
        self._strangers = {name: nbytes for name, nbytes in strangers if name not in self._doomed}
        self._strangers_bytes = sum(self._strangers.values())
        self._unmet = rows

    def adopt(self, key: Key, name: str) -> bool:
        """One of the rows that `meet` announced. False if it has been stored, or dropped, since it was listed."""
        self._unmet -= 1
        if key in self._held or name in self._doomed:
            return False
        self._held.add(key)
        return True

    def hold(self, key: Key, name: str) -> bool:
        """Count a row that is about to be written, over an object of that name if there is one. False: no room yet."""
        if key in self._held:
            return True
        before = self._doomed.get(name, 0) + self._strangers.get(name, 0)
        if self.used_bytes - before + self._row_bytes > self._capacity_bytes:
            return False
        self.gone(name)
        self._strangers_bytes -= self._strangers.pop(name, 0)
        self._held.add(key)
        return True

    def make_room(self, rows: int) -> list[str]:
        """Doom the oldest strangers, as far as `rows` more rows need it; returns their names, to be deleted."""
        names: list[str] = []
        room = self._capacity_bytes - (self.used_bytes - self._doomed_bytes)
        while room < rows * self._row_bytes and self._strangers:
            name, nbytes = next(iter(self._strangers.items()))
            room += nbytes
            names += self.expel([name])
        return names

    def expel(self, names: Sequence[str]) -> list[str]:
        """Doom these strangers; returns those that there are, to be deleted."""
        known = [name for name in names if name in self._strangers]
        for name in known:
            nbytes = self._strangers.pop(name)
            self._strangers_bytes -= nbytes
            self._doom(name, nbytes)
        return known

    def doom(self, key: Key, name: str) -> bool:
        """A row is to be deleted: it counts until it is gone. False if it was not held."""
        if key not in self._held:
            return False
        self._held.remove(key)
        self._doom(name, self._row_bytes)
        return True

    def is_doomed(self, name: str) -> bool:
        """Whether a delete of this object is awaited."""
        return name in self._doomed

    def gone(self, name: str) -> None:
        """The server has confirmed this delete."""
        self._doomed_bytes -= self._doomed.pop(name, 0)

    def lose(self, key: Key, name: str) -> None:
        """The server says that this row is not there."""
        self._held.discard(key)
        self.gone(name)

    def _doom(self, name: str, nbytes: int) -> None:
        self._doomed[name] = nbytes
        self._doomed_bytes += nbytes
