"""Waits of threads that may: for tiers to be listed, and for rows to be written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from nixl_tiers.runtime.blocking import POLL_S, Interrupts
from nixl_tiers.runtime.hold import Hold
from nixl_tiers.runtime.mover_link import MoverLink

if TYPE_CHECKING:
    from nixl_tiers.core.host import Row
    from nixl_tiers.core.manager import TierManager

SLICE: Final = 64  # rows that are looked at in one hold


class Waits:
    """One for a coordinator. Ctrl-C ends a wait."""

    def __init__(self, core: TierManager, link: MoverLink, hold: Hold) -> None:
        self._core = core
        self._link = link
        self._hold = hold
        self.closed = False
        """Whether the coordinator closes: waits that others began before end."""

    def until_ready(self, timeout_s: float | None) -> bool:
        """See `Coordinator.wait_ready`."""
        with Interrupts() as interrupts:
            return self._until(lambda: self.closed or self._link.ready, timeout_s, interrupts)

    def until_written(self, timeout_s: float | None) -> bool:
        """See `Coordinator.flush`."""
        with Interrupts() as interrupts, self.awaiting_writes():
            return self._until(lambda: self.closed or self._core.backlog() == 0, timeout_s, interrupts)

    def write_down(self, until_s: float) -> None:
        """The process is about to exit: write what a tier with `write: on_evict` does not hold yet, as long as there is
        time (monotonic)."""
        with Interrupts() as interrupts:
            # Nothing is written to a tier before it is listed.
            self._until(lambda: self._link.ready, until_s - time.monotonic(), interrupts)
            self.demote_all()
            with self.awaiting_writes():
                self._until(lambda: self._core.backlog() == 0, until_s - time.monotonic(), interrupts)

    def demote_all(self) -> None:
        """Queue all rows that a tier with `write: on_evict` does not hold yet."""
        rows: list[Row] = []
        slices = self._core.host.in_slices(SLICE)
        part: list[Row] | None = []
        while part is not None:
            rows += part
            with self._hold:
                part = next(slices, None)
        for start in range(0, len(rows), SLICE):
            with self._hold as core:
                core.demote(rows[start : start + SLICE])

    @contextmanager
    def awaiting_writes(self) -> Iterator[None]:
        """See `Coordinator.awaiting_writes`."""
        with self._hold as core:
            core.await_writes(1)
        try:
            self._link.wake(at_once=True)
            yield
        finally:
            with self._hold as core:
                core.await_writes(-1)

    def _until(self, condition: Callable[[], bool], timeout_s: float | None, interrupts: Interrupts) -> bool:
        """Poll `condition` in a hold, and at every change."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with self._link.changed:
            while not condition():
                if (left_s := until_s - time.monotonic()) <= 0:
                    return False
                self._link.changed.wait(min(POLL_S, left_s))
                interrupts.point()
        return True
