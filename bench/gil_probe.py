"""How long the interpreter lock (GIL) is held at once, and by which line."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Final

SWITCH_S: Final = 0.0005
_REAL_TIME: Final = 10
_FRAMES: Final = 3


class GilProbe(threading.Thread):
    """Wakes up as often as it can: between two times, others have held the lock for at most the processor time that the
    process has spent.

    It asks for real-time priority, so that it waits for the lock and not for a processor. Where that is not allowed
    (RLIMIT_RTPRIO), other load of the machine makes the figures larger.
    """

    def __init__(self, late_s: float = float("inf")) -> None:
        """`late_s`: lines after which the lock was released this late are kept in `late`."""
        super().__init__(daemon=True, name="GIL probe")
        self.longest_s = 0.0
        self.late: dict[str, float] = {}
        self.ended = False
        self._late_s = late_s

    def run(self) -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(_REAL_TIME))
        last_s = time.process_time()
        while not self.ended:
            time.sleep(SWITCH_S)
            took_s = time.process_time() - last_s
            self.longest_s = max(self.longest_s, took_s)
            if took_s > self._late_s:
                where = self._where()
                self.late[where] = max(took_s, self.late.get(where, 0.0))
            last_s = time.process_time()

    def _where(self) -> str:
        """Where the other threads are by now: one of them has just released the lock."""
        found = [_stack(frame) for ident, frame in sys._current_frames().items() if ident != self.ident]
        return " | ".join(sorted(found))


def _stack(frame: FrameType | None) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)
