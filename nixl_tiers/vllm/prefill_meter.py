"""What each step of the engine computed of prompts, and how long it took: the samples of the prefill estimate.

Tokens: NixlTiersConnector hands over what vLLM scheduled. vLLM's own connector reports less, so there they are the
advance of each request's position beyond its local and external hit, in whole chunks.

Time: of the forward pass, as the first rank publishes it in the region. With vLLM's own connector, which has no hook
before the forward pass, the time from when the step could begin (it was scheduled, and the step before had ended) until
vLLM processed its output. That holds for synchronous scheduling (a step is scheduled after the one before has ended)
and for asynchronous scheduling (while the one before still runs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

MAX_OPEN_STEPS: Final = 32  # scheduled, and without a time
PREFILL_CHUNKS: Final = 2  # a decoding request never advances by so many chunks in one step
MIN_SHARE: Final = 0.5  # of a step's tokens that belong to prompts: with fewer it is a step of decoding

Scheduled = tuple[int, int, bool]  # computed before, computed in the step, whether that is part of a prompt


@dataclass
class _Step:
    number: int
    began_s: float
    tokens: int = 0
    prompt_tokens: int = 0
    contexts: float = 0.0  # sum over tokens

    def add(self, start: int, end: int, prompt: bool) -> None:
        self.tokens += end - start
        self.prompt_tokens += (end - start) * prompt
        self.contexts += (end - start) * (start + end) / 2

    @property
    def is_prefill(self) -> bool:
        return self.prompt_tokens > 0 and self.prompt_tokens >= MIN_SHARE * self.tokens


class Positions:
    """How far each request has been computed, as far as vLLM's own connector shows it: in whole chunks."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}

    def hit(self, request: str, end: int) -> None:
        """The request has its first `end` tokens without computing them: a local hit, or a load."""
        self._at[request] = end

    def advance(self, request: str, end: int, chunk: int) -> tuple[int, int] | None:
        """The request has been offered to be stored up to token `end`. Returns what was computed of its prompt since
        the last call: [start, end). Of a request whose hits are unknown, as they are where all its whole chunks were a
        local hit, the first call says nothing."""
        start = self._at.get(request)
        self._at[request] = end
        if start is None or end - start < PREFILL_CHUNKS * chunk:
            return None
        return start, end

    def forget(self, request: str) -> None:
        """It has ended, or was preempted and begins again."""
        self._at.pop(request, None)


class PrefillMeter:
    """Pairs steps with their times. Pure: `now` is in seconds of any monotonic clock.

    `observe(tokens, mean context, seconds)` gets every step that computed mostly prompts. `published(step)` is the time
    of a step, once the first rank has published it, else None.
    """

    def __init__(
        self, observe: Callable[[int, float, float], None], published: Callable[[int], float | None] | None = None
    ) -> None:
        self._observe = observe
        self._published = published
        self.exact = published is not None
        """Whether `scheduled` reports what steps compute, rather than `positions`."""
        self._running: deque[_Step] = deque(maxlen=MAX_OPEN_STEPS)  # scheduled, and their output not yet processed
        self._last: _Step | None = None
        self._ended_s = 0.0
        self.number = -1
        """Of the last step."""
        self.unpublished: deque[_Step] = deque(maxlen=MAX_OPEN_STEPS)
        """Steps of mostly prompts whose time is still to be published; their times are taken by `end`."""
        self.positions = Positions()

    def be_exact(self, published: Callable[[int], float | None]) -> None:
        """From the next step on workers publish times, and `scheduled` is called."""
        self._published, self.exact = published, True

    def begin(self, now: float) -> None:
        """A step was scheduled; what it computes is reported until the next call."""
        self.number += 1
        if self._published is None:
            self._last = _Step(self.number, now)
            self._running.append(self._last)

    def scheduled(self, requests: Iterable[Scheduled]) -> int:
        """What the step that began last computes; returns its number, by which workers publish its time."""
        step = _Step(self.number, 0.0)
        for computed, count, prompt in requests:
            step.add(computed, computed + count, prompt)
        if step.is_prefill:
            self.unpublished.append(step)
        return self.number

    def stored(self, request: str, end: int, chunk: int) -> None:
        """In the step that began last the request has been offered to be stored up to token `end`."""
        if self._last is None or self.exact:
            return
        computed = self.positions.advance(request, end, chunk)
        if computed is not None:
            self._last.add(*computed, prompt=True)

    def end(self, now: float) -> None:
        """vLLM has processed the output of the first of the running steps."""
        if self._published is not None:
            self._take_published(self._published)
        elif self._running:
            step = self._running.popleft()
            began_s, self._ended_s = max(step.began_s, self._ended_s), now
            if step.is_prefill:
                self._add(step, now - began_s)

    def reset(self) -> None:
        """Requests begin again."""
        self.positions = Positions()

    def _take_published(self, published: Callable[[int], float | None]) -> None:
        waiting = deque[_Step](maxlen=MAX_OPEN_STEPS)
        for step in self.unpublished:
            seconds = published(step.number)
            if seconds is None:
                waiting.append(step)
            else:
                self._add(step, seconds)
        self.unpublished = waiting

    def _add(self, step: _Step, seconds: float) -> None:
        self._observe(step.tokens, step.contexts / step.tokens, seconds)
