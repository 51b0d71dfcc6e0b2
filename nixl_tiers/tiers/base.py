"""The contract of a storage tier: what a mover process asks of it. Public: others write tiers too.

A tier is used by one thread. No call may wait for the medium for long: transfers are started by `store`
and `load` and collected by `poll`; what blocks (listings, deletes) belongs on a thread of the tier's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from nixl_tiers.chunk import MAX_KEY_BYTES, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer

MAX_ENTRIES: Final = 256
GONE: Final = -1
"""As the slot of an Entry: the row was removed by another process."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Tick = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
RowKey = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]


class Move(msgspec.Struct, array_like=True, frozen=True):
    """One row between the region and a slot of the tier."""

    row: Count
    slot: Count
    key: RowKey
    tick: Tick = 0  # recency, for the journal (stores)
    seal: bool = False  # the mover must seal the row before it writes it (stores)
    missing: Count = 0  # how many sub-blocks at the beginning hold nothing, to be sealed as absent (stores)


class Entry(msgspec.Struct, array_like=True, frozen=True):
    slot: Annotated[int, msgspec.Meta(ge=GONE, le=2**32 - 1)]
    key: RowKey
    tick: Tick


class TierDown(Exception):
    """The medium does not answer now; opening may succeed later. The text is one sentence for the log."""


class TierRefused(Exception):
    """The configuration can never work (no such bucket, unwritable path). One sentence that names the field."""


@dataclass(frozen=True)
class Done:
    """A finished batch: the ticket that store or load returned, and one outcome a move, in order."""

    ticket: int
    outcomes: Sequence[Outcome]


def seal_row(sealer: Sealer, region: HostRegion, move: Move, now_s: float) -> None:
    """Seal the region row of a store that asks for it. `now_s`: Unix seconds."""
    present = sealer.geometry.present(move.missing)
    sealer.seal(region.rows_view[move.row], move.key, present=present, sealed_at=int(now_s))


@dataclass(frozen=True)
class ExistenceAnswer:
    """A probe that has ended: what is there, to be adopted, and what is surely not. The rest is not known."""

    number: int
    found: Sequence[Entry]
    absent: Sequence[bytes]


class StorageTier(ABC):
    """One namespace of one medium, as slots of one row each.

    The core owns the slots: it never stores into a slot that another key still holds, nor drops one that a load reads.
    """

    @abstractmethod
    def open(self, namespace: bytes, epoch: int) -> int:
        """Serve this namespace from now on and return how many slots it may fill. Called again after a reset,
        with nothing in flight. Raises TierDown or TierRefused, and then may be called again."""

    @abstractmethod
    def adopt(self) -> Iterator[list[Entry]]:
        """The rows already there, in batches, after open. A batch may be empty: 'nothing yet, ask again'."""

    @property
    def relist_s(self) -> float | None:
        """Where others write to the medium too: how long after a listing `adopt` is called again, in seconds.

        It then yields what has appeared since, and as entries of slot GONE keys that are no longer there.
        """
        return None

    @property
    def slots(self) -> int | None:
        """How many slots the engine may use now, where that changes after `open`; None: as many as that said."""
        return None

    def probe(self, number: int, keys: Sequence[bytes], chain: bool) -> bool:
        """Where others write to the medium too: start to find out which of `keys` are there. False: cannot be asked.

        `chain`: each key is worth nothing without those before it, so that its end is all there is to find.
        """
        return False

    def answers(self) -> Sequence[ExistenceAnswer]:
        """The probes that have ended since the last call."""
        return ()

    @property
    def denials(self) -> Mapping[str, str]:
        """What the medium does not let this tier do now, though it is up: one sentence for each kind of request."""
        return {}

    @abstractmethod
    def store(self, moves: Sequence[Move]) -> int:
        """Start writing region rows into slots, sealing those that ask for it; returns a ticket."""

    @abstractmethod
    def load(self, moves: Sequence[Move]) -> int:
        """Start reading slots into region rows; returns a ticket. OK only for a row whose seal was verified."""

    @abstractmethod
    def poll(self) -> list[Done]:
        """What has ended since. When a batch is reported, nothing of it touches the region any more.

        Raises TierDown when the medium has gone from under the tier, once every batch has been reported: `open` is
        called again then, until it succeeds.
        """

    @abstractmethod
    def drop(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Forget these (slot, key) pairs; the slots may be stored into from the next call on."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether poll is worth calling soon."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """What this tier takes on its medium now."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending and let go. Nothing is in flight."""
