"""The core's index of one storage tier: its rows, their slots, its victims, and what its medium is to delete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.aside import MAX_PLACES, IdleSlots, Place, SetAside
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.host import rows_of_share
from nixl_tiers.core.member import Member
from nixl_tiers.core.rows import ALL_SLOTS, NO_ID, Found, make_rows, room_for_victims
from nixl_tiers.core.slots import MemberSlots, SlotCount, Slots
from nixl_tiers.core.stats import Counters, EvictionHistory, Gone, tag_of
from nixl_tiers.core.types import Columns, PlannedMove, TierSpec, TierState

MAX_SURPLUS: Final = 256  # rows above a quota that are evicted at once
_REMOVED: Final = -1  # the slot of a row that the medium does not hold any more


class TierIndex:
    """Which keys the tier holds. Slots are allocated and released here only, so the budget holds at every step.

    A row is found from its reservation on, and a hit once it is stored. Victims that are written to the tier below
    first (`select_victims`) stay hits until they are evicted.

    Of several members, one that cannot be read holds nothing as long as others take rows: what is computed again is
    stored to these, and the row of before is given up.
    """

    def __init__(  # noqa: PLR0917 - by the tier only
        self,
        spec: TierSpec,
        number: int,
        counters: Counters,
        gone: EvictionHistory,
        garbage: DeferredFree,
        members: Sequence[Member],
    ) -> None:
        self._spec = spec
        self._members = members
        self._divided = len(members) > 1
        self._counters = counters
        self._gone = gone
        self._garbage = garbage
        self._number = number
        self._evicted = tag_of(number, Gone.EVICTED)
        self.slots: SlotCount = Slots(0) if spec.physical_slots else SlotCount(0)
        if self._divided:
            assert spec.physical_slots, "rows without places are divided"
            self.slots = self._parts = MemberSlots(len(members))
        self.rows = make_rows(uses=spec.physical_slots)
        self.aside = SetAside()
        self._idle = IdleSlots(self.slots, self.aside)
        self.changed: Callable[[Key], None] | None = None
        """Called with the key of each row that is stored or goes, but for resets and for rows listed in columns."""
        self.newest_listed = 0
        """The highest tick that the medium listed: all uses in this process are later."""
        self.gone_before = 0
        """Of an asked tier: rows with a lower tick are gone, and are forgotten step by step (`forget_gone`)."""
        self.clears = 0
        """How often it was cleared."""
        self.listing: set[int] = set()
        """Members that have rows which their medium has not confirmed since it was opened again."""

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, key: Key) -> bool:
        """Also for a row that is only reserved, whose write may still fail. A hit is `rows.is_stored`."""
        return key in self.rows and not (self._divided and self._is_away(key))

    def has_many(self, keys: Sequence[Key]) -> list[bool]:
        """`in`, of each key."""
        found = self.rows.has_many(list(keys), False)
        if self._divided and self._some_away:
            return [each and not self._is_away(key) for key, each in zip(keys, found, strict=True)]
        return found

    def can_read_many(self, keys: list[Key]) -> list[bool]:
        """Of each key whether it has a row that is stored, and its member can be read."""
        found = self.rows.has_many(keys, True)
        readable = [member.readable for member in self._members]
        if False in readable:
            return [each and readable[self.member_place_of(key) or 0] for key, each in zip(keys, found, strict=True)]
        return found

    def member_place_of(self, key: Key) -> int | None:
        """Which member has the key's row."""
        found = self.rows.get(key)
        return None if found is None else self.member_place_of_slot(found[0])

    def member_place_of_slot(self, slot: int) -> int:
        return slot // self._parts.span if self._divided else 0

    def begin_listing(self, member: Member) -> bool:
        """The medium lists its rows: all that are here are to be confirmed, or go by a `sweep` over all of them. False
        if another member lists: then they must go before this one lists."""
        alone = self.listing <= {member.place}
        if alone:
            self.rows.begin_listing()
        self.listing.add(member.place)
        return alone

    def has(self, key: Key, row: int) -> bool:
        """Whether the key still has the row of this id."""
        found = self.rows.get(key)
        return found is not None and Found(*found).id == row

    def is_read(self, key: Key, row: int) -> bool:
        """Whether the key still has the row of this id, and a job reads it."""
        found = self.rows.get(key)
        return found is not None and Found(*found).id == row and Found(*found).pins > 0

    # --- room --------------------------------------------------------------------------------------------------

    def make_room(self, count: int, rooms: list[int] | None = None) -> list[Key]:
        """Evict the least valuable rows until `count` slots are free, or all that are left are pinned. Returns the
        victims' keys; none of a tier that is only read. `rooms`: of several members, how many rows each takes: those
        that are evicted may be another's, so that takes some more."""
        if rooms is None:
            return self._make_room(count - self.slots.free)
        victims: list[Key] = []
        for _ in self._members:
            victims += self._make_room(count - self._parts.free_in(rooms))
        return victims

    def _make_room(self, missing: int) -> list[Key]:
        if missing <= 0 or self._spec.write is Write.OFF:
            return []
        return self._evict_all(self.rows.evict(missing))  # some are lost that were to be written below first

    def make_quota_room(self, tenant: int, count: int) -> tuple[int, list[Key]]:
        """How many of `count` rows this tenant's quota has room for, once those of its own that were used least
        recently, and are not pinned, have been evicted; and these."""
        if not (tenant and self._spec.quotas):
            return count, []
        quota = rows_of_share(self._spec.quotas[tenant - 1], self.slots.limit)
        over = min(self.rows.count_of(tenant) - quota, MAX_SURPLUS) + count  # the tier may have become smaller
        victims = self._evict_all(self.rows.evict_of(tenant, over)) if over > 0 else []
        return max(0, min(count, quota - self.rows.count_of(tenant))), victims

    def reserve(self, key: Key, tick: int, tenant: int = 0, rooms: list[int] | None = None) -> tuple[int, int] | None:
        """(slot, id) of a new row that is about to be written, or None if there is no slot; call make_room first.
        `rooms`: of several members, how many rows each takes, of which this is one."""
        slot = self.slots.allocate() if rooms is None else self._parts.allocate_in(rooms)
        if slot is None:
            return None
        if self._divided:  # the row of a member that cannot be read
            self._counters.removed += self.invalidate(key, NO_ID)
        if self._spec.asked:
            tick = self.gone_before  # until it is known when it was written
        row = self.rows.add(key, slot, tick, False, tenant if self._spec.quotas else 0)
        assert row != NO_ID, "a key is stored twice"
        return slot, row

    def set_limit(self, member: Member, limit: int) -> None:
        """Allocate no slot from `limit` on any more; rows in them stay until they are listed as removed."""
        part = self.slots_of(member)
        self._idle.cut(part, limit)
        part.limit = limit

    def slots_of(self, member: Member) -> SlotCount:
        return self._parts.parts[member.place] if self._divided else self.slots

    # --- places that are set aside -------------------------------------------------------------------------------

    def set_aside(self, moves: Iterable[PlannedMove], least_s: float, now: float) -> None:
        """Their places are not loaded from, probed or handed out for a while (`SetAside`), also if their medium is
        opened again meanwhile."""
        for place in self._places(moves):
            self.aside.add(place, least_s, now)

    def hold(self, moves: Iterable[PlannedMove], until_s: float) -> None:
        """The same while their loads are late."""
        for place in self._places(moves):
            self.aside.hold(place, until_s)

    def moved(self, moves: Iterable[PlannedMove]) -> None:
        """Nothing is wrong with their places."""
        for move in moves:
            self.aside.moved(move.slot if self._spec.physical_slots else move.key)

    def is_aside(self, key: Key) -> bool:
        """Whether the place of the key's row is set aside."""
        places = self.aside.until_s
        if not places or not self._spec.physical_slots:
            return key in places
        found = self.rows.get(key)
        return found is not None and found[0] in places

    def watch(self, now: float) -> None:
        """Call at every turn: what was set aside for long enough is used again."""
        self._idle.end(now)

    def write_again(self, member: Member, most: int = MAX_PLACES) -> None:
        """Slots of this member whose write failed may be written again, those that failed first in front."""
        self._idle.write_again(self.slots_of(member), most)

    # --- uses --------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[Key], tick: int) -> None:
        """Rows were used, here or in a tier above, in prefix order; not all need be here. Asked tiers count no uses."""
        if self._spec.asked:
            return
        self.rows.touch_many(list(keys), tick)

    def take_uses(self, count: int) -> list[tuple[int, int]]:
        """(slot, tick) of up to `count` rows used since this was last called, for the medium's journal: without them a
        restart would evict first what was used last."""
        return [(slot, max(tick, self.newest_listed)) for slot, tick in self.rows.take_used(count)]

    # --- eviction ----------------------------------------------------------------------------------------------

    def select_victims(self, count: int) -> list[Key]:
        """Start the eviction of the `count` least valuable rows, or of fewer, as only so many are being evicted at a
        time: still hits, until `finish_eviction` is called."""
        return self.rows.select(room_for_victims(self.rows, count))

    def cancel_eviction(self, key: Key, tick: int) -> None:
        """A victim was used again (at `tick`, if that is later), or cannot be written below: it stays."""
        self.rows.cancel(key, tick)

    def finish_eviction(self, key: Key, tick: int) -> None:
        """Evict a victim now, unless its eviction was cancelled. One that is pinned stays: it is selected again."""
        if self.rows.is_evicting(key):
            if self._is_pinned(key):
                self.cancel_eviction(key, tick)
            else:
                self._evict(key, self.rows.remove(key, NO_ID))

    def drop_victims(self) -> None:
        """Nobody writes them below now: they are the next again."""
        self.rows.cancel_all()

    def invalidate(self, key: Key, row: int, *, unwritten: bool = False) -> bool:
        """This row cannot be used; `unwritten`: nor its slot, whose write failed. Does nothing, and returns False, if
        the key has another one by now."""
        slot = self.rows.remove(key, row)
        if slot >= 0:
            self._removed(key, slot, unwritten=unwritten)
        return slot >= 0

    # --- what the medium lists -----------------------------------------------------------------------------------

    def add_listed(self, slot: int, key: Key, tick: int) -> None:
        """A row that the medium lists: it held it at the start, or another engine has stored it; a negative slot: one
        that was removed. One that is known in another slot, or finds no slot, is deleted there. Of an asked tier: a row
        that was found, in the place of the one written first if there are too many."""
        found = self.rows.get(key)
        if self._spec.asked:
            tick = max(tick, self.gone_before)  # it is there, whatever was deleted by then
            if found is None and slot > _REMOVED:
                self.make_room(1)
        if slot <= _REMOVED:
            self.forget(key)
        elif found is not None and self._spec.physical_slots and Found(*found).slot != slot:
            self.queue_delete(slot, key)
        elif found is not None and self._spec.asked:
            self.rows.touch_many([key], tick)
        elif found is not None:
            self.rows.add(key, slot, tick, True)  # confirms it
        elif not self.slots.claim(slot):
            self.queue_delete(slot, key)
        else:
            self.rows.add(key, slot, tick, True)
            self._counters.found += 1
            if self.changed is not None:
                self.changed(key)

    def add_columns(self, member: Member, columns: Columns, start: int, stop: int) -> None:
        """`add_listed` of many rows; where slots only count, there may be more than the limit afterwards."""
        slots = self.slots_of(member)
        taken = slots.map if isinstance(slots, Slots) else None
        base = (member.first_slot,) if self._divided else ()
        added, end, newest, left_out = self.rows.list_columns(
            columns.slots, columns.ticks, columns.records, columns.width, start, stop, taken, slots.limit, *base
        )
        slots.claimed(added, end)
        self.newest_listed = max(self.newest_listed, newest)
        self._counters.found += added
        if taken is not None:
            for slot, key in left_out:
                if self.member_place_of_slot(slot) == member.place:  # else a defect's: it is no slot of this member
                    self.queue_delete(slot, key)

    def forget(self, key: Key) -> None:
        """The medium does not hold this row any more; if it is being moved, the end of that tells."""
        if key in self.rows and not self._is_pinned(key):
            self.invalidate(key, NO_ID)
            self._forgotten(key)

    @property
    def has_gone(self) -> bool:
        """Whether the next victim is gone (`gone_before`). Those that are being moved find out themselves."""
        return self.gone_before > 0 and (oldest := self.rows.oldest()) is not None and oldest < self.gone_before

    def forget_gone(self) -> None:
        """Forget the next victim, which is gone."""
        for key in self.rows.select(1):
            self.slots.release(self.rows.remove(key, NO_ID))
            self._forgotten(key)

    def sweep(self, member: Member, start: int, count: int, limit: int = ALL_SLOTS, *, all_rows: bool = False) -> int:
        """Of `count` rows from place `start` on, those of this member go that its medium has not listed again
        (`begin_listing`), or `all_rows`, or in slots not below `limit`. Returns where to go on; -1: that was the
        end."""
        low, high = member.slot_range if self._divided else (0, ALL_SLOTS)
        limit = min(low + limit, ALL_SLOTS)
        start, gone = self.rows.sweep(start, count, low if all_rows else limit, low, high)
        for key, slot in gone:
            if slot >= limit:
                self._evict(key, slot)
            else:
                self._free(slot)
                self._forgotten(key)
        if start < 0 and limit == ALL_SLOTS and not all_rows:
            self.listing.discard(member.place)
        return start

    # --- deletes -----------------------------------------------------------------------------------------------

    def queue_delete(self, slot: int, key: Key) -> None:
        """Have the medium delete a row, unless it is not this engine's to delete, as it only reads there or the tier is
        asked: such a tier deletes by itself what it cannot load."""
        if self._spec.write is not Write.OFF and not self._spec.asked:
            member = self._members[self.member_place_of_slot(slot)]
            if not self._divided or member.state is not TierState.DOWN:  # then all that it has is listed first
                member.to_delete.append((slot - member.first_slot, key))

    def clear(self) -> None:
        """A new epoch: no row of before it is found. Moves under way end as usual, of rows that are not here."""
        self._garbage.add(self.rows)
        self.rows = make_rows(uses=self._spec.physical_slots)
        self.slots.clear(self._garbage)
        self.aside = SetAside()
        self._idle = IdleSlots(self.slots, self.aside)
        self.newest_listed = 0
        self.listing = set()
        self.clears += 1

    # --- inside ------------------------------------------------------------------------------------------------

    @property
    def _some_away(self) -> bool:
        """Whether some members cannot be read, and others take rows."""
        return not all(member.readable for member in self._members) and any(
            member.takes_rows for member in self._members
        )

    def _is_away(self, key: Key) -> bool:
        """Whether a key's row is one of a member that cannot be read, nothing moves it, and others take rows."""
        found = self.rows.get(key)
        if found is None or not self._some_away:
            return False
        row = Found(*found)
        return row.stored and not row.pins and not self._members[self.member_place_of_slot(row.slot)].readable

    def _places(self, moves: Iterable[PlannedMove]) -> Iterable[Place]:
        """A slot that has another row by now, or none, is left as it is."""
        if not self._spec.physical_slots:
            return [move.key for move in moves]
        return [move.slot for move in moves if self.has(move.key, move.id)]

    def _is_pinned(self, key: Key) -> bool:
        """Whether a row of the index is being loaded or stored."""
        found = self.rows.get(key)
        return found is not None and (Found(*found).pins > 0 or not Found(*found).stored)

    def _evict_all(self, rows: Sequence[tuple[Key, int]]) -> list[Key]:
        for key, slot in rows:
            self._evict(key, slot)
        return [key for key, _ in rows]

    def _evict(self, key: Key, slot: int) -> None:
        self._removed(key, slot)
        self._gone.note(key, self._evicted)
        self._counters.evictions += 1

    def _removed(self, key: Key, slot: int, *, unwritten: bool = False) -> None:
        self._free(slot, unwritten=unwritten)
        self.queue_delete(slot, key)
        if self.changed is not None:
            self.changed(key)

    def _free(self, slot: int, *, unwritten: bool = False) -> None:
        """Its row is gone. One that is set aside is free at the end of that."""
        if slot in self.aside.until_s:
            self._idle.add(slot, unwritten=unwritten)
        else:
            self.slots.release(slot)

    def _forgotten(self, key: Key) -> None:
        """The medium does not hold it any more."""
        self._gone.note(key, tag_of(self._number, Gone.EXPIRED))
        self._counters.removed += 1
        if self.changed is not None:
            self.changed(key)
