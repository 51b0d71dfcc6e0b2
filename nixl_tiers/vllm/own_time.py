"""How long NixlTiersConnector itself keeps the engine's thread: in each step, and before each first token.

What vLLM's part of the connector takes is in it, since users pay for both; what a step pauses because no request can go
on is not. Of the workers the first rank's time counts, as all ranks of a step wait for each other; it comes in the
region, and goes up by a step at once.

The clock is read in the connector's own methods, and where reports are made. Not timed are calls that do little: of a
request `request_finished`, of a step `build_connector_worker_meta`, `clear_connector_metadata` and, but for reports,
`get_kv_connector_stats`; and what is not of a step, as `reset_cache`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from nixl_tiers.base.tier_traits import CPU
from nixl_tiers.core.stats import Samples

MAX_ENDING: Final = 1024  # first tokens of the steps under way


class OwnTime:
    """Of one side, in its process: `seconds` in the connector's calls so far."""

    def __init__(self) -> None:
        self.seconds = 0.0


class FirstTokens:
    """Which requests have their first token by which step. Pure: `total` is the connector's time so far."""

    def __init__(self) -> None:
        self.open: dict[str, tuple[int, float]] = {}  # no first token yet: tokens of the prompt, the total at arrival
        self._computing: dict[str, int] = {}  # tokens of the prompt that are left to compute
        self.ending: deque[tuple[int, float]] = deque(maxlen=MAX_ENDING)  # the step, the total at arrival

    def arrived(self, request: str, tokens: int, total: float) -> None:
        self.open[request] = tokens, total

    def scheduled(self, output: Any, step: int) -> None:
        """What vLLM's SchedulerOutput says of a step. A request that is preempted before its first token counts no
        more."""
        if gone := (*(output.finished_req_ids or ()), *(output.preempted_req_ids or ())):
            for request in gone:
                self.open.pop(request, None)
                self._computing.pop(request, None)
        for new in output.scheduled_new_reqs:
            if new.req_id in self.open:
                self._computing[new.req_id] = self.open[new.req_id][0] - new.num_computed_tokens
        if not self._computing:
            return
        for request in list(self._computing):
            self._computing[request] -= output.num_scheduled_tokens.get(request, 0)
            if self._computing[request] <= 0:
                del self._computing[request]
                self.ending.append((step, self.open.pop(request)[1]))

    def ended(self, step: int, total: float) -> list[float]:
        """The connector's time before each first token of the steps up to this one."""
        ended = []
        while self.ending and self.ending[0][0] <= step:
            ended.append(max(0.0, total - self.ending.popleft()[1]))
        return ended


class OwnTimes:
    """Of both sides, in the scheduler's process. `published`: the last step that the first rank has ended, and its
    seconds in all steps. A step has nothing to do here unless a first token is awaited (`first_tokens.open`,
    `first_tokens.ending`)."""

    def __init__(self, scheduler: OwnTime, published: Callable[[], tuple[int, float]]) -> None:
        self.scheduler = scheduler
        self.first_tokens = FirstTokens()
        self._published = published
        self._samples = Samples()

    def arrived(self, request: str, tokens: int) -> None:
        self.first_tokens.arrived(request, tokens, self.scheduler.seconds + self._published()[1])

    def look(self) -> None:
        """Whether there are first tokens by now."""
        step, worker_s = self._published()
        for seconds in self.first_tokens.ended(step, self.scheduler.seconds + worker_s):
            self._samples.observe(CPU, "connector_first_token_s", seconds)

    def numbers(self) -> Mapping[str, float]:
        """By the names of `base/metrics.py`."""
        step, worker_s = self._published()
        return {
            "connector_scheduler_s": self.scheduler.seconds,
            "connector_worker_s": worker_s,
            "connector_steps": float(step + 1),
        }

    def take_samples(self) -> dict[tuple[str, str], list[float]]:
        return self._samples.take()
