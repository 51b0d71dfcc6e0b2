"""How the slots of a shard lie in its slab files, and `namespace.json`, which says so.

Slot s is in slab s // slots_per_slab at (s % slots_per_slab) * row_bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.tiers.base import MAX_SLOTS
from nixl_tiers.tiers.slab.journal import journal_bytes

SLAB_BYTES: Final = 1 << 30
MAX_SLABS: Final = 1024  # each is an open file
SLAB: Final = re.compile(r"slab-(\d{5})\.kv")
_FORMAT: Final = 2


@dataclass(frozen=True)
class SlabLayout:
    """How `slots` rows of `row_bytes` are spread over files; fixed when a shard is made."""

    row_bytes: int
    slots: int
    slots_per_slab: int

    @classmethod
    def of(cls, row_bytes: int, slots: int) -> SlabLayout:
        slab_bytes = max(SLAB_BYTES, -(-slots * row_bytes // MAX_SLABS))
        return cls(row_bytes, slots, max(1, slab_bytes // row_bytes))

    @property
    def slabs(self) -> int:
        return -(-self.slots // self.slots_per_slab)

    def slots_in(self, slab: int) -> int:
        return max(0, min(self.slots_per_slab, self.slots - slab * self.slots_per_slab))

    @property
    def extent_slots(self) -> int:
        """Slots that are allocated together: a slab, and fewer where the whole tier is small."""
        return max(1, min(self.slots_per_slab, self.slots // 32))

    def with_room(self, room: Mapping[int, int]) -> NDArray[np.bool_]:
        """By slot: whether it has room in its file. `room`: for how many slots each slab's file is long enough."""
        flags = np.zeros(self.slots, np.bool_)
        for slab, slots in room.items():
            first = slab * self.slots_per_slab
            flags[first : first + min(slots, self.slots_per_slab)] = True
        return flags


def slab_name(slab: int) -> str:
    return f"slab-{slab:05d}.kv"


def slab_number(name: str) -> int | None:
    """The number of the slab whose file has this name; None: it is none."""
    match = SLAB.fullmatch(name)
    return int(match[1]) if match else None


def describe_layout(geometry: Geometry, layout: SlabLayout) -> dict[str, Any]:
    """The content of namespace.json."""
    return {
        "format": _FORMAT,
        **asdict(geometry),
        "row_bytes": layout.row_bytes,
        "slots": layout.slots,
        "slots_per_slab": layout.slots_per_slab,
        "journal_bytes": journal_bytes(layout.slots),
    }


def described(found: Any) -> tuple[Geometry, SlabLayout] | None:
    """What the content of a namespace.json says; None if it is damaged, or of another format. How much a journal may
    take is no part of that."""
    try:
        geometry = Geometry(*(int(found[name]) for name in ("cells", "cell_payload", "sub_blocks")))
        layout = SlabLayout(geometry.row_bytes, int(found["slots"]), int(found["slots_per_slab"]))
        expected = describe_layout(geometry, layout) | {"journal_bytes": found["journal_bytes"]}
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    possible = 0 < layout.slots <= MAX_SLOTS and layout.slots_per_slab > 0
    return (geometry, layout) if possible and found == expected else None
