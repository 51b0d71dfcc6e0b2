"""Ctrl-C in a thread that changes books: heard, and answered where nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Within this context a SIGINT waits for the next `point`, or the end. A second one waits for nothing.

    Python raises KeyboardInterrupt between any two of its instructions, but only in the main thread: elsewhere, and
    where SIGINT has no handler in Python, nothing is changed.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._waiting: tuple[int, FrameType | None] | None = None

    def point(self) -> None:
        """Whoever wants to interrupt may do it here. Raises what the handler raises."""
        if self._waiting is not None and self._handler is not None:
            waiting, self._waiting = self._waiting, None
            self._handler(*waiting)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
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
        again, self._waiting = self._waiting is not None, (number, frame)
        if again:
            self.point()
