"""Where the rows of a request's chain are: in the host's index, or in which storage tier; many keys at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from math import lcm
from typing import Final, NamedTuple

from nixl_tiers.cascade.host import Row, RowState
from nixl_tiers.cascade.pricing import HOST
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.state import CascadeState
from nixl_tiers.chunk import Key

BATCH: Final = 1024
_READY: Final = RowState.READY
_LOADING: Final = RowState.LOADING


class Group(NamedTuple):
    """The keys of one KV group, from the request's first chunk on: `keys[i]` ends at token `chunk_tokens * (i + 1)`.
    `window`: a load needs so many of them before its end; None: all (full attention)."""

    keys: Sequence[Key]
    chunk_tokens: int
    window: int | None = None


class Chain:
    """The keys of a request. At least one group has full attention.

    `full`: the groups that have; `windows`: the others. `end`: the last token up to which all of `full` have keys;
    `step_tokens`: of which all of them have whole chunks, `step_rows` together.
    """

    __slots__ = ("end", "full", "groups", "step_rows", "step_tokens", "windows")

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.full = [group for group in groups if group.window is None]
        self.windows = [group for group in groups if group.window is not None]
        self.end = min([len(group.keys) * group.chunk_tokens for group in self.full])
        self.step_tokens = lcm(*[group.chunk_tokens for group in self.full])
        self.step_rows = sum([self.step_tokens // group.chunk_tokens for group in self.full])


@dataclass(slots=True)
class ChainRows:
    """The rows of one full-attention group from a request's start on, as far as they are known to exist.

    Places are in `rows`, ascending: `stored` has those that the host lacks, by the number of the first tier that holds
    them, and `coming` those that are being filled or loaded in the host; of these, `loading` has those of each tier.
    """

    group: Group
    first: int  # the place of the first in `group.keys`
    keys: Sequence[Key]
    rows: list[Row | None]  # as the host's index has them
    stored: dict[int, list[int]]
    coming: list[int]
    loading: dict[int, list[int]]

    @property
    def end(self) -> int:
        """The token up to which they are."""
        return (self.first + len(self.rows)) * self.group.chunk_tokens

    @property
    def first_unready(self) -> int:
        """The place of the first row that is not in host memory; how many there are if all are."""
        return min([places[0] for places in (self.coming, *self.stored.values()) if places], default=len(self.rows))

    def sources(self) -> list[int]:
        """Of each row, the number of the tier that it comes from, or HOST. One that is being loaded, for another
        request or to measure the tier, may still take long to come."""
        sources = [HOST] * len(self.rows)
        for tier, places in (*self.stored.items(), *self.loading.items()):
            for place in places:
                sources[place] = tier
        return sources


class RowFinder:
    """Looks up rows on behalf of requests."""

    def __init__(self, state: CascadeState) -> None:
        self._host = state.host
        self._tiers = state.tiers
        self._numbers = {tier.spec.name: tier.number for tier in state.tiers}

    def find(self, request: Request, group: Group, span: tuple[int, int], first: int, now: float) -> ChainRows:
        """Where the group's rows are in this span of tokens, from its start up to the first that is nowhere. `first`:
        the first sub-block of each that is going to be read."""
        begin, stop = span[0] // group.chunk_tokens, span[1] // group.chunk_tokens
        found = ChainRows(group, begin, (), [], {}, [], {})
        if begin < stop and self.exists(request, group.keys[begin], now):  # most prompts without any hit end here
            for at in range(begin, stop, BATCH):
                if not self._find_batch(request, found, group.keys[at : min(at + BATCH, stop)], first, now):
                    break
        found.keys = group.keys[begin : begin + len(found.rows)]
        return found

    def exists(self, request: Request, key: Key, now: float) -> bool:
        """Whether the host, or a tier that the request may load from, has the key's row."""
        if key in self._host.index:
            return True
        allowed = request.allowed
        return any((allowed is None or tier.number in allowed) and tier.can_load(key, now) for tier in self._tiers)

    # --- inside ------------------------------------------------------------------------------------------------

    def _find_batch(self, request: Request, found: ChainRows, keys: Sequence[Key], first: int, now: float) -> bool:
        """Add the rows of `keys` up to the first that is nowhere; whether all of them are somewhere."""
        rows: list[Row | None] = list(map(self._host.index.get, keys))
        absent, coming = [], []
        stop = len(rows)
        for place, row in enumerate(rows):
            if row is None:
                absent.append(place)
            elif row.state is _READY:
                if row.missing > first:
                    stop = place
                    break
            elif row.state is _LOADING and not row.mover_refs:
                self._host.invalidate(row)  # an error has ended its load
                rows[place] = None
                absent.append(place)
            else:
                coming.append(place)
        stored: dict[int, list[int]] = {}
        if absent:
            stop = min(stop, self._find_stored(request, keys, absent, stored, now))
        before = len(found.rows)
        found.rows += rows[:stop]
        if coming:
            found.coming += (placed := _placed(coming, stop, before))
            for place in placed:
                row = found.rows[place]
                if row is not None and row.state is _LOADING:
                    found.loading.setdefault(self._numbers[row.source], []).append(place)
        for tier, places in stored.items():
            if placed := _placed(places, stop, before):
                found.stored.setdefault(tier, []).extend(placed)
        return stop == len(keys)

    def _find_stored(
        self, request: Request, keys: Sequence[Key], absent: list[int], stored: dict[int, list[int]], now: float
    ) -> int:
        """Note in `stored` which tier holds those of `keys` that the host lacks. Returns the first place of one that
        none does, or where the host had no room for a row that was asked for: the chain ends there."""
        stop = len(keys)
        if request.to_come < len(request.asked):
            stop = next((place for place in absent if not request.asked.get(keys[place], True)), stop)
        for tier in self._tiers:
            if request.allowed is not None and tier.number not in request.allowed:
                continue
            here = tier.can_load_many([keys[place] for place in absent], now)
            if False not in here:
                stored[tier.number] = absent
                return stop
            stored[tier.number] = list(compress(absent, here))
            absent = [place for place, found in zip(absent, here, strict=True) if not found]
        return min(stop, absent[0])


def _placed(places: list[int], stop: int, before: int) -> list[int]:
    """Those below `stop`, of a list that begins `before` places further on."""
    if places and places[-1] >= stop:
        places = places[: bisect_left(places, stop)]
    return [before + place for place in places] if before else places
