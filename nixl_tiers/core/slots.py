"""Slots: one row each. Where they are places on the medium, they are allocated lowest first, so that it fills from its
start."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from nixl_tiers.base.zeroed import zeroed
from nixl_tiers.core.deferred_free import DeferredFree

SLOT_NUMBERS: Final = (1 << 32) - 1  # the index of a tier has 32 bits for a slot


def slots_each(members: int) -> int:
    """How many slot numbers each of a tier's members has."""
    return SLOT_NUMBERS // members


class SlotCount:
    """`limit` slots that only count: rows are found by key, and every slot is number 0."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._idle = 0  # of those, how many nobody has (`retire`)

    def __len__(self) -> int:
        return self._used - self._idle

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        """Slots beyond a smaller limit stay allocated until their rows are evicted."""
        self._limit = limit

    @property
    def free(self) -> int:
        """How many more rows fit the budget; below zero while a smaller limit is being kept."""
        return self._limit - self._used

    def allocate(self) -> int | None:
        """A free slot, or None if there is none, or if rows beyond the limit still use up the budget."""
        if self._used >= self._limit:
            return None
        self._used += 1
        return 0

    def claim(self, slot: int) -> bool:
        """Allocate this very slot, for a row that the medium lists; False if it is taken or beyond the limit."""
        return self.allocate() is not None

    def release(self, slot: int) -> None:
        """Free a slot."""
        assert self._used, "a free slot is released"
        self._used -= 1

    def part_of(self, slot: int) -> tuple[SlotCount, int]:
        """The slots of the member that has this one, and its number there."""
        return self, slot

    def retire(self) -> None:
        """The row of one of them is gone, and it stays allocated, to nobody, before `restore`."""
        self._idle += 1

    def restore(self) -> None:
        self._idle -= 1

    def claimed(self, count: int, end: int) -> None:
        """So many slots were allocated for rows that the medium lists, all below `end`. This may pass the limit."""
        self._used += count

    def clear(self, garbage: DeferredFree) -> None:
        """No slots any more: the limit is 0."""
        self._limit = self._used = self._idle = 0


class Slots(SlotCount):
    """`limit` slots numbered from 0. A byte of memory for each up to the highest one in use, however many there are:
    the map's pages come when they are touched, since to grow it for a high slot took 8 ms at ten million slots.

    The budget holds because a slot is only got from `allocate` (the lowest free one) or `claim`."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._map = zeroed(limit)
        self._end = 0
        self._searched = 0  # each free slot below this one is in `_freed`
        self._freed: list[int] = []  # a heap of slots that were freed; those that are taken by now are dropped when met

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        if limit > len(self._map):
            self._map.resize(limit)  # moves pages, and copies none
        self._limit = limit
        self._search_from(0)  # slots beyond a smaller limit have been dropped

    @property
    def end(self) -> int:
        """No slot from this one on was ever used."""
        return self._end

    def allocate(self) -> int | None:
        if self._used >= self._limit:
            return None
        while self._freed:
            slot = heappop(self._freed)
            if slot < self._limit and not self._map[slot]:
                break
        else:
            slot = self._map.find(b"\0", self._searched, self._end) if self._searched < self._end else -1
            slot = self._end if slot < 0 else slot
            if slot >= self._limit:
                return None
            self._end = max(self._end, slot + 1)
            self._searched = slot + 1
        self._map[slot] = 1
        self._used += 1
        return slot

    def claim(self, slot: int) -> bool:
        if not 0 <= slot < self._limit:
            return False
        if self._map[slot]:
            return False
        self._end = max(self._end, slot + 1)
        self._map[slot] = 1
        self._used += 1
        return True

    def release(self, slot: int) -> None:
        assert self._map[slot], "a free slot is released"
        self._map[slot] = 0
        self._used -= 1
        if slot < self._searched:
            heappush(self._freed, slot)

    @property
    def map(self) -> memoryview:
        """A byte a slot, 1 if it is allocated, for who marks many slots at a time and says so (`claimed`)."""
        return memoryview(self._map)

    def claimed(self, count: int, end: int) -> None:
        super().claimed(count, end)
        self._end = max(self._end, end)

    def clear(self, garbage: DeferredFree) -> None:
        super().clear(garbage)
        garbage.add(self._map)
        self._map = zeroed(0)
        self._end = 0
        self._search_from(0)

    def _search_from(self, slot: int) -> None:
        if slot < self._searched or self._freed:
            self._searched, self._freed = min(slot, self._searched), []


class MemberSlots(SlotCount):
    """The slots of several members, each in a range of its own. New rows go to them in turns, so that the rows of one
    prompt are read from all of them at once."""

    def __init__(self, members: int) -> None:
        super().__init__(0)
        self.span = slots_each(members)
        self.parts = [Slots(0) for _ in range(members)]
        self._next = 0

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def limit(self) -> int:
        return sum(part.limit for part in self.parts)

    @limit.setter
    def limit(self, limit: int) -> None:
        raise AssertionError("each member has a limit of its own")

    @property
    def free(self) -> int:
        return sum(part.free for part in self.parts)

    def free_in(self, rooms: Sequence[int]) -> int:
        """How many rows fit, where each member takes so many more."""
        return sum(max(0, min(part.free, room)) for part, room in zip(self.parts, rooms, strict=True))

    def allocate_in(self, rooms: list[int]) -> int | None:
        """A free slot of the next member that takes any more rows, which is counted in `rooms`; None: none does."""
        for step in range(len(self.parts)):
            place = (self._next + step) % len(self.parts)
            if rooms[place] > 0 and (slot := self.parts[place].allocate()) is not None:
                rooms[place] -= 1
                self._next = place + 1
                return place * self.span + slot
        return None

    def part_of(self, slot: int) -> tuple[SlotCount, int]:
        place, slot = divmod(slot, self.span)
        return self.parts[place], slot

    def claim(self, slot: int) -> bool:
        place, slot = divmod(slot, self.span)
        return self.parts[place].claim(slot)

    def release(self, slot: int) -> None:
        place, slot = divmod(slot, self.span)
        self.parts[place].release(slot)

    def clear(self, garbage: DeferredFree) -> None:
        for part in self.parts:
            part.clear(garbage)
