"""Asking a shared medium for keys: along a chain by galloping and bisecting, wave by wave, each wave side by side.

The tier's loop leaves questions and collects answers; threads wait for the medium. A thread that the medium never lets
go is lost to later questions, and no more: these are given up in time, and with them the tier is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from nixl_tiers.chunk import Key

AT_ONCE: Final = 16  # questions of one wave, and threads
ANSWER_S: Final = 5.0  # after that, what is not known yet stays unknown
WAVES: Final = 5  # the first place, the gallop, and what a chain of some thousands needs to be narrowed down

Seen = bool | None
"""Of one key: there, not there, or None: the medium did not say."""
Search = Generator[list[int], list[Seen], tuple[list[int], list[int]]]
"""Yields places to ask for, takes what was seen there, returns the places of what is found and of what is absent."""


def galloping_search(count: int) -> Search:
    """How far does a chain of `count` keys reach? Its holes are not looked for, a load finds them.

    The first place is asked for alone: most prompts are nobody's.
    """
    low, high = 0, count  # all below `low` is taken to be there, nothing from `high` on
    absent: list[int] = []
    wave = [0]
    for number in range(WAVES):
        for place, seen in zip(wave, (yield wave), strict=True):
            if not seen:
                high, absent = place, [place] if seen is False else []
                break
            low = place + 1
        if low >= high:
            break
        if number == 0:
            wave = sorted({min((1 << step) - 1, count - 1) for step in range(1, count.bit_length() + 1)})[-AT_ONCE:]
        elif high - low <= AT_ONCE:
            wave = list(range(low, high))
        else:
            wave = [low + (high - low) * step // (AT_ONCE + 1) for step in range(1, AT_ONCE + 1)]
    return list(range(low)), absent


def one_by_one(count: int) -> Search:
    """Which of `count` keys that have nothing to do with each other are there?"""
    seen = yield list(range(count))
    return [n for n in range(count) if seen[n]], [n for n in range(count) if seen[n] is False]


@dataclass(frozen=True)
class Answer:
    """To the probe of this number. What is neither found nor absent is not known."""

    probe: int
    found: list[Key]
    absent: list[Key]


@dataclass(eq=False)
class _Question:
    probe: int
    keys: Sequence[Key]
    search: Search
    looks: list[Future[Seen]]
    until_s: float


class ExistenceChecker:
    """Questions to one medium, for one thread; `look` is called on others, and may take its time or raise."""

    def __init__(self, look: Callable[[Key], Seen], clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="nixl_tiers-probe")
        self._open: list[_Question] = []
        self._stuck: list[Future[Seen]] = []  # given up, and still with their threads

    def ask(self, probe: int, keys: Sequence[Key], *, chain: bool) -> None:
        search = galloping_search(len(keys)) if chain else one_by_one(len(keys))
        looks = self._start(keys, next(search))
        self._open.append(_Question(probe, keys, search, looks, self._clock() + ANSWER_S))

    def answers(self) -> list[Answer]:
        """What has been found out since the last call."""
        ended: list[Answer] = []
        for question in list(self._open):
            late = self._clock() > question.until_s
            if late:
                self._give_up(question)
            elif not all(look.done() for look in question.looks):
                continue
            try:
                places = question.search.send([_seen(look) for look in question.looks])
                while late:
                    places = question.search.send([None] * len(places))
                question.looks = self._start(question.keys, places)
            except StopIteration as end:
                found, absent = ([question.keys[place] for place in places] for places in end.value)
                ended.append(Answer(question.probe, found, absent))
                self._open.remove(question)
        return ended

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def clear(self) -> None:
        """Forget the questions: nobody wants to know any more."""
        for question in self._open:
            self._give_up(question)
        self._open.clear()

    def close(self) -> None:
        self.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, keys: Sequence[Key], places: Sequence[int]) -> list[Future[Seen]]:
        self._stuck = [look for look in self._stuck if not look.done()]
        if len(self._stuck) >= AT_ONCE:  # nobody would take it from the queue
            return [_UNSEEN] * len(places)
        return [self._pool.submit(self._look, keys[place]) for place in places]

    def _give_up(self, question: _Question) -> None:
        self._stuck += [look for look in question.looks if not look.cancel() and not look.done()]


_UNSEEN: Final[Future[Seen]] = Future()
_UNSEEN.set_result(None)


def _seen(look: Future[Seen]) -> Seen:
    return look.result() if look.done() and not look.cancelled() and look.exception() is None else None
