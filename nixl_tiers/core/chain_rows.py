"""Where the rows of a request's chain are: in the host's index, or in which storage tier; many keys at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from math import lcm
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.pricing import HOST
from nixl_tiers.core.requests import Request
from nixl_tiers.core.rows import LOADING, READY, Row
from nixl_tiers.core.state import CascadeState

BATCH: Final = 1024


class Group(NamedTuple):
    """The keys of one KV group, from the request's first chunk on: `keys[i]` ends at token `chunk_tokens * (i + 1)`.
    `window`: a load needs so many of them before its end; None: all (full attention)."""

    keys: Sequence[Key]
    chunk_tokens: int
    window: int | None = None


class Chain:
    """The keys of a request. At least one group has full attention.

    `full`: the groups that have; `windows`: the others, of which a load needs `window_rows` rows. `end`: the last token
    up to which all of `full` have keys; `step_tokens`: of which all of them have whole chunks, `step_rows` together.
    """

    __slots__ = ("end", "full", "groups", "step_rows", "step_tokens", "window_rows", "windows")

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.full: list[Group] = []
        self.windows: list[Group] = []
        self.window_rows, self.step_tokens = 0, 1
        for group in groups:
            if group.window is None:
                self.full.append(group)
                self.step_tokens = lcm(self.step_tokens, group.chunk_tokens)
            else:
                self.windows.append(group)
                self.window_rows += group.window
        self.end = min([len(group.keys) * group.chunk_tokens for group in self.full])
        self.step_rows = sum([self.step_tokens // group.chunk_tokens for group in self.full])


@dataclass(slots=True)
class ChainRows:
    """The rows of one full-attention group from a request's start on, as far as they are known to exist.

    Places are in `group.keys`, ascending: `stored` has those that the host lacks, by the number of the first tier that
    holds them, `coming` those being filled or loaded in the host; of these, `loading` has those of each tier.
    """

    group: Group
    first: int  # the first place
    rows: list[Row | None]  # from there on: those in host memory
    stored: dict[int, list[int]]
    coming: list[int]
    loading: dict[int, list[int]]

    @property
    def stop(self) -> int:
        """The place behind the last."""
        return self.first + len(self.rows)

    @property
    def first_unready(self) -> int:
        """The place of the first row that is not in host memory; `stop` if all are."""
        return min([places[0] for places in (self.coming, *self.stored.values()) if places], default=self.stop)

    def sources(self) -> list[int]:
        """Of each row, the number of the tier that it comes from, or HOST. One that is being loaded, for another
        request or to measure the tier, may still take long to come."""
        sources = [HOST] * len(self.rows)
        for tier, places in (*self.stored.items(), *self.loading.items()):
            for place in places:
                sources[place - self.first] = tier
        return sources


class RowFinder:
    """Looks up rows on behalf of requests."""

    def __init__(self, state: CascadeState) -> None:
        self._host = state.host
        self._tiers = state.tiers
        self._numbers = {tier.spec.name: tier.number for tier in state.tiers}

    def find(self, request: Request, group: Group, span: tuple[int, int], first: int) -> ChainRows:
        """Where the group's rows are in this span of tokens, from its start up to the first that is nowhere. `first`:
        the first sub-block of each that is going to be read."""
        begin, stop = span[0] // group.chunk_tokens, span[1] // group.chunk_tokens
        found = ChainRows(group, begin, [], {}, [], {})
        if begin < stop and self.exists(request, group.keys[begin]):  # most prompts without any hit end here
            for at in range(begin, stop, BATCH):
                if not self._find_batch(request, found, (at, min(at + BATCH, stop)), first):
                    break
        return found

    def exists(self, request: Request, key: Key) -> bool:
        """Whether the host, or a tier that the request may load from, has the key's row."""
        if key in self._host.index:
            return True
        allowed = request.wishes.allowed
        return any((allowed is None or tier.number in allowed) and tier.can_load(key) for tier in self._tiers)

    # --- inside ------------------------------------------------------------------------------------------------

    def _find_batch(self, request: Request, found: ChainRows, places: tuple[int, int], first: int) -> bool:
        """Add the rows of these places up to the first that is nowhere; whether all of them are somewhere."""
        keys, (begin, stop) = found.group.keys, places
        rows: list[Row | None] = list(map(self._host.index.get, keys[begin:stop]))
        absent, coming = [], []
        for place, row in enumerate(rows, begin):
            if row is None:
                absent.append(place)
            elif row.state is READY:
                if row.missing > first:
                    stop = place
                    break
            elif row.state is LOADING and not row.mover_refs:
                self._host.invalidate(row)  # an error has ended its load
                rows[place - begin] = None
                absent.append(place)
            else:
                rows[place - begin] = None
                coming.append((place, row))
        stored: dict[int, list[int]] = {}
        if absent:
            stop = min(stop, self._find_stored(request, keys, absent, stored))
        found.rows += rows[: stop - begin]
        for place, row in coming:
            if place < stop:
                found.coming.append(place)
                if row.state is LOADING:
                    found.loading.setdefault(self._numbers[row.source], []).append(place)
        for tier, some in stored.items():
            if some := below(some, stop):
                found.stored.setdefault(tier, []).extend(some)
        return stop == places[1]

    def _find_stored(
        self, request: Request, keys: Sequence[Key], absent: list[int], stored: dict[int, list[int]]
    ) -> int:
        """Note in `stored` which tier holds the keys at places that the host lacks. Returns the first place of one that
        none does, or where the host had no room for a row that was asked for: the chain ends there."""
        stop = len(keys)
        if request.refused:
            stop = next((place for place in absent if keys[place] in request.refused), stop)
        for tier in self._tiers:
            if request.wishes.allowed is not None and tier.number not in request.wishes.allowed:
                continue
            here = tier.can_load_many([keys[place] for place in absent])
            if False not in here:
                stored[tier.number] = absent
                return stop
            if True in here:
                stored[tier.number] = list(compress(absent, here))
                absent = [place for place, found in zip(absent, here, strict=True) if not found]
        return min(stop, absent[0])


def below(places: list[int], stop: int) -> list[int]:
    """Those below `stop`, of ascending places."""
    return places[: bisect_left(places, stop)] if places and places[-1] >= stop else places
