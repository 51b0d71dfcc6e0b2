"""The limit of concurrent transfers follows bandwidth x latency, within its bounds, on any server."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_tiers.tiers.s3.concurrency import (
    FIRST,
    GAIN,
    LOAD_POLL_S,
    LOAD_POLLS,
    POLL_S,
    PROBE,
    STORE_POLL_S,
    STORE_POLLS,
    PollPace,
    TransferLimit,
)


@dataclass
class Server:
    """Answers a transfer after `latency_s`, and no more than `rate` of them in a second. Its times vary by `noise`."""

    latency_s: float
    rate: float
    noise: float = 0.0
    random: Random = field(default_factory=lambda: Random(1))
    free_s: float = 0.0

    def end_of(self, started_s: float) -> float:
        self.free_s = max(self.free_s, started_s) + 1 / self.rate
        latency_s = self.latency_s * (1 + self.noise * self.random.random())
        return max(started_s + latency_s, self.free_s)

    @property
    def path(self) -> float:
        """How many transfers fill the path to it."""
        return self.rate * self.latency_s


@dataclass
class Client:
    """Has more to transfer than ever ends, unless `demand` bounds how many run."""

    limit: TransferLimit
    now: float = 0.0
    running: list[tuple[float, float]] = field(default_factory=list)  # (end, start)
    seen: set[int] = field(default_factory=set)

    def run(self, server: Server, seconds: float, demand: int = 1 << 30) -> float:
        """Transfers that ended in a second, in the last half of this time."""
        until, ended = self.now + seconds, 0
        while self.now < until:
            while len(self.running) < min(self.limit.limit, demand):
                heapq.heappush(self.running, (server.end_of(self.now), self.now))
            self.now, started_s = heapq.heappop(self.running)
            ended += self.now > until - seconds / 2
            self.limit.ended(started_s, self.now, waiting=demand > self.limit.limit)
            self.seen.add(self.limit.limit)
        return ended / (seconds / 2)


servers = st.builds(
    Server,
    latency_s=st.floats(0.002, 0.1),
    rate=st.floats(20, 1000),
    noise=st.floats(0, 0.5),
    random=st.integers(0, 1000).map(Random),
)


@settings(deadline=None, max_examples=40)
@given(server=servers, most=st.integers(1, 128))
def test_the_path_is_full_and_not_much_more(server: Server, most: int) -> None:
    client = Client(TransferLimit(most))
    rate = client.run(server, 100 * server.latency_s + 400 / server.rate)
    latency_s = server.latency_s * (1 + server.noise / 2)
    assert rate >= 0.85 * min(server.rate, most / latency_s)
    assert max(client.seen) <= most
    assert client.limit.limit <= max(FIRST, 1.5 * GAIN * max(PROBE, server.path * (1 + server.noise)) + 1)


@settings(deadline=None)
@given(
    most=st.integers(1, 128),
    steps=st.lists(st.tuples(st.sampled_from(["ended", "failed"]), st.floats(0, 10), st.booleans()), max_size=300),
)
def test_it_stays_within_its_bounds_whatever_happens(most: int, steps: list[tuple[str, float, bool]]) -> None:
    limit, now = TransferLimit(most), 0.0
    for what, seconds, waiting in steps:
        now += seconds / 10
        if what == "ended":
            limit.ended(now - seconds, now, waiting=waiting)
        else:
            limit.failed(now - seconds, now)
        assert 1 <= limit.limit <= most


def test_failures_halve_it_once_for_all_that_were_under_way() -> None:
    client = Client(TransferLimit(64))
    client.run(Server(latency_s=0.05, rate=1e6), 5.0)
    assert client.limit.limit == 64
    for _ in range(64):
        client.limit.failed(client.now, client.now + 1)
    assert client.limit.limit == 32


def test_polls_follow_how_long_transfers_take_and_how_many_run() -> None:
    pace = PollPace()
    assert pace.wait_s(10.0) <= 0, "at first it is due"
    pace.polled(10.0, 2, load_s=0.02, store_s=0.1)
    assert pace.wait_s(10.0) == pytest.approx(0.02 / LOAD_POLLS), "a request waits for a download"
    pace.polled(10.0, 2, load_s=None, store_s=0.1)
    assert pace.wait_s(10.0) == pytest.approx(0.1 / STORE_POLLS)
    pace.polled(10.0, 40, load_s=0.0, store_s=None)  # not known yet
    assert pace.wait_s(10.0) == pytest.approx(40 * POLL_S)
    pace.polled(10.0, 1000, load_s=30.0, store_s=None)
    assert pace.wait_s(10.0) == pytest.approx(LOAD_POLL_S)
    pace.polled(10.0, 64, load_s=None, store_s=30.0)
    assert pace.wait_s(10.0) == pytest.approx(STORE_POLL_S)
    pace.polled(10.0, 0, load_s=None, store_s=None)  # only what was given up
    assert pace.wait_s(10.0) == pytest.approx(STORE_POLL_S)
    assert pace.wait_s(10.0 + STORE_POLL_S) <= 1e-9
    pace.hurry()
    assert pace.wait_s(10.0) <= 0
