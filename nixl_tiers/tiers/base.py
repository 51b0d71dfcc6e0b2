"""The contract of a storage tier: what a mover process asks of it. Public: others write tiers too.

A tier is used by one thread. No call but `open` and `close` may block on the medium: transfers are started by `store`
and `load` and collected by `poll`; what blocks (listings, deletes) belongs on a thread of the tier's own.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import MAX_KEY_BYTES, Geometry, Outcome
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.kinds import import_object, in_one_line
from nixl_tiers.config.schema import ConfigError, StorageConfig, tier_from_dict
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer

MAX_ENTRIES: Final = 256
GONE: Final = -1
"""As the slot of an Entry: the row is no longer there. Another process removed it, or upkeep did."""
MAX_SLOTS: Final = 1 << 31
"""The most that a tier may have: they are sent as 32 bits."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Tick = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
RowKey = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]


class Move(msgspec.Struct, array_like=True, frozen=True):
    """One row between the region and a slot of the tier."""

    row: Count
    slot: Count
    key: RowKey
    tick: Tick = 0  # recency, for the journal (stores)
    seal: bool = False  # seal the row before it is written (stores)
    missing: Count = 0  # how many leading sub-blocks hold nothing and are sealed as absent (stores)


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One row that a tier lists; slot GONE: the key is no longer there."""

    slot: Annotated[int, msgspec.Meta(ge=GONE, le=2**32 - 1)]
    key: RowKey
    tick: Tick


class PackedEntries(Sequence[Entry]):
    """Entries in columns, for listings of millions of rows: one becomes an object only when it is looked at."""

    def __init__(self, slots: NDArray[np.int64], ticks: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        """`slots`, `ticks`: (n,). `records`: (n, width): a byte of length, the key, padding with zeros."""
        self.slots = slots
        self.ticks = ticks
        self.records = records

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> PackedEntries:
        width = 1 + max((len(entry.key) for entry in entries), default=1)
        raw = b"".join((bytes((len(entry.key),)) + entry.key).ljust(width, b"\0") for entry in entries)
        return cls(
            np.array([entry.slot for entry in entries], np.int64),
            np.array([entry.tick for entry in entries], np.int64),
            np.frombuffer(raw, np.uint8).reshape(len(entries), width),
        )

    @classmethod
    def joined(cls, parts: Sequence[PackedEntries]) -> PackedEntries:
        """At least one."""
        width = max(part.records.shape[1] for part in parts)
        return cls(
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.ticks for part in parts]),
            np.concatenate([np.pad(part.records, ((0, 0), (0, width - part.records.shape[1]))) for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.slots)

    @overload
    def __getitem__(self, place: int) -> Entry: ...

    @overload
    def __getitem__(self, place: slice) -> PackedEntries: ...

    def __getitem__(self, place: int | slice) -> Entry | PackedEntries:
        if isinstance(place, slice):
            return PackedEntries(self.slots[place], self.ticks[place], self.records[place])
        record = self.records[place].tobytes()
        return Entry(int(self.slots[place]), record[1 : 1 + record[0]], int(self.ticks[place]))

    def __iter__(self) -> Iterator[Entry]:
        width, raw = self.records.shape[1], self.records.tobytes()
        keys = (raw[at + 1 : at + 1 + raw[at]] for at in range(0, len(raw), width))
        return map(Entry, self.slots.tolist(), keys, self.ticks.tolist())


class TierDown(Exception):
    """The medium does not answer now; opening may succeed later. The text is one sentence for the log."""

    def __init__(self, sentence: str, *, retry_s: float = math.inf) -> None:
        """`retry_s`: the longest delay before the next attempt, in seconds, where an attempt is cheap; by default the
        backoff decides."""
        super().__init__(sentence)
        self.retry_s = retry_s


class TierRefused(Exception):
    """The configuration can never work (no such bucket, unwritable path). One sentence that names the field."""


@dataclass(frozen=True)
class FinishedBatch:
    """A batch that has ended: the ID that `store` or `load` returned, and one outcome per move, in order."""

    batch_id: int
    outcomes: Sequence[Outcome]


@dataclass(frozen=True)
class EndedMoves:
    """Moves of a batch that have ended while others of it go on: the batch's ID, and outcomes by their places in it."""

    batch_id: int
    outcomes: Mapping[int, Outcome]


@dataclass(frozen=True)
class ExistenceAnswer:
    """An existence check that has ended, and keys certainly absent. What it found is in `StorageTier.found`; the other
    keys are unknown."""

    check_id: int
    absent: Sequence[bytes]


def seal_row(
    sealer: Sealer, region: HostRegion, move: Move, now_s: float, copy: NDArray[np.uint8] | None = None
) -> None:
    """Seal the region row of a store that asks for it, and copy it in the same pass if `copy` (uint8, (row_bytes,)) is
    given. `now_s`: Unix seconds."""
    present = sealer.geometry.present(move.missing)
    sealer.seal(region.rows_view[move.row], move.key, present=present, sealed_at=int(now_s), copy=copy)


class StorageTier(ABC):
    """One namespace of one medium, as slots of one row each.

    The core owns the slots: it never stores into a slot that another key still holds, nor deletes one that a load
    reads.
    """

    mount_point: bytes = b""
    """Where the medium is a directory: the mount point that it was found on, by `open`, or by an earlier mover of this
    engine, which sets it before `open`. After an unmount the mount point is an ordinary directory, and a tier there
    would fill the disk below it. Empty: none was found yet."""

    def identify(self, engine: str) -> None:  # noqa: B027 - most tiers need not know
        """For which engine this tier works: an ID that stays the same when its mover is restarted. Called once, before
        `open`."""

    def describe(self, description: Description) -> None:  # noqa: B027 (optional)
        """Keep a manifest with this beside the rows of each namespace that is served. Called at most once, before
        `open`."""

    @abstractmethod
    def open(self, namespace: bytes, epoch: int) -> int:
        """Serve this namespace from now on and return how many slots it may fill. Called again after a reset,
        with nothing in flight. Raises TierDown or TierRefused, and then may be called again."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending and release everything. Nothing is in flight, but loads with
        `closes_beside_loads`. May be called twice, or before open."""

    # --- rows in and out ----------------------------------------------------------------------------------------------

    @abstractmethod
    def store(self, moves: Sequence[Move]) -> int:
        """Start writing region rows into slots, sealing those that ask for it; returns the batch's ID. Not called
        before the first listing has ended."""

    @abstractmethod
    def load(self, moves: Sequence[Move]) -> int:
        """Start reading slots into region rows; returns the batch's ID. OK only for a row whose seal was verified."""

    @abstractmethod
    def poll(self) -> list[FinishedBatch]:
        """The batches that have ended since the last call. Nothing of a batch touches the region once it is reported.

        Raises TierDown when the medium has gone from under the tier, once every batch has been reported: `open` is
        called again then, until it succeeds.
        """

    def ended_moves(self) -> Sequence[EndedMoves]:
        """Moves that have ended since the last call, each reported once, of batches that `poll` has not reported; their
        batches still report all. Nothing of them touches the region any more. Called after `poll`.

        Of a mover that must be killed, only rows are lost that were not reported here. Not needed where the moves of a
        batch end together.
        """
        return ()

    @abstractmethod
    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Delete these (slot, key) pairs, or forget them where other processes may use the rows. The slots may be
        stored into from the next call on. A pair that no longer holds changes nothing."""

    def touch(self, slots: Sequence[int], ticks: Sequence[int]) -> None:  # noqa: B027 (optional)
        """The rows in these slots were used at these ticks, last or in a tier above: `list_rows` orders rows by tick
        after a restart. Called at most once a second, and only where slots are places (`physical_slots`). A slot that
        holds no row stays without."""

    def give_up_waiting(self) -> None:  # noqa: B027 (optional)
        """The engine is gone, and this process ends within seconds: start nothing more. Moves that have not been
        started may end as FAILED; it matters where another engine waits for what this one holds."""

    @property
    def closes_beside_loads(self) -> bool:
        """Whether `close` may be called while loads are in flight, the end of which nobody waits for."""
        return False

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether poll is worth calling soon."""

    @property
    def poll_s(self) -> float:
        """While `busy`: in how many seconds `poll` may find something. 0: as often as a mover calls it."""
        return 0.0

    @property
    def wake_fd(self) -> int | None:
        """A descriptor that is readable when `poll` will find something, the same for the tier's whole life; None:
        `poll` has to be called every `poll_s`."""
        return None

    # --- what is there ------------------------------------------------------------------------------------------------

    @abstractmethod
    def list_rows(self) -> Iterator[Sequence[Entry]]:
        """The rows that are there, oldest first, after open, in batches of up to MAX_ENTRIES: lists, or PackedEntries
        where there may be millions. An empty batch: nothing yet, ask again."""

    # Where the medium is asked (the capability `asked`), since others write to it and it is too large to be listed:
    # `list_rows` yields nothing, `delete` is not called, and the engine goes on with what it knows when its mover is
    # restarted. A row's tick is when it was last written, or any time before, by one clock for all engines; or when it
    # was last known to be there, by a clock that all movers of an engine have.

    def check_existence(self, check_id: int, keys: Sequence[bytes], chain: bool) -> bool:
        """Start to find out which of `keys` are there. False: not possible.

        `chain`: each key is useful only with all those before it, so finding where the chain ends is enough.
        """
        return False

    def existence_answers(self) -> Sequence[ExistenceAnswer]:
        """The existence checks that have ended since the last call."""
        return ()

    def found(self) -> Sequence[Entry]:
        """Rows that are there: those that existence checks have found since the last call, and those that were stored
        (or loaded, where that counts). Called after `poll` and `existence_answers`, and reported before these."""
        return ()

    @property
    def gone_before(self) -> int:
        """Rows of lower ticks are not there any more, or may go any time: they are forgotten, and asked for again when
        they are wanted. 0 at first, and it may fall."""
        return 0

    @property
    def stuck(self) -> bool:
        """Whether existence checks have not returned for so long that this process is to be killed: nothing else ends
        the threads that wait."""
        return False

    # --- upkeep and state ---------------------------------------------------------------------------------------------

    def maintain(self) -> Iterator[list[Entry]]:
        """One round of upkeep: delete what is too old, share out room, whatever a medium needs from time to time.

        Runs step by step, as `list_rows` does and never beside it: `maintain_s` seconds after the first listing, and
        after each round, has ended. Yields the keys that it took away as entries of slot GONE; an empty batch: not done
        yet.
        """
        return iter(())

    @property
    def maintain_s(self) -> float | None:
        """How long after a round of upkeep the next one is due, in seconds. None: there is no upkeep to do."""
        return None

    @property
    def slots(self) -> int | None:
        """How many slots may be used now, where that changes after `open`; None: as many as `open` returned."""
        return None

    @property
    def denials(self) -> Mapping[str, str]:
        """What the medium does not let this tier do now, though it is up: one sentence per kind of request."""
        return {}

    @property
    def staged(self) -> tuple[bool, bool]:
        """Whether rows that are loaded, and rows that are stored, go through a buffer of the tier's own between the
        region and the medium, where that can be chosen."""
        return False, False

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """What this tier takes on its medium now."""


# --- expiry (`max_age`), by the time in a seal: when it was made, by the clock of the writer --------------------------

# Clocks differ and jump. A seal that is ahead of the reader's clock counts as made when it was first seen, until the
# clock has caught up with it. So nothing expires early, and such a row lives for at most one `max_age` longer.

SWEEP_S: Final = 60.0
SWEEPS_PER_AGE: Final = 10


def expire_if_due(sealed_at: float, now_s: float, max_age_s: float | None) -> bool:
    """Whether a row sealed then is too old now (Unix seconds). A seal without a time (0) is, if there is a maximum."""
    return max_age_s is not None and sealed_at <= now_s - max_age_s


def expired(sealed_at: NDArray[np.uint32], now_s: float, max_age_s: float) -> NDArray[np.bool_]:
    """`expire_if_due` for many rows, as flags."""
    flags: NDArray[np.bool_] = sealed_at <= now_s - max_age_s
    return flags


def sweep_s(max_age_s: float) -> float:
    """How often to sweep for expired rows, in seconds."""
    return min(SWEEP_S, max_age_s / SWEEPS_PER_AGE)


# --- from a configuration to its tier: imported here, in the mover, and nowhere else ----------------------------------


def make_tier(
    tier: Mapping[str, object],
    geometry: Geometry,
    region: HostRegion,
    movers: int = 1,
    replicas: int = 1,
    *,
    times: Times = PRODUCTION,
) -> StorageTier:
    """The tier of a configuration as `tier_to_dict` gives it. Raises TierRefused."""
    try:
        config = tier_from_dict(tier)
    except ConfigError as error:
        if not str(error).startswith("type: "):
            raise TierRefused(str(error)) from error
        # The scheduler's process could read it, so its path has something that a mover's has not.
        what = f'type: "{tier.get("type")}" cannot be imported by its mover process, so its package must be installed'
        raise TierRefused(f"{what} ({str(error).removeprefix('type: ')})") from error
    return implement(config, geometry, region, movers=movers, replicas=replicas, times=times)


def implement(
    config: StorageConfig,
    geometry: Geometry,
    region: HostRegion,
    *,
    movers: int = 1,
    replicas: int = 1,
    times: Times = PRODUCTION,
) -> StorageTier:
    """A tier of the class, or from the function, that `config.implementation` names. One with a parameter `times` is
    given them, one with a parameter `movers` how many the tier has in this engine, and one with a parameter `replicas`
    how many engines of this machine share its capacity. Raises TierRefused."""
    name = config.implementation
    # One tier a process: the libraries of the others are not loaded.
    try:
        make = import_object(name)
        takes = inspect.signature(make).parameters
        given = {"movers": movers, "replicas": replicas, "times": times}
        more: dict[str, Any] = {each: value for each, value in given.items() if each in takes}
    except Exception as error:
        where = f'its implementation "{name}" cannot be imported by its mover process'
        raise TierRefused(f'type: "{config.type}": {where} ({in_one_line(error)})') from error
    tier = make(config, geometry, region, **more)
    if not isinstance(tier, StorageTier):
        raise TierRefused(f'type: "{config.type}": its implementation "{name}" makes no StorageTier')
    return tier
