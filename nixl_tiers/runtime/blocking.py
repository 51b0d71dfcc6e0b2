"""Calls of threads that may wait: Ctrl-C is deferred to points where nothing is half done, and patience ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from nixl_tiers.base.clock import COUNTED_S, PAUSE_S
from nixl_tiers.core.turn import NOW
from nixl_tiers.mover.supervisor import TICK_S
from nixl_tiers.runtime.hold import Hold
from nixl_tiers.runtime.mover_link import MoverLink

if TYPE_CHECKING:
    from nixl_tiers.core.manager import TierManager
    from nixl_tiers.core.rows import Row

POLL_S: Final = 0.25  # deadlines pass without a notification
SLICE: Final = 64  # rows that are looked at in one hold

SAME_S: Final = 1.0
"""A shell, a launcher and a notebook each pass a Ctrl-C on: a SIGINT so soon after the first is the same one."""


class Interrupts:
    """Within this context a SIGINT is deferred to the next `point`, or to the end. A second one, SAME_S later, is not
    deferred.

    Python raises KeyboardInterrupt between any two of its instructions, but only in the main thread: in other threads,
    and if SIGINT has no handler in Python, this does nothing.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._waiting: tuple[int, FrameType | None] | None = None
        self._since_s = 0.0

    def point(self) -> None:
        """Deliver a deferred SIGINT here. Raises what the handler raises."""
        if self._waiting is not None and self._handler is not None:
            waiting, self._waiting = self._waiting, None
            self._handler(*waiting)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            # ValueError: a program that embeds Python may have made threading take another thread for the main one.
            with contextlib.suppress(ValueError):
                if callable(handler):
                    signal.signal(signal.SIGINT, self._note)
                    self._handler = handler
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.point()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is None:
            self._since_s = time.monotonic()
            self._waiting = number, frame
        elif time.monotonic() - self._since_s > SAME_S:
            self.point()


class StallTimeout:
    """Ends a call's waiting once it has waited for `timeout_s`, in all of its parts, without any progress.

    Time in which the process was stopped hardly counts, as nothing could progress.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waited_s = 0.0
        self._best: int | None = None

    @property
    def left_s(self) -> float:
        return max(0.0, self._timeout_s - self._waited_s)

    def restart(self) -> None:
        """Another part begins, whose first measure of progress is no progress yet."""
        self._best = None

    def note(self, progress: int) -> None:
        """`progress`: any number that grows while there is some."""
        if self._best is not None and progress > self._best:
            self._waited_s = 0.0
        self._best = progress if self._best is None else max(self._best, progress)

    def expired(self, progress: int) -> bool:
        self.note(progress)
        return self._waited_s >= self._timeout_s

    def wait(self, changed: threading.Condition) -> None:
        began_s = time.monotonic()
        changed.wait(min(POLL_S, self.left_s))
        waited_s = time.monotonic() - began_s
        self._waited_s += COUNTED_S if waited_s > PAUSE_S else waited_s


class Waits:
    """For tiers to be listed, and for rows to be written: one for a coordinator. Ctrl-C ends a wait."""

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
        with Interrupts() as interrupts:
            return self._until(lambda: self.closed or self._core.writeback.backlog() == 0, timeout_s, interrupts)

    def write_down(self, until_s: float) -> None:
        """The process is about to exit: write what a tier with `write: on_evict` does not hold yet, as long as there is
        time (monotonic)."""
        with Interrupts() as interrupts:
            # Nothing is written to a tier before it is listed.
            self._until(lambda: self._link.ready, until_s - time.monotonic(), interrupts)
            self.demote_all()
            self._until(lambda: self._core.writeback.backlog() == 0, until_s - time.monotonic(), interrupts)

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
                core.writeback.demote(rows[start : start + SLICE])

    def _until(self, condition: Callable[[], bool], timeout_s: float | None, interrupts: Interrupts) -> bool:
        """Poll `condition` in a hold, and at every change. The supervisor may be pausing: what has ended meanwhile is
        known only after a turn."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with self._link.changed:
            self._link.wake(NOW)
            while not condition():
                if (left_s := until_s - time.monotonic()) <= 0:
                    return False
                if not self._link.changed.wait(min(TICK_S, left_s)):
                    self._link.wake(NOW)
                interrupts.point()
        return True
