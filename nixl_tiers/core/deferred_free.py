"""Garbage: large structures that are not used any more, and are freed piece by piece without the coordinator's lock.

To free a dict of a million rows at once keeps the interpreter's lock for a tenth of a second, whoever does it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol, runtime_checkable

_CONTAINERS = (dict, set, list, deque)
SMALL: Final = 64  # entries that are freed at once
A_PART: Final = 1024  # of a structure that frees itself in parts: so many entries take as long


@runtime_checkable
class Freeable(Protocol):
    """What frees itself in parts."""

    def free(self, parts: int, /) -> bool:
        """Free so many; whether any is left."""


class DeferredFree:
    """`add` with the lock held, `drop` without it, by any thread: each frees what it has taken out."""

    def __init__(self) -> None:
        self._structures: deque[Any] = deque()

    def __bool__(self) -> bool:
        return bool(self._structures)

    def add(self, *structures: Any) -> None:
        """Dicts, sets, lists and deques, or objects that have such attributes, which nothing else refers to. Also those
        that are empty by now: a dict keeps the memory of all the entries that it once had."""
        self._structures += structures

    def drop(self, most: int) -> None:
        """Free up to `most` entries."""
        while most > 0:
            try:
                structure = self._structures.pop()
            except IndexError:
                return
            if isinstance(structure, Freeable):
                if structure.free(1):
                    self._structures.append(structure)
                most -= A_PART
                continue
            if not isinstance(structure, _CONTAINERS):
                self.add(*(vars(structure).values() if hasattr(structure, "__dict__") else ()))
                continue
            while structure and most > 0:
                most -= 1
                entry = structure.popitem()[1] if isinstance(structure, dict) else structure.pop()
                if isinstance(entry, _CONTAINERS) and len(entry) > SMALL:
                    self.add(entry)
            if structure:
                self._structures.append(structure)
