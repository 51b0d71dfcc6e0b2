"""How much a slab tier has in flight: loads enough for several fast drives, stores what a load can wait for."""

from __future__ import annotations

from collections import deque
from typing import Final

REQUEST_BYTES: Final = 2 << 20  # a larger row is moved by several requests
REQUEST_ROOM: Final = 64 << 10  # beyond these, rather than another request for what is left: a seal, as a rule
LOADS_BYTES: Final = 64 << 20  # at least 32 requests, which is what four drives of PCIe 5 want
STORES_S: Final = 0.01  # a load waits for the stores before it
STORES_BYTES: Final = (16 << 20, 64 << 20)  # at least, so that a medium of long latency is not starved, and at most
_SAMPLES: Final = 16
_ALIGNED: Final = 4096  # for O_DIRECT


def request_bytes(row_bytes: int) -> int:
    """The size of a row's requests; its last one may be smaller. Multiples of 4096 if the row is."""
    count = max(1, -(-(row_bytes - REQUEST_ROOM) // REQUEST_BYTES))
    return min(row_bytes, -(-row_bytes // (count * _ALIGNED)) * _ALIGNED)


def rows_of_loads(row_bytes: int) -> int:
    """How many rows may be loaded at a time."""
    return -(-LOADS_BYTES // row_bytes)


class StoreWindow:
    """How many rows may be stored at a time: what the medium writes in STORES_S, by the fastest of the last units."""

    def __init__(self, row_bytes: int) -> None:
        self._least, self._most = (max(1, nbytes // row_bytes) for nbytes in STORES_BYTES)
        self._rates: deque[float] = deque(maxlen=_SAMPLES)
        self.rows = self._least

    def written(self, rows: int, seconds: float) -> None:
        """A unit has been written in this time; `rows` were in flight when it began, its own included."""
        self._rates.append(rows / max(seconds, 1e-6))
        self.rows = max(self._least, min(self._most, int(max(self._rates) * STORES_S)))
