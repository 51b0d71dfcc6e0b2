"""What each step of the engine computed of prompts, and how long it took: the samples of the prefill estimate.

Tokens: NixlTiersConnector hands over what vLLM scheduled. Time: of the forward pass, as the first rank publishes it in
the region. With vLLM's own connector there is neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

MAX_OPEN_STEPS: Final = 32  # scheduled, and without a time
MIN_SHARE: Final = 0.5  # of a step's tokens that belong to prompts: with fewer it is a step of decoding

Scheduled = tuple[int, int, bool]  # computed before, computed in the step, whether that is part of a prompt


@dataclass
class _Step:
    number: int
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


class PrefillMeter:
    """Pairs steps with their times.

    `observe(tokens, mean context, seconds)` gets every step that computed mostly prompts. `published(step)` is the time
    of a step, once the first rank has published it, else None.
    """

    def __init__(self, observe: Callable[[int, float, float], None], published: Callable[[int], float | None]) -> None:
        self._observe = observe
        self._published = published
        self.number = -1
        """Of the last step."""
        self.unpublished: deque[_Step] = deque(maxlen=MAX_OPEN_STEPS)
        """Steps of mostly prompts whose time is still to be published; their times are taken by `take_published`."""

    def scheduled(self, requests: Iterable[Scheduled]) -> int:
        """What the last step computes; returns its number, by which workers publish its time."""
        step = _Step(self.number)
        for computed, count, prompt in requests:
            step.add(computed, computed + count, prompt)
        if step.is_prefill:
            self.unpublished.append(step)
        return self.number

    def take_published(self) -> None:
        waiting = deque[_Step](maxlen=MAX_OPEN_STEPS)
        for step in self.unpublished:
            seconds = self._published(step.number)
            if seconds is None:
                waiting.append(step)
            else:
                self._observe(step.tokens, step.contexts / step.tokens, seconds)
        self.unpublished = waiting
