"""FaultyTier: fault injection into any storage tier, by a plan.

It wraps a tier and gives it a private region. So a row can be corrupted between the two, below the seal: on its way
down it is stored corrupted (the inner tier must detect it when it loads it), on its way up the corruption is detected
here, as by a tier that reads straight into the region. In a mover:

    {"type": "nixl_tiers.testing.config:FaultyConfig", "inner": {...}, "plan": {"rules": [{"fault": "bit flip"}]}}
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from nixl_tiers.base.chunk import Geometry, Key, Outcome
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import Times
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.testing.config import FaultyConfig
from nixl_tiers.tiers.base import (
    EndedMoves,
    Entry,
    ExistenceAnswer,
    FinishedBatch,
    Move,
    StorageTier,
    TierRefused,
    implement,
    seal_row,
)

MakeTier = Callable[[Geometry, HostRegion], StorageTier]


class Way(StrEnum):
    """The direction in which a row moves."""

    STORE = "store"
    LOAD = "load"


class Fault(StrEnum):
    """What happens to one row."""

    TORN_WRITE = "torn write"  # reported OK, but the second half never came to the medium
    BIT_FLIP = "bit flip"  # of a store: at rest; of a load: on the way
    SHORT_READ = "short read"  # the second half of the region's row stays what it was
    LATE_ERROR = "late error"  # the whole row is in the region, and then the transfer fails
    UNAVAILABLE = "unavailable"  # an error at once, and nothing is moved: what a 503 is
    NO_SPACE = "no space"  # ENOSPC
    SLOW = "slow"  # OK, but `delay_s` later
    STALL = "stall"  # half of it is moved, and neither it nor its batch is ever reported
    FREEZE = "freeze"  # the call for it never returns, as if NIXL hung in it: the mover is stuck


WAYS: Final = {
    Fault.TORN_WRITE: {Way.STORE},
    Fault.NO_SPACE: {Way.STORE},
    Fault.SHORT_READ: {Way.LOAD},
    Fault.LATE_ERROR: {Way.LOAD},
}
"""Faults of one direction only; the others happen in both."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault, and the rows it is injected into. Raises ValueError if no row can match."""

    fault: Fault
    way: Way | None = None  # None: each direction in which it can happen
    keys: tuple[Key, ...] | None = None  # None: every key
    chance: float = 1.0  # of each move that matches
    times: int | None = None  # per key and direction; None: always
    delay_s: float = 0.05  # how much later a slow row is

    def __post_init__(self) -> None:
        if self.way is not None and self.way not in WAYS.get(self.fault, set(Way)):
            raise ValueError(f"way: a {self.fault} does not happen to a {self.way}")
        if not 0 <= self.chance <= 1:
            raise ValueError(f"chance: {self.chance} is not within 0 and 1")


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which faults are injected into which rows: the first rule that applies counts.

    Whether one applies depends on the seed, the rule, the key, the direction and how often the key went that way
    before, and on nothing else: neither on batching nor on timing.
    """

    rules: tuple[Rule, ...] = ()
    seed: int = 0
    switch: str = ""  # a path; if given, faults are injected only while it exists

    def strike(self, way: Way, key: Key, turn: int) -> Rule | None:
        """The rule that applies when `key` goes this way for the `turn`-th time, from 0."""
        for number, rule in enumerate(self.rules):
            matches = (
                way in WAYS.get(rule.fault, set(Way))
                and rule.way in {None, way}
                and (rule.keys is None or key in rule.keys)
                and (rule.times is None or turn < rule.times)
            )
            if matches and self.draw(1 << 32, number, way, key, turn) < rule.chance * (1 << 32):
                return rule
        return None

    def draw(self, below: int, *what: object) -> int:
        """A number from 0 to `below` - 1 that depends on the seed and `what` alone."""
        digest = hashlib.blake2b(repr((self.seed, what)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % below

    def to_dict(self) -> dict[str, object]:
        """As `plan` of a FaultyConfig: JSON types."""
        plain: dict[str, object] = msgspec.to_builtins(self)
        return plain


def make_faulty(
    config: FaultyConfig, geometry: Geometry, region: HostRegion, replicas: int, times: Times
) -> FaultyTier:
    """The implementation of a FaultyConfig. Raises TierRefused."""
    try:
        plan = msgspec.convert(config.plan, FaultPlan)
    except msgspec.ValidationError as error:
        raise TierRefused(f"plan: {error}") from error
    return FaultyTier(partial(implement, config.inner, replicas=replicas, times=times), geometry, region, plan)


HELD_BACK: Final = frozenset({Fault.STALL, Fault.SLOW})  # with their batches, others of which are reported before


@dataclass
class _Batch:
    """The moves of one call of store or load."""

    moves: list[Move]
    way: Way
    rules: list[Rule | None]
    turns: list[int]
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # by place in the batch
    inside: list[int] = field(default_factory=list)  # places of the moves that the inner tier was given
    ready_s: float = 0.0
    reported: set[int] = field(default_factory=set)  # places of moves that `ended_moves` has


class FaultyTier(StorageTier):
    """The tier that `make` returns, with faults injected. Without faults it is that tier, slower by a copy per row."""

    def __init__(self, make: MakeTier, geometry: Geometry, region: HostRegion, plan: FaultPlan) -> None:
        """`make` gets a private region of as many rows: row n there is row n of `region`."""
        self._geometry = geometry
        self._region = region
        self._private = HostRegion.create(geometry, region.rows)
        try:
            self._inner = make(geometry, self._private)
        except BaseException:
            self._private.close()
            raise
        self._plan = plan
        self._turns: Counter[tuple[Way, Key]] = Counter()
        self._sealer: Sealer | None = None
        self._last_id = 0
        self._batches: dict[int, _Batch] = {}
        self._inner_ids: dict[int, int] = {}  # the inner tier's batch_id -> ours
        self.struck: Counter[Fault] = Counter()
        """How often each fault was injected."""

    def identify(self, engine: str) -> None:
        self._inner.identify(engine)

    def describe(self, description: Description) -> None:
        self._inner.describe(description)

    def open(self, namespace: bytes, epoch: int) -> int:
        slots = self._inner.open(namespace, epoch)
        self._sealer = Sealer(self._geometry, namespace, epoch)
        return slots

    # --- passed on to the inner tier ------------------------------------------------------------------------------

    @property
    def mount_point(self) -> bytes:
        return self._inner.mount_point

    @mount_point.setter
    def mount_point(self, found: bytes) -> None:
        self._inner.mount_point = found

    def list_rows(self) -> Iterator[Sequence[Entry]]:
        return self._inner.list_rows()

    @property
    def closes_beside_loads(self) -> bool:
        return self._inner.closes_beside_loads

    def check_existence(self, check_id: int, keys: Sequence[bytes], chain: bool) -> bool:
        return self._inner.check_existence(check_id, keys, chain)

    def existence_answers(self) -> Sequence[ExistenceAnswer]:
        return self._inner.existence_answers()

    def found(self) -> Sequence[Entry]:
        return self._inner.found()

    @property
    def gone_before(self) -> int:
        return self._inner.gone_before

    @property
    def stuck(self) -> bool:
        return self._inner.stuck

    def maintain(self) -> Iterator[list[Entry]]:
        return self._inner.maintain()

    @property
    def maintain_s(self) -> float | None:
        return self._inner.maintain_s

    @property
    def slots(self) -> int | None:
        return self._inner.slots

    @property
    def denials(self) -> Mapping[str, str]:
        return self._inner.denials

    @property
    def staged(self) -> tuple[bool, bool]:
        return self._inner.staged

    @property
    def used_bytes(self) -> int:
        return self._inner.used_bytes

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        self._inner.delete(entries)

    def touch(self, slots: Sequence[int], ticks: Sequence[int]) -> None:
        self._inner.touch(slots, ticks)

    def give_up_waiting(self) -> None:
        self._inner.give_up_waiting()

    # --- moves, with faults ---------------------------------------------------------------------------------------

    def store(self, moves: Sequence[Move]) -> int:
        batch = self._strike(moves, Way.STORE)
        inside = []
        for place in batch.inside:
            move = batch.moves[place]
            if move.seal:
                seal_row(self._open_sealer, self._region, move, time.time())
            self._copy_down(batch, place)
            inside.append(msgspec.structs.replace(move, seal=False))
        return self._begin(batch, self._inner.store(inside) if inside else None)

    def load(self, moves: Sequence[Move]) -> int:
        batch = self._strike(moves, Way.LOAD)
        inside = [batch.moves[place] for place in batch.inside]
        return self._begin(batch, self._inner.load(inside) if inside else None)

    def poll(self) -> list[FinishedBatch]:
        for done in self._inner.poll():
            self._take(self._batches[self._inner_ids.pop(done.batch_id)], dict(enumerate(done.outcomes)))
        return [self._report(batch_id) for batch_id in [*self._batches] if self._over(self._batches[batch_id])]

    def ended_moves(self) -> Sequence[EndedMoves]:
        """Beside moves that are held back, and beside those that the inner tier has not ended."""
        for inner in self._inner.ended_moves():
            self._take(self._batches[self._inner_ids[inner.batch_id]], inner.outcomes)
        ended = []
        for batch_id, batch in self._batches.items():
            rules = {place: batch.rules[place] for place in batch.outcomes.keys() - batch.reported}
            places = sorted(place for place, rule in rules.items() if rule is None or rule.fault not in HELD_BACK)
            if places:
                batch.reported.update(places)
                ended.append(EndedMoves(batch_id, {place: batch.outcomes[place] for place in places}))
        return ended

    @property
    def busy(self) -> bool:
        return bool(self._batches) or self._inner.busy

    @property
    def poll_s(self) -> float:
        return 0.0 if self._batches else self._inner.poll_s  # what is held back wakes nobody

    @property
    def wake_fd(self) -> int | None:
        return self._inner.wake_fd

    def close(self) -> None:
        self._inner.close()
        self._private.close()

    # --- batches --------------------------------------------------------------------------------------------------

    @property
    def _open_sealer(self) -> Sealer:
        if self._sealer is None:
            raise RuntimeError("the tier is not open")
        return self._sealer

    def _strike(self, moves: Sequence[Move], way: Way) -> _Batch:
        """Decide what happens to each move; those that do not reach the inner tier have ended."""
        turns = [self._turns[way, move.key] for move in moves]
        plan = self._plan if not self._plan.switch or Path(self._plan.switch).exists() else FaultPlan()
        rules = [plan.strike(way, move.key, turn) for move, turn in zip(moves, turns, strict=True)]
        batch = _Batch(list(moves), way, rules, turns)
        for place, (move, rule) in enumerate(zip(moves, rules, strict=True)):
            self._turns[way, move.key] += 1
            fault = rule.fault if rule is not None else None
            if rule is not None:
                self.struck[rule.fault] += 1
            if fault is Fault.NO_SPACE:
                batch.outcomes[place] = Outcome.NO_SPACE
            elif fault is Fault.UNAVAILABLE:
                batch.outcomes[place] = Outcome.FAILED
            elif fault is Fault.FREEZE:
                while True:
                    time.sleep(1.0)
            else:
                batch.inside.append(place)
            if rule is not None and fault is Fault.SLOW:
                batch.ready_s = max(batch.ready_s, time.monotonic() + rule.delay_s)
            if fault is Fault.STALL:
                batch.ready_s = float("inf")
        return batch

    def _begin(self, batch: _Batch, inner_id: int | None) -> int:
        self._last_id += 1
        self._batches[self._last_id] = batch
        if inner_id is not None:
            self._inner_ids[inner_id] = self._last_id
        return self._last_id

    def _take(self, batch: _Batch, outcomes: Mapping[int, Outcome]) -> None:
        """What the inner tier says of moves, by their places in its batch; it may say it twice."""
        for number, outcome in outcomes.items():
            place = batch.inside[number]
            if place not in batch.outcomes:
                up = batch.way is Way.LOAD and outcome is Outcome.OK
                batch.outcomes[place] = self._copy_up(batch, place) if up else outcome

    def _over(self, batch: _Batch) -> bool:
        return len(batch.outcomes) == len(batch.moves) and time.monotonic() >= batch.ready_s

    def _report(self, batch_id: int) -> FinishedBatch:
        batch = self._batches.pop(batch_id)
        return FinishedBatch(batch_id, [batch.outcomes[place] for place in range(len(batch.moves))])

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _copy_down(self, batch: _Batch, place: int) -> None:
        """Into the private row, as the medium is to get it."""
        move, rule = batch.moves[place], batch.rules[place]
        row = self._private.rows_view[move.row]
        row[:] = self._region.rows_view[move.row]
        if rule is not None and rule.fault in {Fault.TORN_WRITE, Fault.STALL}:
            row[self._geometry.row_bytes // 2 :] = 0
        if rule is not None and rule.fault is Fault.BIT_FLIP:
            self._flip(batch, place, row.data)

    def _copy_up(self, batch: _Batch, place: int) -> Outcome:
        """Copy a good row into the region, with its fault, and verify the seal there as a tier does."""
        move, rule = batch.moves[place], batch.rules[place]
        row = self._region.rows_view[move.row]
        fault = rule.fault if rule is not None else None
        end = self._geometry.row_bytes // 2 if fault in {Fault.SHORT_READ, Fault.STALL} else self._geometry.row_bytes
        row[:end] = self._private.rows_view[move.row][:end]
        if fault is Fault.LATE_ERROR:
            return Outcome.FAILED
        if fault is Fault.BIT_FLIP:
            self._flip(batch, place, row.data)
        return Outcome.OK if self._open_sealer.verify(row, move.key) is Verdict.OK else Outcome.CORRUPT

    def _flip(self, batch: _Batch, place: int, row: memoryview) -> None:
        bit = self._plan.draw(8 * len(row), "bit", batch.way, batch.moves[place].key, batch.turns[place])
        row[bit // 8] ^= 1 << bit % 8
