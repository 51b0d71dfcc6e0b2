"""Byte accounting of a private prefix: what is stored below it, and what that leaves of the capacity. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nixl_tiers.chunk import Key


class PrefixQuota:
    """Every object below the prefix is counted in one of four sets: rows held, rows that a listing has found but not
    yet returned, rows of other namespaces or sizes (other rows), and pending deletes.

    An upload counts from its start, a delete until it is confirmed: `used_bytes` is never less than the truth.
    """

    def __init__(self, row_bytes: int, capacity_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._capacity_bytes = capacity_bytes
        self._held: set[Key] = set()
        self._unlisted = 0
        self._other_rows: dict[str, int] = {}  # bytes by name, oldest first
        self._other_bytes = 0
        self._pending_deletes: dict[str, int] = {}  # bytes by name
        self._pending_bytes = 0

    @property
    def used_bytes(self) -> int:
        return (len(self._held) + self._unlisted) * self._row_bytes + self._other_bytes + self._pending_bytes

    @property
    def held(self) -> Collection[Key]:
        """The rows that are held; a view, which changes."""
        return self._held

    def begin_listing(self, other_rows: Sequence[tuple[str, int]], rows: int) -> None:
        """A listing has found `other_rows` (name, bytes; oldest first), and `rows` rows, each of which is passed to
        `add_listed`."""
        self._other_rows = {name: nbytes for name, nbytes in other_rows if name not in self._pending_deletes}
        self._other_bytes = sum(self._other_rows.values())
        self._unlisted = rows

    def add_listed(self, key: Key, name: str) -> bool:
        """One of the rows of `begin_listing`. False if it has been stored or deleted since it was listed."""
        self._unlisted -= 1
        if key in self._held or name in self._pending_deletes:
            return False
        self._held.add(key)
        return True

    def reserve(self, key: Key, name: str) -> bool:
        """Count a row that is about to be uploaded, perhaps over an object of that name. False if it does not fit."""
        if key in self._held:
            return True
        before = self._pending_deletes.get(name, 0) + self._other_rows.get(name, 0)
        if self.used_bytes - before + self._row_bytes > self._capacity_bytes:
            return False
        self.confirm_delete(name)
        self._other_bytes -= self._other_rows.pop(name, 0)
        self._held.add(key)
        return True

    def make_room(self, rows: int) -> list[str]:
        """Mark the oldest other rows as deleted, until `rows` more rows fit; returns their names, for the delete
        requests."""
        names: list[str] = []
        room = self._capacity_bytes - (self.used_bytes - self._pending_bytes)
        while room < rows * self._row_bytes and self._other_rows:
            name, nbytes = next(iter(self._other_rows.items()))
            room += nbytes
            names += self.delete_other_rows([name])
        return names

    def delete_other_rows(self, names: Sequence[str]) -> list[str]:
        """Mark these other rows as deleted; returns those that exist, for the delete requests."""
        known = [name for name in names if name in self._other_rows]
        for name in known:
            nbytes = self._other_rows.pop(name)
            self._other_bytes -= nbytes
            self._mark_deleted(name, nbytes)
        return known

    def delete(self, key: Key, name: str) -> bool:
        """Mark a row as deleted: it counts until that is confirmed. False if it was not held."""
        if key not in self._held:
            return False
        self._held.remove(key)
        self._mark_deleted(name, self._row_bytes)
        return True

    def is_pending_delete(self, name: str) -> bool:
        """Whether a delete of this object is not confirmed yet."""
        return name in self._pending_deletes

    def confirm_delete(self, name: str) -> None:
        """The server has confirmed this delete."""
        self._pending_bytes -= self._pending_deletes.pop(name, 0)

    def forget(self, key: Key, name: str) -> None:
        """The row does not exist any more, or is not this tier's to delete."""
        self._held.discard(key)
        self.confirm_delete(name)

    def _mark_deleted(self, name: str, nbytes: int) -> None:
        self._pending_deletes[name] = nbytes
        self._pending_bytes += nbytes
