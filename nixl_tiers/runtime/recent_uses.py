"""RecentUses: tells movers whose slots are places when their rows were used, for the order after a restart."""

from __future__ import annotations

from threading import Condition
from typing import Final

from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.member import Member
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import TierState
from nixl_tiers.mover.protocol import MAX_TOUCHED, Touch

TOUCH_S: Final = 1.0  # between two packets to one tier
USES_A_PART: Final = 256


class RecentUses:
    """Of all tiers. For the supervisor's thread; takes the coordinator's lock for a part of the uses at a time."""

    def __init__(self, core: TierManager, lock: Condition) -> None:
        self._core = core
        self._lock = lock
        self._touch_s = TOUCH_S
        self._due_s = [0.0 for _ in core.tiers]  # when each gets its next packet

    def flush(self) -> None:
        """From the next call on all uses are sent at once, in as many packets as they take."""
        self._touch_s = 0.0
        self._due_s = [0.0 for _ in self._due_s]

    def messages(self, now: float) -> list[tuple[int, Touch]]:
        """(mover, packet): the rows used lately, in at most one packet a mover every TOUCH_S."""
        messages: list[tuple[int, Touch]] = []
        for each in self._core.tiers:
            while now >= self._due_s[each.number] and each.send_credits > 0 and each.state is TierState.UP:
                used: list[tuple[int, int]] = []
                for _ in range(MAX_TOUCHED // USES_A_PART):
                    with self._lock:
                        some = each.index.take_uses(USES_A_PART)
                    used += some
                    if not some:
                        break
                if not used:
                    break
                for member, part in _by_member(each, used):
                    if member.send_credits > 0 and member.state is TierState.UP:  # else its journal has older times
                        messages.append((member.number, Touch(part)))
                        member.send_credits -= 1
                self._due_s[each.number] = now + self._touch_s
        return messages


def _by_member(tier: Tier, used: list[tuple[int, int]]) -> list[tuple[Member, list[tuple[int, int]]]]:
    """(slot, tick) of rows of these members, with the slots that their media know."""
    if len(tier.members) == 1:
        return [(tier.members[0], used)]
    parts: dict[int, list[tuple[int, int]]] = {}
    for slot, tick in used:
        member = tier.members[tier.index.member_place_of_slot(slot)]
        parts.setdefault(member.place, []).append((slot - member.first_slot, tick))
    return [(tier.members[place], part) for place, part in parts.items()]
