"""How long a step's forward pass takes on a worker, published in the region for the prefill estimate."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

MAX_OPEN: Final = 8  # steps whose events have not fired: an asynchronous scheduler runs two ahead

Publish = Callable[[int, float], None]  # step, seconds


class StepClock(Protocol):
    def begin(self, step: int) -> None:
        """Right before the step's work is launched."""

    def end(self) -> None:
        """Right after the forward pass was launched, or has ended."""


class NoClock:
    """Of the other ranks."""

    def begin(self, step: int) -> None: ...

    def end(self) -> None: ...


class HostClock:
    """Of a device on which launching a step is running it."""

    def __init__(self, publish: Publish, clock: Callable[[], float] = time.perf_counter) -> None:
        self._publish = publish
        self._clock = clock
        self._step: int | None = None
        self._began_s = 0.0

    def begin(self, step: int) -> None:
        self._step, self._began_s = step, self._clock()

    def end(self) -> None:
        if self._step is not None:
            self._publish(self._step, self._clock() - self._began_s)
            self._step = None


class EventClock:
    """Of a GPU: a pair of events around the step on its stream, published at a later step once both have fired. Nothing
    waits for the GPU."""

    def __init__(self, publish: Publish, make_event: Callable[[], Any] | None = None) -> None:
        self._publish = publish
        self._make_event = make_event or _cuda_event
        self._free: list[Any] = []
        self._open: deque[tuple[int, Any, Any]] = deque()
        self._begun: tuple[int, Any] | None = None

    def begin(self, step: int) -> None:
        self._collect()
        if len(self._open) < MAX_OPEN:
            self._begun = step, self._record()

    def end(self) -> None:
        if self._begun is not None:
            step, began = self._begun
            self._begun = None
            self._open.append((step, began, self._record()))

    def _record(self) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def _collect(self) -> None:
        while self._open and self._open[0][2].query():
            step, began, ended = self._open.popleft()
            self._publish(step, began.elapsed_time(ended) / 1000)
            self._free += (began, ended)


def _cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
