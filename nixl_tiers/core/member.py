"""A member of a storage tier: one mover, and the part of the tier's slots that it alone reads and writes.

Most tiers have one. The members of a tier share its index, its queues and its price; each has its own state, circuits,
speed, and jobs that died with its mover, so that one that fails takes nothing from the others but its rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.pricing import ThroughputEstimate
from nixl_tiers.core.types import BreakerLimits, BreakerState, Direction, Job, Limits, OrphanedJobs, TierState


class Breaker:
    """One tier's circuit in one direction, which is probed to see whether it works again.

    Closed: all requests are let through. Open: none. Half-open: one probe at a time.
    """

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.limits = limits or BreakerLimits()
        self.state = BreakerState.CLOSED
        self.episode = 0  # how often it has opened
        self._results: deque[tuple[float, bool]] = deque(maxlen=self.limits.results)
        self._closed_at = float("-inf")
        self.backoff_s = 0.0  # how long it stays open this time
        self._retry_at = 0.0
        self._good = 0
        self._probing = False

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    @property
    def wants_probe(self) -> bool:
        return self.state is BreakerState.HALF_OPEN and not self._probing

    def record(self, good: bool, now: float) -> None:
        """One more result. While the circuit is not closed only those of probes count (end_probe)."""
        if self.state is not BreakerState.CLOSED:
            return
        self._results.append((now, good))
        if good:
            return
        bad = sum(not was_good for when, was_good in self._results if now - when <= self.limits.window_s)
        if bad >= self.limits.failures_to_open:
            self.trip(now)

    def trip(self, now: float) -> None:
        """Open the circuit; does nothing if it is open."""
        if self.state is BreakerState.OPEN:
            return
        calm = self.state is BreakerState.CLOSED and now - self._closed_at > max(self.limits.window_s, self.backoff_s)
        self.backoff_s = self.limits.min_backoff_s if calm else min(2 * self.backoff_s, self.limits.max_backoff_s)
        self._retry_at = now + self.backoff_s
        self.state = BreakerState.OPEN
        self.episode += 1
        self._results.clear()

    def watch(self, now: float) -> None:
        """Call at every turn: an open circuit whose back-off has passed becomes half-open."""
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self.state = BreakerState.HALF_OPEN
            self._good = 0
            self._probing = False

    def begin_probe(self) -> int:
        """A probe was sent; returns the number to pass to `end_probe`. Only while `wants_probe`."""
        assert self.wants_probe, "a probe of a circuit that wants none"
        self._probing = True
        return self.episode

    def end_probe(self, episode: int, good: bool, now: float) -> None:
        """A probe of another episode, or one that has ended already, is ignored."""
        if self.state is not BreakerState.HALF_OPEN or episode != self.episode or not self._probing:
            return
        self._probing = False
        if not good:
            self.trip(now)
            return
        self._good += 1
        if self._good >= self.limits.probes_to_close:
            self.state = BreakerState.CLOSED
            self._closed_at = now


UNLIMITED: Final = 1 << 62


@dataclass(eq=False)
class Member:
    """`number`: of its mover, among those of all tiers; `place`: in the tier of number `tier`. `slot_range`: its first
    slot, which the medium calls slot 0, and the one behind its last. `writes`: whether its tier is ever written."""

    tier: int
    number: int
    place: int
    slot_range: tuple[int, int]
    limits: Limits
    writes: bool
    garbage: DeferredFree = field(repr=False)
    jobs: dict[int, Job] = field(default_factory=dict)  # the open ones
    state: TierState = TierState.DOWN
    dead: deque[OrphanedJobs] = field(
        default_factory=deque
    )  # of movers that were killed or have died, the oldest first
    quarantined: int = 0  # host rows of abandoned loads, until the mover is done with them or reaped
    send_credits: int = UNLIMITED  # how many more messages its mover takes now
    refusal: Literal["", "denied", "unreachable"] = ""  # why the medium takes no rows, as its mover says
    to_delete: deque[tuple[int, Key]] = field(default_factory=deque)  # (slot by the medium's number, key)

    def __post_init__(self) -> None:
        # One for each direction: a disk on which writes fail, or a read-only bucket, can still be read.
        self.breakers = {direction: Breaker(self.limits.breaker) for direction in Direction}
        self.loads = self.breakers[Direction.LOAD]
        self.throughput = {direction: ThroughputEstimate(self.limits.assumed_bytes_per_s) for direction in Direction}

    @property
    def readable(self) -> bool:
        """Whether loads may be planned."""
        return self.state is not TierState.DOWN and self.loads.closed

    @property
    def writable(self) -> bool:
        """Whether stores may be planned."""
        return self.state is TierState.UP and self.breakers[Direction.STORE].closed

    @property
    def refuses_stores(self) -> bool:
        """Whether nothing can be written here for a while."""
        return self.state is TierState.DOWN or not self.breakers[Direction.STORE].closed

    @property
    def takes_rows(self) -> bool:
        """Whether new rows belong here, if there are others that they can go to."""
        return self.writable and self.readable and not self.dead

    @property
    def circuit(self) -> BreakerState:
        """The worse of both breakers. One that is down is an open circuit, whatever opened it."""
        if self.state is TierState.DOWN:
            return BreakerState.OPEN
        if not self.writes:  # what a kill has opened for stores, no store ever closes
            return self.loads.state
        return max(breaker.state for breaker in self.breakers.values())

    @property
    def first_slot(self) -> int:
        return self.slot_range[0]

    def under_way(self, direction: Direction) -> int:
        """How many rows its mover is moving."""
        return sum(len(job.moves) for job in self.jobs.values() if job.direction is direction)

    def shut(self) -> None:
        """Its medium does not answer, or is about to be opened anew."""
        self.state = TierState.DOWN
        self.clear_deletes()

    def clear_deletes(self) -> None:
        """The medium lists its rows when it is opened again, including those that were to be deleted. O(1)."""
        self.garbage.add(self.to_delete)
        self.to_delete = deque()

    @property
    def store_credits(self) -> int:
        """How many store jobs may be planned now. Deletes are sent before stores, or they would delete rows that have
        just been written; and each store may evict, and so delete, as many rows as it writes."""
        if len(self.to_delete) > self.limits.deletes_per_turn:
            return 0
        size = self.limits.deletes_per_batch
        return (self.send_credits + len(self.to_delete) // -size - 1) // 2 - 1

    def delete_batches(self, most: int) -> list[list[tuple[int, Key]]]:
        """(slot, key) to delete, in batches of at most `most`, as many as there are credits for and a turn has room
        for; the rest waits."""
        batches: list[list[tuple[int, Key]]] = []
        waiting, turn = len(self.to_delete), self.limits.deletes_per_turn
        # Where stores were planned, there was room for them all, and what these have evicted is sent before them.
        left = waiting - turn if waiting > 2 * turn else 0
        while self.send_credits > 0 and len(self.to_delete) > left:
            batches.append([self.to_delete.popleft() for _ in range(min(most, len(self.to_delete)))])
            self.send_credits -= 1
        return batches
