"""How many transfers of one direction run at once, and how often they are polled (`PollPace`).

As many as fill the path, bandwidth x latency, and not many more.

Little's law: as many transfers run as end in a second, times what one takes. So with the time that one takes on a quiet
path (the base), the path is full at rate x base; each one more only waits for the others. The limit is GAIN times that:
the congestion window of TCP BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016),
with rows in place of packets, since all rows of a tier have the same size.
"""

from __future__ import annotations

import statistics
from typing import Final

FIRST: Final = 16  # before anything is known; never fewer, since a server on the same machine did best with as many
MOST: Final = 64
PROBE: Final = 4  # while the base is measured
GAIN: Final = 2.0
PROBE_AFTER: Final = 64  # transfers, before the base is first measured: a first hit is not slowed down
PROBE_S: Final = 60.0  # between two measurements of the base, in use
POLL_S: Final = 50e-6  # for each that runs, between two polls of the transfers: asking NIXL for one takes 6 us
LOAD_POLLS: Final = 32  # of a download, in the time that one takes: a request waits for it
STORE_POLLS: Final = 10  # of an upload, for which nobody waits; its place is empty for a twentieth of the time then
LOAD_POLL_S: Final = 0.005  # at the latest
STORE_POLL_S: Final = 0.02


class TransferLimit:
    """The limit of one direction. No clock: times are arguments, in seconds."""

    def __init__(self, most: int) -> None:
        """`most`: what it never exceeds, at least 1."""
        self._most = most
        self._limit = self._least = min(FIRST, most)
        self._probing = False
        self._probe_at_s = float("-inf")
        self._base_s = float("inf")  # how long a transfer takes on a quiet path
        self._seen = 0
        self.typical_s = 0.0
        """How long a transfer took lately, at least; 0.0: not known yet."""
        self._changed_s = float("-inf")  # those that were started earlier ran beside more, or fewer
        self._begin_window()

    @property
    def limit(self) -> int:
        """How many transfers may run now."""
        return min(PROBE, self._limit) if self._probing else self._limit

    def ended(self, started_s: float, now: float, *, waiting: bool) -> None:
        """A transfer that was started then has ended. `waiting`: whether another one waits for its place."""
        self._seen += 1
        if started_s >= self._changed_s:
            self._times.append(now - started_s)
            self._full &= waiting
            if len(self._times) >= self.limit:
                self._end_window(now)

    def failed(self, started_s: float, now: float) -> None:
        """One has failed, or timed out: the server may be overloaded."""
        if started_s >= self._changed_s:
            self._change(max(self._least, self._limit // 2), now, probing=False)

    def timed_out(self, started_s: float, now: float) -> None:
        """Those of a whole burst do if they share a path on which each was fast alone: the next may take longer."""
        self.failed(started_s, now)
        self.typical_s *= 2
        self._begin_window()

    def _end_window(self, now: float) -> None:
        took_s = max(statistics.median(self._times), 1e-9)
        self.typical_s = took_s
        limit, full = self._limit, self._full
        self._begin_window()
        if self._probing:
            self._base_s, self._probe_at_s = took_s, now + PROBE_S
            self._change(limit, now, probing=False)
        elif full and self._seen >= PROBE_AFTER and now >= self._probe_at_s:
            self._change(limit, now, probing=True)
            self.typical_s *= self.limit / limit  # at least; what is measured now must not be that of the polls
        elif full and self._base_s < float("inf"):
            self._base_s = min(self._base_s, took_s)
            target = GAIN * limit * self._base_s / took_s
            self._change(min(self._most, max(self._least, round((limit + target) / 2))), now, probing=False)

    def _change(self, limit: int, now: float, *, probing: bool) -> None:
        if (limit, probing) != (self._limit, self._probing):
            self._limit, self._probing = limit, probing
            self._changed_s = now
            self._begin_window()

    def _begin_window(self) -> None:
        self._times: list[float] = []
        self._full = True


class PollPace:
    """When the transfers of both directions are polled next. They proceed without polling, and with a slow server
    polling many of them is most of their cost. No clock: times are arguments, in seconds."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def hurry(self) -> None:
        """Something was begun: poll at once."""
        self._at_s = 0.0

    def wait_s(self, now: float) -> float:
        """How long until the next poll; zero or less: it is due."""
        return self._at_s - now

    def polled(self, now: float, running: int, *, load_s: float | None, store_s: float | None) -> None:
        """All of `running` transfers were polled. `load_s`, `store_s`: how long one of that direction takes, None if
        none runs."""
        pause_s = STORE_POLL_S if store_s is None else min(store_s / STORE_POLLS, STORE_POLL_S)
        if load_s is not None:
            pause_s = min(pause_s, load_s / LOAD_POLLS, LOAD_POLL_S)
        self._at_s = now + max(pause_s, min(POLL_S * running, LOAD_POLL_S))
