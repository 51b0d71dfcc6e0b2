"""What the stress test does to the tier of a running engine: its mover is killed, or stopped for a while, and bits of
stored rows are flipped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STOPPED_S = 2.0  # at most
FLIPPED = 8  # of so many rows one


class Faults:
    """`kinds`: how likely "kill", "stop" and "flip" are before a step. `folder`: of the tier."""

    def __init__(self, coordinator: Any, rng: random.Random, kinds: Mapping[str, float], folder: Path) -> None:
        self._coordinator, self._rng, self._kinds, self._folder = coordinator, rng, kinds, folder
        self._stopped: tuple[int, float] | None = None  # the mover, and when it goes on
        for backoff in coordinator._link.supervisor._backoff:
            backoff._backoff_s = (0.05,)  # or there is no mover for most of the time
        self.counts: Counter[str] = Counter()

    def before_step(self) -> None:
        if self._stopped is not None:
            if time.monotonic() >= self._stopped[1]:
                self.end()
            return
        mover = self._coordinator.mover_pids[0]
        for kind, likely in self._kinds.items():
            if mover is not None and self._rng.random() < likely:
                self.counts[kind] += 1
                self._strike(kind, mover)
                return

    def end(self) -> None:
        """A mover that is stopped goes on."""
        if self._stopped is not None:
            with contextlib.suppress(ProcessLookupError):  # the supervisor has killed it
                os.kill(self._stopped[0], signal.SIGCONT)
            self._stopped = None

    def _strike(self, kind: str, mover: int) -> None:
        if kind == "flip":
            self._flip()
        elif kind == "kill":
            os.kill(mover, signal.SIGKILL)
        else:
            os.kill(mover, signal.SIGSTOP)
            self._stopped = mover, time.monotonic() + self._rng.uniform(0, STOPPED_S)

    def _flip(self) -> None:
        """A bit in one of FLIPPED rows, or in what has room for one."""
        row_bytes = self._coordinator.region.geometry.row_bytes
        for file in self._folder.rglob("slab-*.kv"):
            with file.open("r+b") as rows:
                for row in range(self._rng.randrange(FLIPPED), file.stat().st_size // row_bytes, FLIPPED):
                    at = row * row_bytes + self._rng.randrange(row_bytes)
                    (byte,) = os.pread(rows.fileno(), 1, at)
                    os.pwrite(rows.fileno(), bytes([byte ^ 1]), at)
