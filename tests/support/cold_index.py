"""A cold index in plain Python, in place of memory.cold_index.SharedColdIndex."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from nixl_tiers.chunk import Key

_DIGEST = b"digest of "


def key_of(digest: bytes) -> Key:
    """The key of a digest that PlainColdIndex made."""
    assert digest.startswith(_DIGEST), f"{digest!r} is not one of these digests"
    return digest[len(_DIGEST) :]


class PlainColdIndex:
    """A ColdIndex over `rows`, (slot, key, tick) each, the coldest first."""

    def __init__(self, rows: Iterable[tuple[int, Key, int]], named: bool = False) -> None:
        self.named = named
        self.closed = False
        self._rows = {key: (slot, tick) for slot, key, tick in rows}

    @property
    def slots(self) -> list[int]:
        return [slot for slot, _ in self._rows.values()]

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, key: Key) -> tuple[int, int] | None:
        assert not self.closed, "rows are used after they were closed"
        return self._rows.get(key)

    def remove(self, key: Key) -> tuple[int, int] | None:
        assert not self.closed, "rows are used after they were closed"
        return self._rows.pop(key, None)

    def coldest(self, count: int) -> list[tuple[bytes, int]]:
        victims = list(islice(self._rows, count))
        return [(key if self.named else _DIGEST + key, self._rows.pop(key)[0]) for key in victims]

    def claim(self, taken: bytearray, slots_limit: int) -> None:
        for key, (slot, _) in list(self._rows.items()):
            if slot >= slots_limit or taken[slot]:
                del self._rows[key]
            else:
                taken[slot] = 1

    def release(self, taken: bytearray) -> None:
        for slot in self.slots:
            taken[slot] = 0

    def close(self) -> None:
        self._rows.clear()
        self.closed = True
