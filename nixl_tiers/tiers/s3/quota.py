"""What is stored below a prefix, in compact sets of keys, and what that leaves of the capacity. No I/O.

The mover's loop stores and deletes, the control thread compares pages of listings: one lock, held for a page at most.
A page tells how things were at some time between its request and its answer. So what has changed since the request, or
is changing (an upload runs, a delete is not confirmed), is left as the loop knows it: its name is not settled.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.tiers.s3.names import KeySet, Place, RowNames, place_of

PORTION: Final = 1000  # how many of the rows held are compared at a time, or a few more

Kind = tuple[str, int]
"""A namespace, and the bytes of each of its objects."""


@dataclass
class Group:
    """Objects of one kind."""

    keys: KeySet = field(default_factory=KeySet)
    newest_s: float = float("-inf")  # when the newest of them was written, by the server's clock


class PrefixQuota:
    """Every object below the prefix is in one group, or is a pending delete. Rows are those of the group served, other
    rows those of the other groups.

    An upload counts from its start, a delete until it is confirmed: `used_bytes` is never less than the truth, once a
    listing was adopted.
    """

    def __init__(self, names: RowNames, row_bytes: int, capacity_bytes: int) -> None:
        self._names = names
        self._row_bytes = row_bytes
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._served: Kind = ("", row_bytes)
        self._groups: dict[Kind, Group] = {self._served: Group()}
        self._group_bytes = 0
        self._pending_deletes: dict[str, int] = {}  # bytes by name
        self._pending_bytes = 0
        self._unlisted: set[str] = set()  # pending deletes that the first listing has found, and leaves out
        self._uploading: set[str] = set()
        self._changed: set[str] | None = None  # names changed since `watch`; None: nobody watches
        self._complete = False

    # --- the mover's loop -------------------------------------------------------------------------------------------

    def serve(self, namespace: str, newest_s: float) -> bool:
        """From now on the rows are those of this namespace. False: they are not known, so they must be listed.

        The rows served before become other rows, written by `newest_s` (the server's time).
        """
        with self._lock:
            known = any(kind[0] == namespace for kind in self._groups)
            group = self._groups[self._served]
            if self._served[0] != namespace:
                group.newest_s = newest_s
            if not len(group.keys):
                del self._groups[self._served]
            self._served = (namespace, self._row_bytes)
            self._groups.setdefault(self._served, Group())
            return self._complete and not known

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._group_bytes + self._pending_bytes

    def __contains__(self, key: Key) -> bool:
        """Whether this row is held."""
        with self._lock:
            return key in self._rows.keys

    def __len__(self) -> int:
        """How many rows are held."""
        return len(self._rows.keys)

    def reserve(self, key: Key, *, upload: bool = False) -> bool:
        """Count a row that was found, or with `upload` is being uploaded until `upload_ended`. False if it does not
        fit."""
        name = self._name(key)
        with self._lock:
            self._change(name)
            fits = key in self._rows.keys or self._add_row(name, key)
            if fits and upload:
                self._uploading.add(name)
            return fits

    def upload_ended(self, key: Key) -> None:
        name = self._name(key)
        with self._lock:
            self._uploading.discard(name)
            self._change(name)

    def make_room(self, rows: int) -> list[str]:
        """Mark other rows as deleted, until `rows` more rows fit: those of the namespace first whose newest row is the
        oldest. Returns their names, for the delete requests."""
        names: list[str] = []
        with self._lock:
            missing = rows * self._row_bytes - (self._capacity_bytes - self._group_bytes)
            others = sorted((group.newest_s, kind) for kind, group in self._groups.items() if kind != self._served)
            for _, kind in others:
                if missing <= 0:
                    break
                count = -(-missing // max(1, kind[1]))
                places = self._groups[kind].keys.after(b"", count)[:count]
                missing -= kind[1] * len(places)
                names += self._mark_deleted(kind, places)
        return names

    def delete(self, key: Key) -> str | None:
        """Mark a row as deleted: it counts until that is confirmed. Returns its name; None if it was not held."""
        with self._lock:
            if key not in self._rows.keys:
                return None
            return self._mark_deleted(self._served, [place_of(key)])[0]

    def is_pending_delete(self, key: Key) -> bool:
        """Whether a delete of this object is not confirmed yet."""
        return self._name(key) in self._pending_deletes

    def confirm_deletes(self, names: Sequence[str]) -> None:
        """The server has confirmed these deletes, or they were cancelled because their objects are written again."""
        with self._lock:
            for name in names:
                self._confirm(name)

    def drop_pending_deletes(self) -> None:
        """Their objects may still be there: a listing that begins now finds them again."""
        with self._lock:
            self._pending_deletes.clear()
            self._unlisted.clear()
            self._pending_bytes = 0

    def hide(self, key: Key) -> None:
        """The row is there, but is not known from now on. A listing that runs finds it again."""
        with self._lock:
            self._remove(self._served, [place_of(key)])

    def forget(self, key: Key) -> None:
        """The row does not exist any more, or is not this tier's to delete."""
        with self._lock:
            self._remove(self._served, [place_of(key)])
            self._confirm(self._name(key))

    # --- the control thread: pages of a listing ---------------------------------------------------------------------

    def watch(self) -> None:
        """A page, or all pages of a first listing, are about to be requested."""
        with self._lock:
            self._changed = set()
            self._unlisted.clear()

    def unwatch(self) -> None:
        """No page of a listing is being compared any more."""
        with self._lock:
            self._changed = None

    def is_left_alone(self, key: Key) -> bool:
        """Whether a first listing leaves this row to the loop: it has changed since `watch`, or is being deleted."""
        name = self._name(key)
        return name in self._pending_deletes or (self._changed is not None and name in self._changed)

    def adopt(self, listed: Mapping[Kind, Group]) -> None:
        """A whole listing: it replaces what was known, except for what has changed since `watch`."""
        with self._lock:
            held, groups = self._rows, dict(listed)
            rows = groups.setdefault(self._served, Group())
            for name in {*self._pending_deletes, *self._uploading, *(self._changed or ())}:
                found = self._names.parse(name)
                assert found is not None
                namespace, key = found
                for kind, group in groups.items():
                    if kind[0] == namespace:
                        group.keys.discard(key)
                if namespace == self._served[0] and key in held.keys:
                    rows.keys.add(key)
            self._groups = groups
            self._group_bytes = sum(kind[1] * len(group.keys) for kind, group in groups.items())
            self._complete = True

    def compare(
        self, after: Place, upto: Place | None, listed: Sequence[Place]
    ) -> tuple[list[Place], list[Place], Place | None]:
        """Compare a portion of the rows with a listing that has found `listed` behind `after`, up to and with `upto`
        (None: it ends there). Returns what was found, what is gone, and how far this portion goes."""
        with self._lock:
            known = self._rows.keys.after(after, PORTION)
            if len(known) >= PORTION and (upto is None or known[-1] < upto):
                upto = known[-1]
            if upto is not None:
                known = known[: bisect_right(known, upto)]
                listed = listed[: bisect_right(listed, upto)]
            here, there = set(known), set(listed)
            found = [place for place in listed if place not in here and self._is_settled(self._name(place[1:]))]
            gone = [place for place in known if place not in there and self._is_settled(self._name(place[1:]))]
        return found, gone, upto

    def expire(self, namespace: str, key: Key, nbytes: int, *, delete: bool) -> str | None:
        """A page has shown that this object has expired: mark it as deleted, or forget it. Returns its name; None if it
        is not known or not settled."""
        kind, name = (namespace, nbytes), self._names.name(namespace, key)
        with self._lock:
            group = self._groups.get(kind)
            if group is None or key not in group.keys or not self._is_settled(name):
                return None
            if delete:
                self._mark_deleted(kind, [place_of(key)])
            else:
                self._remove(kind, [place_of(key)])
            return name

    def expire_unknown(self, namespace: str, key: Key, nbytes: int) -> str | None:
        """The same during a first listing, which leaves this object out: count it as a pending delete only."""
        name = self._names.name(namespace, key)
        with self._lock:
            if not self._is_settled(name):
                return None
            self._pending_deletes[name] = nbytes
            self._pending_bytes += nbytes
            self._unlisted.add(name)
            return name

    # --- with the lock ----------------------------------------------------------------------------------------------

    @property
    def _rows(self) -> Group:
        return self._groups[self._served]

    def _name(self, key: Key) -> str:
        return self._names.name(self._served[0], key)

    def _change(self, name: str) -> None:
        if self._changed is not None:
            self._changed.add(name)

    def _is_settled(self, name: str) -> bool:
        return not (name in self._pending_deletes or name in self._uploading or name in (self._changed or ()))

    def _add_row(self, name: str, key: Key) -> bool:
        """Add a row that is not held, if it fits, in place of objects of that name."""
        twins = [kind for kind in self._groups if kind[0] == self._served[0] and kind != self._served]
        twins = [kind for kind in twins if key in self._groups[kind].keys]  # objects of that name, of other sizes
        before = self._pending_deletes.get(name, 0) + sum(nbytes for _, nbytes in twins)
        if self._group_bytes + self._pending_bytes - before + self._row_bytes > self._capacity_bytes:
            return False
        self._confirm(name)
        for kind in twins:
            self._remove(kind, [place_of(key)])
        self._add(self._served, [place_of(key)])
        return True

    def _add(self, kind: Kind, places: Sequence[Place]) -> None:
        keys = self._groups[kind].keys
        before = len(keys)
        keys.update(places)
        self._group_bytes += kind[1] * (len(keys) - before)

    def _remove(self, kind: Kind, places: Sequence[Place]) -> None:
        keys = self._groups[kind].keys
        before = len(keys)
        keys.difference_update(places)
        self._group_bytes += kind[1] * (len(keys) - before)
        if not len(keys) and kind != self._served:
            del self._groups[kind]

    def _mark_deleted(self, kind: Kind, places: Sequence[Place]) -> list[str]:
        self._remove(kind, places)
        names = [self._names.name(kind[0], place[1:]) for place in places]
        for name in names:
            self._change(name)
            self._pending_deletes[name] = kind[1]
        self._pending_bytes += kind[1] * len(names)
        return names

    def _confirm(self, name: str) -> None:
        if name in self._unlisted:  # no later page shows it, and there may be millions of them
            self._unlisted.remove(name)
        else:
            self._change(name)
        self._pending_bytes -= self._pending_deletes.pop(name, 0)
