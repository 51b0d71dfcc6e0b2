"""Existence checks of keys on a shared medium: single keys at once, a chain by galloping search in a few waves.

The tier starts checks and collects answers; threads wait for the medium. A request that the medium never answers costs
its thread until it returns, and no more: a check that uses it ends at its timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from nixl_tiers.base.chunk import Key

MAX_CONCURRENT: Final = 16  # requests of one wave, and threads
TIMEOUT_S: Final = 5.0  # of a check; keys that are not known by then stay unknown
MAX_WAVES: Final = 5  # the first key, the gallop, and bisecting a chain of some thousands

Presence = bool | None
"""Of one key: it exists, it does not, or None: the medium gave no answer."""
Search = Generator[list[int], list[Presence], tuple[list[int], list[int]]]
"""Yields positions to check, is sent their presence, returns the positions found and those absent."""


def galloping_search(count: int) -> Search:
    """How many keys of a chain of `count` exist? Holes are not searched for; a load finds them.

    The first key is checked alone: most prompts are stored nowhere.
    """
    low, high = 0, count  # keys below `low` are assumed to exist, those from `high` on not to
    absent: list[int] = []
    wave = [0]
    for number in range(MAX_WAVES):
        for position, exists in zip(wave, (yield wave), strict=True):
            if not exists:
                high, absent = position, [position] if exists is False else []
                break
            low = position + 1
        if low >= high:
            break
        if number == 0:
            gallop = {min((1 << step) - 1, count - 1) for step in range(1, count.bit_length() + 1)}
            wave = sorted(gallop)[-MAX_CONCURRENT:]
        elif high - low <= MAX_CONCURRENT:
            wave = list(range(low, high))
        else:
            wave = [low + (high - low) * step // (MAX_CONCURRENT + 1) for step in range(1, MAX_CONCURRENT + 1)]
    return list(range(low)), absent


def one_by_one(count: int) -> Search:
    """Which of `count` unrelated keys exist?"""
    presence = yield list(range(count))
    return [n for n in range(count) if presence[n]], [n for n in range(count) if presence[n] is False]


@dataclass(frozen=True)
class Answer:
    """To one check. Keys that are neither found nor absent are unknown."""

    check_id: int
    found: list[Key]
    absent: list[Key]


@dataclass(eq=False)
class _Check:
    check_id: int
    keys: Sequence[Key]
    search: Search
    requests: list[Future[Presence]]
    deadline_s: float


class ExistenceChecker:
    """Checks on one medium, to be used by one thread. `exists` is called on other threads, and may block or raise."""

    def __init__(self, exists: Callable[[Key], Presence], clock: Callable[[], float] = time.monotonic) -> None:
        self._exists = exists
        self._clock = clock
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="nixl_tiers-exists")
        self._checks: list[_Check] = []
        self._abandoned: list[Future[Presence]] = []  # timed out, but their threads still wait

    def start(self, check_id: int, keys: Sequence[Key], *, chain: bool) -> None:
        search = galloping_search(len(keys)) if chain else one_by_one(len(keys))
        requests = self._submit(keys, next(search))
        self._checks.append(_Check(check_id, keys, search, requests, self._clock() + TIMEOUT_S))

    def answers(self) -> list[Answer]:
        """The checks that have ended since the last call."""
        ended: list[Answer] = []
        for check in list(self._checks):
            timed_out = self._clock() > check.deadline_s
            if timed_out:
                self._abandon(check)
            elif not all(request.done() for request in check.requests):
                continue
            try:
                positions = check.search.send([_presence_of(request) for request in check.requests])
                while timed_out:
                    positions = check.search.send([None] * len(positions))
                check.requests = self._submit(check.keys, positions)
            except StopIteration as end:
                found, absent = ([check.keys[n] for n in positions] for positions in end.value)
                ended.append(Answer(check.check_id, found, absent))
                self._checks.remove(check)
        return ended

    @property
    def busy(self) -> bool:
        return bool(self._checks)

    def clear(self) -> None:
        """Cancel all checks; they are not answered."""
        for check in self._checks:
            self._abandon(check)
        self._checks.clear()

    def close(self) -> None:
        self.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, keys: Sequence[Key], positions: Sequence[int]) -> list[Future[Presence]]:
        self._abandoned = [request for request in self._abandoned if not request.done()]
        if len(self._abandoned) >= MAX_CONCURRENT:  # no thread is left to take it from the queue
            return [_UNKNOWN] * len(positions)
        return [self._pool.submit(self._exists, keys[n]) for n in positions]

    def _abandon(self, check: _Check) -> None:
        self._abandoned += [request for request in check.requests if not request.cancel() and not request.done()]


_UNKNOWN: Final[Future[Presence]] = Future()
_UNKNOWN.set_result(None)


def _presence_of(request: Future[Presence]) -> Presence:
    answered = request.done() and not request.cancelled() and request.exception() is None
    return request.result() if answered else None
