"""StoreGet: one `get` of a store, in slices of its keys that are asked for ahead of the one that is waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Final

from nixl_tiers.core.key_lookup import Lookup
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.runtime.blocking import StallTimeout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nixl_tiers.base.chunk import Key
    from nixl_tiers.core.manager import TierManager
    from nixl_tiers.runtime.coordinator import Coordinator

SLICE_KEYS: Final = 256  # that are looked up, and whose load is prepared, in one hold of the core
AHEAD_KEYS: Final = 4096  # that may come up at once


class Slice:
    """Some of the keys, from `start` on, and the request (`name`) on whose behalf they come up.

    `come`: rows that it has asked for and that have come; `to_come`: that have not; `hits`: of its last look-ups.
    `unsure`: it waits for something else too, such as a tier's listing or answer, so that only look-ups can tell what
    of it is to be brought up.
    """

    __slots__ = ("come", "hits", "keys", "name", "start", "to_come", "unsure")

    def __init__(self, name: str, start: int, keys: Sequence[Key]) -> None:
        self.name = name
        self.start = start
        self.keys = keys
        self.hits: int | None = None
        self.come = self.to_come = 0
        self.unsure = False


class StoreGet:
    """Reads the keys slice by slice, in their order. A slice is looked up when it is asked for, and again when all that
    it asked for has come: what is a hit then is loaded in the same hold. While the first slice waits,
    others are on their way, as far as it is known where they are.

    The caller's patience is that of all its requests: they wait for as long as rows come, and `wait_s` longer.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        keys: Sequence[Key],
        out: NDArray[np.uint8],
        *,
        wait_s: float,
        names: Iterator[str],
        point: Callable[[], None],
    ) -> None:
        """`names`: of requests. `point`: called wherever the call may end by an exception."""
        self._coordinator = coordinator
        self._keys = keys
        self._out = out
        self._wait_s = wait_s
        self._names = names
        self._point = point
        quarter = max(1, coordinator.region.rows // 4)
        self._per_slice = min(SLICE_KEYS, quarter)
        self._most_asked = min(AHEAD_KEYS, quarter)
        self._slices: deque[Slice] = deque()  # asked for and not read yet
        self._next = 0  # the first key that was not asked for
        self._hits: list[bool] = []
        self._stall = StallTimeout(wait_s)
        self._come = 0  # rows that have come since they were asked for
        self._come_before = 0  # how many of them had, when a slice was given up last

    def run(self) -> list[bool]:
        """Which keys are hits; their bytes are in `out`."""
        try:
            while self._next < len(self._keys) or self._slices:
                if not self._slices:
                    self._add_slice()
                self._read(self._slices[0])
                self._end(self._slices.popleft())
        finally:
            for each in self._slices:
                self._end(each)
        return self._hits

    # --- inside ------------------------------------------------------------------------------------------------

    def _read(self, first: Slice) -> None:
        coordinator, waited = self._coordinator, False
        while True:
            with coordinator.core() as core:
                while not (stalled := self._has_stalled(core)) and first.to_come and not first.unsure:
                    self._wait()
                try:
                    answers = self._look_up(core, first)
                    if stalled or Lookup.PENDING not in answers:
                        hits, rows = self._load(core, first, answers)
                        break
                finally:
                    core.end_step()
                if first.unsure:
                    self._wait()
            waited = True
            self._ask_ahead()
        if stalled:
            self._give_up(first)
        elif waited:
            self._ask_ahead()  # which comes up during the copy
        for place, row in zip(compress(range(first.start, first.start + len(hits)), hits), rows, strict=True):
            self._out[place] = coordinator.region.rows_view[row, : self._out.shape[1]]
            self._point()
        self._hits += hits

    def _look_up(self, core: TierManager, part: Slice) -> list[Lookup]:
        """`end_step` follows in the same hold."""
        now = self._coordinator.now()
        answers = core.look_up_keys(part.name, part.keys, now)
        pending = {key for key, answer in zip(part.keys, answers, strict=True) if answer is Lookup.PENDING}
        ((_, part.to_come),) = core.rows_to_come([part.name])
        part.unsure = len(pending) > part.to_come
        hits = answers.count(Lookup.HIT)
        self._come += 0 if part.hits is None else max(0, hits - part.hits)
        part.hits = hits
        return answers

    def _load(self, core: TierManager, part: Slice, answers: Sequence[Lookup]) -> tuple[list[bool], list[int]]:
        hits = [answer is Lookup.HIT for answer in answers]  # what is pending is none
        missed = [key for key, hit in zip(part.keys, hits, strict=True) if not hit]
        core.count_misses(part.name, missed, self._coordinator.now())
        return hits, self._coordinator.prepare_load(part.name, list(compress(part.keys, hits)), call=True).rows

    def _add_slice(self) -> Slice:
        part = Slice(next(self._names), self._next, self._keys[self._next : self._next + self._per_slice])
        self._slices.append(part)
        self._next += len(part.keys)
        with self._coordinator.core() as core:
            core.arrive(part.name, RequestWishes(patient=True))
        return part

    def _ask_ahead(self) -> None:
        """Of slices that may be unknown, one at a time is asked for: a medium answers few questions at once."""
        while (
            self._next < len(self._keys)
            and not self._slices[-1].unsure
            and self._next + self._per_slice - self._slices[0].start <= self._most_asked
        ):
            with self._coordinator.core() as core:
                self._look_up(core, self._add_slice())
                core.end_step()

    def _has_stalled(self, core: TierManager) -> bool:
        """Whether no row has come for as long as may be waited."""
        names = [part.name for part in self._slices]
        for part, (come, to_come) in zip(self._slices, core.rows_to_come(names), strict=True):
            self._come += come - part.come
            part.come, part.to_come = come, to_come
        stalled = self._stall.expired(self._come)
        core.wait_on(names, self._coordinator.now() + self._stall.left_s)
        return stalled

    def _give_up(self, first: Slice) -> None:
        """What was asked for behind the first slice is asked for again, and waited for if any row has come at all since
        the last time: other tiers may hold it."""
        while len(self._slices) > 1:
            self._end(self._slices.pop())
        self._next = first.start + len(first.keys)
        if self._come > self._come_before:
            self._stall = StallTimeout(self._wait_s)
        self._come_before = self._come

    def _wait(self) -> None:
        self._stall.wait(self._coordinator.changed)
        self._point()

    def _end(self, part: Slice) -> None:
        self._coordinator.end_call(part.name)
