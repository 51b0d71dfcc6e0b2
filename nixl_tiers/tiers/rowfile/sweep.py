"""The thread that sweeps a directory of row files: it counts what is there, makes room, and deletes what is too old."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Final

from nixl_tiers.tiers.rowfile.budget import Budget
from nixl_tiers.tiers.rowfile.contents import Contents
from nixl_tiers.tiers.rowfile.evict import Evictor
from nixl_tiers.tiers.rowfile.expire import Expiry

REFRESH_S: Final = 60.0  # at the latest the server's clock is read again, which may have been put back
FULL_S: Final = 0.5  # how long no row waits after no room could be made, or the directory could not be read
WAIT_S: Final = 4.0  # no row waits longer, as in a directory of many millions: its job would be late
SWEEP_S: Final = 3600.0  # at the latest after the last sweep: what is there is shown, and orphans go
PAUSE_S: Final = 0.01  # at least between two sweeps, and as long as the last one took: others use the directory, too
CLOSE_S: Final = 1.0  # closing does not wait longer: the medium may hang


class Sweeper:
    """Of one opening of the tier. `step` does what is due, for the thread or a test."""

    def __init__(
        self,
        contents: Contents,
        budget: Budget,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        random = random or Random()
        self._contents = contents
        self._budget = budget
        self._writes = writes = contents.directory.writes  # else it only counts
        self._clock = clock
        self._evictor = Evictor(contents, budget, random)
        self._expiry = Expiry(contents, budget, max_age_s, random) if writes and max_age_s is not None else None
        self._pass: Iterator[None] = iter(())  # of the expiry, as far as it is
        self._sweep_at_s = self._pass_at_s = 0.0  # when the next one is due
        self._not_before_s = 0.0  # a sweep
        self._full_until_s = 0.0
        self._began_s: float | None = None  # what the thread does now
        self._wake = threading.Event()
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    # --- for the mover's loop ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """A row was refused, or a sweep is worth beginning."""
        self._wake.set()

    @property
    def full(self) -> bool:
        """Whether a row that was refused is not to wait: no room could be made just now, or that takes long."""
        now, began_s = self._clock(), self._began_s
        return now < self._full_until_s or (began_s is not None and now - began_s > WAIT_S)

    @property
    def quiet_s(self) -> float:
        """For how long the directory has not answered the thread."""
        now, began_s = self._clock(), self._began_s
        return 0.0 if began_s is None else now - max(began_s, self._contents.moved_s)

    def check(self) -> None:
        """Raise the error that has ended the thread."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Begin nothing more."""
        self._closing = True
        self._wake.set()

    def close(self) -> None:
        self.stop()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.clear()
                self._began_s = self._clock()
                pause_s = self.step()
                self._began_s = None
                self._wake.wait(pause_s)
        except Exception as error:  # noqa: BLE001 (the mover's loop raises it)
            self._error = error

    def step(self) -> float:
        """What is due. Returns in how many seconds something may be due again."""
        self._contents.server_s()
        now = self._clock()
        due = self._budget.sweep_due or now >= self._sweep_at_s
        if due and now >= self._not_before_s:
            self._budget.begin_sweep()
            found = self._contents.sweep()
            self._budget.end_sweep(found)
            ended_s = self._clock()
            self._sweep_at_s = ended_s + SWEEP_S
            self._not_before_s = ended_s + max(PAUSE_S, ended_s - now)
            if found is None:
                self._full_until_s = self._not_before_s = self._sweep_at_s = ended_s + FULL_S
        for _ in self._evictor.steps() if self._writes else ():
            if self._closing:
                return 0.0
        if self._budget.full:
            self._full_until_s = self._clock() + FULL_S
        sweep_at_s = self._not_before_s if self._budget.sweep_due else self._sweep_at_s
        return max(0.0, min(REFRESH_S, min(sweep_at_s, self._expire()) - self._clock()))

    def _expire(self) -> float:
        """Go on with a pass, or begin one. Returns when to come again."""
        if self._expiry is None:
            return math.inf
        if next(self._pass, self) is not self:
            return 0.0
        now = self._clock()
        if now < self._pass_at_s:
            return self._pass_at_s
        self._pass_at_s = now + self._expiry.pass_s
        self._pass = self._expiry.steps(self._contents.server_s)
        return 0.0
