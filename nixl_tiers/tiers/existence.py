"""Existence checks of keys on a shared medium: a chain by galloping search in a few waves, other keys one by one.

The tier starts checks and collects answers; threads wait for the medium. A request that the medium never answers costs
its thread until it returns, and no more: a check that uses it ends at its timeout. `UploadChecks` asks before uploads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.times import PRODUCTION, Times

MAX_CONCURRENT: Final = 16  # requests of one wave, and threads
MAX_WAVES: Final = 5  # the first key, the gallop, and bisecting a chain of some thousands
UPLOAD_THREADS: Final = 8  # for requests before uploads

Presence = int | None
"""Of one key: when it was last written, in Unix seconds by the server's clock; 0: it is not there; None: the medium has
not answered."""
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
                high, absent = position, [position] if exists == 0 else []
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
    """Which of `count` unrelated keys exist? In waves, so that other checks have their turns."""
    presence: list[Presence] = []
    for start in range(0, count, MAX_CONCURRENT):
        presence += yield list(range(start, min(start + MAX_CONCURRENT, count)))
    return [n for n in range(count) if presence[n]], [n for n in range(count) if presence[n] == 0]


@dataclass(frozen=True)
class Answer:
    """To one check. Keys that are neither found nor absent are unknown. `found`: with the time of their last write, or
    any before: that of a key that was not asked for is taken to be that of the older one of those around it."""

    check_id: int
    found: list[tuple[Key, int]]
    absent: list[Key]


@dataclass(eq=False)
class _Check:
    check_id: int
    keys: Sequence[Key]
    search: Search
    positions: list[int]  # which of them are asked for now
    requests: list[Future[Presence]]
    deadline_s: float
    written_s: dict[int, int] = field(default_factory=dict)  # of those that are there


class ExistenceChecker:
    """Checks on one medium, to be used by one thread. `exists` is called on other threads, and may block or raise."""

    def __init__(
        self,
        exists: Callable[[Key], Presence],
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = PRODUCTION.s3_check_s,
    ) -> None:
        self._exists = exists
        self._clock = clock
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="nixl_tiers-exists")
        self._checks: list[_Check] = []
        self._abandoned: list[Future[Presence]] = []  # timed out, but their threads still wait
        self._stuck_at_s: float | None = None  # since when they are all of the threads

    def start(self, check_id: int, keys: Sequence[Key], *, chain: bool) -> None:
        search = galloping_search(len(keys)) if chain else one_by_one(len(keys))
        positions = next(search)
        requests = self._submit(keys, positions)
        self._checks.append(_Check(check_id, keys, search, positions, requests, self._clock() + self._timeout_s))

    def answers(self) -> list[Answer]:
        """The checks that have ended since the last call."""
        ended: list[Answer] = []
        for check in list(self._checks):
            timed_out = self._clock() > check.deadline_s
            if timed_out:
                self._abandon(check)
            elif not all(request.done() for request in check.requests):
                continue
            presence = [_presence_of(request) for request in check.requests]
            check.written_s.update((n, at) for n, at in zip(check.positions, presence, strict=True) if at)
            try:
                check.positions = check.search.send(presence)
                while timed_out:
                    check.positions = check.search.send([None] * len(check.positions))
                check.requests = self._submit(check.keys, check.positions)
            except StopIteration as end:
                found, absent = end.value
                times = _times(found, check.written_s)
                ended.append(
                    Answer(
                        check.check_id,
                        [(check.keys[n], at) for n, at in zip(found, times, strict=True)],
                        [check.keys[n] for n in absent],
                    )
                )
                self._checks.remove(check)
        return ended

    @property
    def busy(self) -> bool:
        return bool(self._checks)

    @property
    def stuck_s(self) -> float:
        """For how long no thread was left, by when this was called. 0: there are some."""
        self._drop_returned()
        if len(self._abandoned) < MAX_CONCURRENT:
            self._stuck_at_s = None
        elif self._stuck_at_s is None:
            self._stuck_at_s = self._clock()
        return 0.0 if self._stuck_at_s is None else self._clock() - self._stuck_at_s

    def clear(self) -> None:
        """Cancel all checks; they are not answered."""
        for check in self._checks:
            self._abandon(check)
        self._checks.clear()

    def close(self) -> None:
        self.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, keys: Sequence[Key], positions: Sequence[int]) -> list[Future[Presence]]:
        self._drop_returned()
        if len(self._abandoned) >= MAX_CONCURRENT:  # no thread is left to take it from the queue
            return [_UNKNOWN] * len(positions)
        return [self._pool.submit(self._exists, keys[n]) for n in positions]

    def _drop_returned(self) -> None:
        self._abandoned = [request for request in self._abandoned if not request.done()]

    def _abandon(self, check: _Check) -> None:
        self._abandoned += [request for request in check.requests if not request.cancel() and not request.done()]


_UNKNOWN: Final[Future[Presence]] = Future()
_UNKNOWN.set_result(None)


def _presence_of(request: Future[Presence]) -> Presence:
    answered = request.done() and not request.cancelled() and request.exception() is None
    return request.result() if answered else None


def _times(found: Sequence[int], written_s: Mapping[int, int]) -> list[int]:
    """Of each position found, the last of which was asked for: the time before which it was not written."""
    times, behind = [], 0
    for n in reversed(found):
        behind = written_s.get(n, behind)
        times.append(behind)
    times.reverse()
    before = times[0] if times else 0
    for place, n in enumerate(found):
        before = written_s.get(n, before)
        times[place] = min(times[place], before)
    return times


class UploadChecks:
    """Whether rows that are about to be uploaded are there by now. An upload waits for the answer, but never long: a
    server that is late is not asked for a while."""

    def __init__(
        self, exists: Callable[[Key], Presence], clock: Callable[[], float] = time.monotonic, times: Times = PRODUCTION
    ) -> None:
        """`exists`: called on other threads, and may block or raise."""
        self._times = times
        self._exists = exists
        self._clock = clock
        self._pool = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="nixl_tiers-upload-check")
        self._asked: dict[Key, Future[Presence]] = {}
        self._first: tuple[Key, float] | None = None  # the upload that waits, and until when
        self._not_before = 0.0

    def ask(self, keys: Iterable[Key]) -> None:
        if self._clock() >= self._not_before:
            self._asked.update((key, self._pool.submit(self._exists, key)) for key in keys)

    def answer(self, key: Key) -> Presence:
        """Of the upload that is the next: None while it is to wait for an answer; 0 if there is none."""
        request = self._asked.get(key)
        if request is None or request.done():
            return (request and _presence_of(request)) or 0
        now = self._clock()
        if self._first is None or self._first[0] != key:
            self._first = key, now + self._times.s3_upload_check_s
        if now <= self._first[1]:
            return None
        self._not_before = now + self._times.s3_upload_check_retry_s
        self.clear()
        return 0

    def forget(self, key: Key) -> None:
        """Its store has ended."""
        if (request := self._asked.pop(key, None)) is not None:
            request.cancel()

    def clear(self) -> None:
        for key in [*self._asked]:
            self.forget(key)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
