"""Which tiers have a series of a metric: one that could only ever be 0 is not published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

CPU: Final = "cpu"
NO_TIER: Final = "none"
"""The label `tier` of what concerns no tier."""


@dataclass(frozen=True)
class TierTraits:
    """What decides which series a tier has."""

    name: str
    written: bool = True  # not `write: off`
    checked: bool = False  # unknown keys are checked: other engines store to it
    disk: bool = False  # rows may go through a staging buffer
    only: bool = False  # the host, without any storage tier below it
    quotas: tuple[str, ...] = ()  # names of those that hold here
    place: str = ""  # of the label PLACE

    @property
    def storage(self) -> bool:
        return self.name != CPU


Has = Callable[[TierTraits], bool]


def every(_: TierTraits) -> bool:
    return True


def host(tier: TierTraits) -> bool:
    return not tier.storage


def promoting(tier: TierTraits) -> bool:
    return not tier.storage and not tier.only


def storage(tier: TierTraits) -> bool:
    return tier.storage


def written(tier: TierTraits) -> bool:
    return tier.storage and tier.written


def stored_to(tier: TierTraits) -> bool:
    return not tier.storage or tier.written


def disk(tier: TierTraits) -> bool:
    return tier.disk


def written_disk(tier: TierTraits) -> bool:
    return tier.disk and tier.written


def checked(tier: TierTraits) -> bool:
    return tier.storage and tier.checked


def shared_out(tier: TierTraits) -> bool:
    return bool(tier.quotas)
