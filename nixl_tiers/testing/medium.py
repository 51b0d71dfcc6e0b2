"""What the conformance suite works with: media that it can access past the tier, and a tier driven as by a mover."""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, NoReturn, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from nixl_tiers.base.chunk import Geometry, Key, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict, missing_of
from nixl_tiers.tiers.base import Entry, Move, StorageTier, TierDown

TIMEOUT_S: Final = 120.0
CAPACITY_BYTES: Final = 48 << 20
NAMESPACE: Final = bytes(range(16))
_POLL_S: Final = 0.0003  # as a mover does
_REST: Final = 0xEE  # fills region rows that are not in use


class Medium(ABC):
    """Where a tier keeps its rows: makes tiers over it, and accesses the rows past them.

    The author of a tier writes one. Class variables say what the tier is capable of; a raw access that is left out
    skips the tests that need it.
    """

    keeps_rows: ClassVar[bool] = True
    """Rows outlive the tier object: after close, another one that opens the same namespace lists them."""
    keeps_namespaces: ClassVar[bool] = True
    """Opening another namespace leaves the rows of the first one where they are."""
    physical_slots: ClassVar[bool] = True
    """A slot is a place: list_rows names the slot a row was stored into. False: a row is found by its key alone."""
    erases: ClassVar[bool] = True
    """A deleted row is gone from the medium soon. False: it is only forgotten, until its slot is stored into."""
    keeps_recency: ClassVar[bool] = False
    """Rows that were touched are listed as used at that tick after a restart."""
    asked: ClassVar[bool] = False
    """Others store to it too (`StorageConfig.asked`): nothing is listed, rows are asked for, one that is there is not
    stored again, and who makes room is not told by `delete`, which here is another engine."""
    exact: ClassVar[bool] = True
    """used_bytes becomes equal to held_bytes. False: it may be more, for journals and preallocated space."""

    @abstractmethod
    def make(self, geometry: Geometry, region: HostRegion, capacity_bytes: int) -> StorageTier:
        """A new tier object over this medium, not open yet, as a restarted mover would make it."""

    def read(self, namespace: bytes, slot: int, key: Key) -> bytes:
        """The row as it is on the medium."""
        _lacking("read a row")

    def write(self, namespace: bytes, slot: int, key: Key, raw: bytes) -> None:
        """Overwrite a row with these bytes, as many as a row has."""
        _lacking("write a row")

    def cut(self, namespace: bytes, slot: int, key: Key, keep_bytes: int) -> None:
        """Truncate a row to its first bytes."""
        _lacking("cut a row short")

    def delete(self, namespace: bytes, slot: int, key: Key) -> None:
        """Delete a row behind the tier's back."""
        _lacking("delete a row")

    def held_rows(self, namespace: bytes) -> int:
        """How many rows of the namespace another tier would find on the medium now."""
        _lacking("count rows")

    def held_bytes(self) -> int:
        """What the tier takes on the medium now, over all namespaces."""
        _lacking("count bytes")


def folder_bytes(path: Path) -> int:
    """Sizes of all files below `path`, in bytes, while a tier works there: files that vanish meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(folder) / name).lstat().st_size
    return total


def _lacking(what: str) -> NoReturn:
    pytest.skip(f"there is no way to {what} past this tier")


def keys(count: int, first: int = 0) -> dict[int, Key]:
    """Slot -> key, for `count` slots from `first` on; every slot its own key."""
    return {slot: b"key-%08d" % slot for slot in range(first, first + count)}


def content(key: Key, version: int, geometry: Geometry) -> NDArray[np.uint8]:
    """uint8 (row_bytes,): what is stored under `key`; another key or version has no 8 bytes in common with it."""
    seed = hashlib.blake2b(key, digest_size=8, salt=version.to_bytes(8, "little")).digest()
    words = np.arange(geometry.row_bytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words + np.frombuffer(seed, np.uint64)).view(np.uint8)


@dataclass
class _Flight:
    """A batch that has not been reported."""

    moves: list[Move]
    writes: bool
    before: list[NDArray[np.uint8]]  # of stores: the rows as they were handed over
    ended: dict[int, Outcome] = field(default_factory=dict)  # by place: what was reported before the batch


class Rig:
    """One tier and its region, driven as a mover drives them. Checks the invariants of every report:

    - A batch is reported once, with one outcome per move; a move that was reported before it has the same one there.
    - A row that was loaded OK is the right one, seal and all. A stored one is unharmed, and sealed if that was asked.
    - Nothing of a reported batch or move touches the region: unused rows keep their filling until they are used again.
    """

    def __init__(self, medium: Medium, geometry: Geometry, rows: int, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.medium = medium
        self.geometry = geometry
        self.capacity_bytes = capacity_bytes
        self.region = HostRegion.create(geometry, rows)
        self.region.rows_view[:] = _REST
        self.tier = medium.make(geometry, self.region, capacity_bytes)
        self.namespace = NAMESPACE
        self.epoch = 0
        self._versions: dict[tuple[bytes, int, Key], tuple[int, int]] = {}  # -> version, missing sub-blocks
        self._free = list(range(rows))
        self._flying: dict[int, _Flight] = {}
        self._ended: dict[int, list[Outcome]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.settle()
        finally:
            self.tier.close()
            resting = self.region.rows_view[self._free]
            quiet = kind is not None or (resting == _REST).all()
            del resting
            self.region.close()
        assert quiet, "region rows were written to that no move named, or after their batch was reported"

    # --- opening ----------------------------------------------------------------------------------------------------

    def open(self, namespace: bytes = NAMESPACE, epoch: int = 0) -> dict[int, Key]:
        """Serve a namespace, as soon as the tier is not down; returns the rows that it lists, by slot."""
        self.namespace, self.epoch = namespace, epoch
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self.slots = self.tier.open(namespace, epoch)
            except TierDown:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                break
        assert self.slots > 0, "a tier that opens has slots"
        return self.list_rows()

    def list_rows(self) -> dict[int, Key]:
        if self.medium.asked:
            return self._ask()
        entries: list[Entry] = []
        deadline = time.monotonic() + TIMEOUT_S
        for batch in self.tier.list_rows():
            entries += batch
            if not batch:
                assert time.monotonic() < deadline, "list_rows does not end"
                time.sleep(0.002)
        found = {entry.slot: entry.key for entry in entries}
        assert len(found) == len(entries), "list_rows names a slot twice"
        assert len(set(found.values())) == len(entries), "list_rows names a key twice"
        assert all(0 <= slot < self.slots for slot in found), "list_rows names a slot that open did not offer"
        ticks = [entry.tick for entry in entries]
        assert ticks == sorted(ticks), "list_rows lists the oldest first"
        return found

    def _ask(self) -> dict[int, Key]:
        """Which of all rows that were ever stored in this namespace and epoch are there."""
        assert list(self.tier.list_rows()) == [], "a tier that is asked lists nothing"
        wanted = [key for namespace, epoch, key in self._versions if (namespace, epoch) == (self.namespace, self.epoch)]
        if not wanted:
            return {}
        self.tier.found()
        assert self.tier.check_existence(1, wanted, False)
        self.until(self.tier.existence_answers, "the answer to an existence check")
        return dict(enumerate(entry.key for entry in self.tier.found()))

    def reopen(self, namespace: bytes = NAMESPACE, epoch: int = 0) -> dict[int, Key]:
        """End this tier and open the namespace with another one, as after a restart; returns the rows that it lists."""
        self.restart()
        return self.open(namespace, epoch)

    def restart(self) -> None:
        """Another tier object, not open yet."""
        self.settle()
        self.tier.close()
        self.tier = self.medium.make(self.geometry, self.region, self.capacity_bytes)

    # --- moving rows ------------------------------------------------------------------------------------------------

    def begin_store(self, where: Mapping[int, Key], *, version: int = 0, seal: bool = True, missing: int = 0) -> int:
        """Start storing each key's content into its slot. Without `seal`, rows are stored as they are. The first
        `missing` sub-blocks of each hold bytes of another row."""
        moves = []
        for tick, (slot, key) in enumerate(where.items(), 1):
            row = self.take_row()
            self.region.rows_view[row] = content(key, version, self.geometry)
            moves.append(Move(row, slot, key, tick, seal, missing))
            self._versions[self.namespace, self.epoch, key] = version, missing
        return self.begin_moves(moves)

    def begin_moves(self, moves: list[Move]) -> int:
        """Start storing rows that `take_row` gave and the caller has filled."""
        before = [self.region.rows_view[move.row].copy() for move in moves]
        batch_id = self.tier.store(moves)
        return self._flies(batch_id, _Flight(moves, True, before))

    def begin_load(self, where: Mapping[int, Key]) -> int:
        moves = [Move(self.take_row(), slot, key) for slot, key in where.items()]
        batch_id = self.tier.load(moves)
        return self._flies(batch_id, _Flight(moves, False, []))

    def store(self, where: Mapping[int, Key], *, version: int = 0) -> list[Outcome]:
        return self._in_parts(where, lambda part: self.begin_store(part, version=version))

    def load(self, where: Mapping[int, Key]) -> list[Outcome]:
        return self._in_parts(where, self.begin_load)

    def delete(self, where: Mapping[int, Key]) -> None:
        if not self.medium.asked:
            self.tier.delete(list(where.items()))
            return
        for slot, key in where.items():
            self.medium.delete(self.namespace, slot, key)

    def finish(self, *batch_ids: int) -> list[list[Outcome]]:
        """Poll until these have been reported; returns their outcomes."""
        self.until(lambda: set(batch_ids) <= set(self._ended), "every batch to be reported")
        return [self._ended.pop(batch_id) for batch_id in batch_ids]

    def abandon(self, batch_id: int) -> None:
        """Wait no longer for a batch, which has not been reported; its rows are not used again."""
        del self._flying[batch_id]

    def settle(self) -> None:
        """Poll until the tier has nothing left to do."""
        self.until(lambda: not self._flying and not self.tier.busy, "the tier to be idle")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Poll until `condition` holds. Raises AssertionError naming `what` after TIMEOUT_S."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            self._poll()
            if condition():
                return
            assert time.monotonic() < deadline, f"still waiting for {what} after {TIMEOUT_S:g} s"
            time.sleep(_POLL_S)

    def take_row(self) -> int:
        """A region row for the next move; it is released when the move has been reported."""
        row = self._free.pop(0)  # the longest unused: a late write to it has had time to show
        assert (self.region.rows_view[row] == _REST).all(), "a row was written to after its batch was reported"
        return row

    # --- inside -----------------------------------------------------------------------------------------------------

    def _in_parts(self, where: Mapping[int, Key], begin: Callable[[Mapping[int, Key]], int]) -> list[Outcome]:
        items, outcomes = list(where.items()), list[Outcome]()
        most = len(self._free)
        for start in range(0, len(items), most):
            (part,) = self.finish(begin(dict(items[start : start + most])))
            outcomes += part
        return outcomes

    def _flies(self, batch_id: int, flight: _Flight) -> int:
        assert batch_id not in self._flying, "two batches have the same ID"
        assert batch_id not in self._ended, "two batches have the same ID"
        self._flying[batch_id] = flight
        return batch_id

    def _poll(self) -> None:
        for done in self.tier.poll():
            flight = self._flying.pop(done.batch_id, None)
            assert flight is not None, f"batch {done.batch_id} was reported twice, or never accepted"
            assert len(done.outcomes) == len(flight.moves), "one outcome per move"
            outcomes = [Outcome(outcome) for outcome in done.outcomes]
            for place, outcome in enumerate(outcomes):
                before = flight.ended.get(place)
                assert before in {None, outcome}, "a move was reported with two outcomes"
                if before is None:
                    self._check_move(flight, place, outcome)
            self._ended[done.batch_id] = outcomes
        for ended in self.tier.ended_moves():
            if (flight := self._flying.get(ended.batch_id)) is not None:
                assert flight.ended.keys().isdisjoint(ended.outcomes), "a move was reported twice"
                flight.ended.update(ended.outcomes)
                for place, outcome in ended.outcomes.items():
                    self._check_move(flight, place, outcome)

    def _check_move(self, flight: _Flight, place: int, outcome: Outcome) -> None:
        """It has ended; its row is free."""
        move = flight.moves[place]
        if flight.writes:
            self._check_stored(move, outcome, flight.before[place])
        elif outcome is Outcome.OK:
            self._check_loaded(move)
        self.region.rows_view[move.row] = _REST
        self._free.append(move.row)

    def _check_stored(self, move: Move, outcome: Outcome, before: NDArray[np.uint8]) -> None:
        row = self.region.rows_view[move.row]
        if not move.seal:
            assert np.array_equal(row, before), "a row that was not to be sealed was changed"
        wanted = self._without(before, move.missing if move.seal else 0)
        assert self._same_payload(row, wanted), "a store changed the payload of its row"
        if move.seal and outcome is Outcome.OK:
            sealer = Sealer(self.geometry, self.namespace, self.epoch)
            assert sealer.verify(row, move.key) is Verdict.OK, "a row was stored without the seal that was asked for"

    def _check_loaded(self, move: Move) -> None:
        row = self.region.rows_view[move.row]
        sealer = Sealer(self.geometry, self.namespace, self.epoch)
        assert sealer.verify(row, move.key) is Verdict.OK, f"OK for {move.key!r}, but the row's seal does not say so"
        stored = self._versions.get((self.namespace, self.epoch, move.key))
        assert stored is not None, f"OK for {move.key!r}, which was never stored in this namespace and epoch"
        version, missing = stored
        wanted = self._without(content(move.key, version, self.geometry), missing)
        assert self._same_payload(row, wanted), f"OK for {move.key!r}, but the bytes are not those stored last"
        assert missing_of(row, self.geometry) == missing, "the seal does not say which sub-blocks are missing"

    def _without(self, row: NDArray[np.uint8], missing: int) -> NDArray[np.uint8]:
        """The row with zeros in its first `missing` sub-blocks."""
        geometry = self.geometry
        wanted = row.copy()
        for at in range(0, geometry.cells * geometry.cell_bytes, geometry.cell_bytes):
            wanted[at : at + missing * geometry.sub_block_bytes] = 0
        return wanted

    def _same_payload(self, left: NDArray[np.uint8], right: NDArray[np.uint8]) -> bool:
        geometry = self.geometry
        starts = range(0, geometry.cells * geometry.cell_bytes, geometry.cell_bytes)
        return all(
            np.array_equal(left[at : at + geometry.cell_payload], right[at : at + geometry.cell_payload])
            for at in starts
        )
