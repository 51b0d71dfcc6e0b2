"""Places of a tier that are left alone for a while, as their moves failed or hung."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.slots import SlotCount

FAILED_ONE_IN: Final = 100  # slots; never all
NEVER: Final = float("inf")
MAX_PLACES: Final = 4096
A_TURN: Final = 256  # places that are used again, in one turn
MOST_ASIDE_S: Final = 86400.0

Place = int | Key


class SetAside:
    """Places of a tier that are left alone for a while: a slot, or a key where slots only count, whose move failed or
    is late, or that a mover most likely died of. A mover that reads one bad sector again after each restart would die
    for ever. For twice as long if it happens again, unless it has been moved well meanwhile. At most MAX_PLACES: the
    first ones are used again.
    """

    __slots__ = ("_lasted_s", "_next_s", "until_s")

    def __init__(self) -> None:
        # By place, those set aside first in front. Public to be asked for its truth, which costs less than a call.
        self.until_s: dict[Place, float] = {}
        self._lasted_s: OrderedDict[Place, float] = OrderedDict()  # also of places that are used again
        self._next_s = NEVER

    def add(self, place: Place, least_s: float, now: float) -> None:
        """Leave it alone for `least_s`; longer, if it was before."""
        again = 1 if place in self.until_s else 2
        lasted_s = min(MOST_ASIDE_S, max(least_s, again * self._lasted_s.pop(place, 0.0)))
        self._lasted_s[place] = lasted_s
        if len(self._lasted_s) > MAX_PLACES:
            self._lasted_s.popitem(last=False)
        self.until_s.pop(place, None)
        self.until_s[place] = now + lasted_s
        self._next_s = min(self._next_s, now + lasted_s)

    def hold(self, place: Place, until_s: float) -> None:
        """Its load is late: leave it alone until that has ended, which tells whether it was a failure."""
        if place not in self.until_s:
            self.until_s[place] = until_s
            self._next_s = min(self._next_s, until_s)
            if place in self._lasted_s:
                self._lasted_s[place] *= 2

    @property
    def known(self) -> bool:
        """Whether any was ever set aside, and nothing shows that nothing is wrong with it."""
        return bool(self._lasted_s or self.until_s)

    def moved(self, place: Place) -> None:
        """A move of it has succeeded: nothing is wrong with it."""
        self._lasted_s.pop(place, None)
        if place in self.until_s:
            self.until_s[place] = self._next_s = -NEVER

    def end(self, now: float) -> list[Place]:
        """Those that may be used again from now on, of those that are set aside; at most A_TURN of them."""
        if now < self._next_s and len(self.until_s) <= MAX_PLACES:
            return []
        first = set(islice(self.until_s, max(0, len(self.until_s) - MAX_PLACES)))
        over = (place for place, until_s in self.until_s.items() if until_s <= now or place in first)
        ended = [*islice(over, A_TURN)]
        for place in ended:
            del self.until_s[place]
        self._next_s = min(self.until_s.values(), default=NEVER)
        return ended


class IdleSlots:
    """Slots that are set aside and have no row: nobody gets them before the end of that. Of those whose write failed at
    most one in FAILED_ONE_IN waits for it, lest failures shrink the tier."""

    def __init__(self, slots: SlotCount, aside: SetAside) -> None:
        self._slots = slots
        self._aside = aside
        # By part, as each member's are counted apart; those that failed first in front.
        self._unwritten: dict[SlotCount, dict[int, None]] = {}  # whose write failed
        self._others: dict[SlotCount, dict[int, None]] = {}

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable((*self._unwritten.values(), *self._others.values()))

    def add(self, slot: int, *, unwritten: bool) -> None:
        """The row of this slot, which is set aside, is gone."""
        part, number = self._slots.part_of(slot)
        part.retire()
        idle = (self._unwritten if unwritten else self._others).setdefault(part, {})
        idle[slot] = None
        if number >= part.limit:
            self._forgive([slot])
        elif unwritten:
            self.write_again(part, len(idle) - -(-(part.limit - 1) // FAILED_ONE_IN))

    def write_again(self, part: SlotCount, most: int = MAX_PLACES) -> None:
        """Slots of this part whose write failed may be written again, those that failed first in front."""
        self._forgive([*islice(self._unwritten.get(part, ()), max(0, most))])

    def cut(self, part: SlotCount, limit: int) -> None:
        """Those of this part from `limit` on are no slots any more."""
        idle = chain(self._unwritten.get(part, ()), self._others.get(part, ()))
        self._forgive([slot for slot in idle if self._slots.part_of(slot)[1] >= limit])

    def end(self, now: float) -> None:
        """Call at every turn: what was set aside for long enough is used again."""
        for place in self._aside.end(now):
            if isinstance(place, int):
                self._use_again(place)

    # --- inside ------------------------------------------------------------------------------------------------

    def _forgive(self, slots: Iterable[int]) -> None:
        """As if nothing had failed in them."""
        for slot in slots:
            self._aside.moved(slot)
            self._use_again(slot)

    def _use_again(self, slot: int) -> None:
        """If nobody has it."""
        part, _ = self._slots.part_of(slot)
        for idle in (self._unwritten.get(part, {}), self._others.get(part, {})):
            if slot in idle:
                del idle[slot]
                part.restore()
                self._slots.release(slot)
