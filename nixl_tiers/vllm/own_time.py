"""How long NixlTiersConnector itself keeps the engine's thread: in each step, and before each first token.

What vLLM's part of the connector takes is in it, since users pay for both; what a step pauses because no request can go
on is not. Of the workers the first rank's time counts, as all ranks of a step wait for each other; it comes in the
region, and goes up by a step at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

from nixl_tiers.base.metrics import CPU
from nixl_tiers.core.stats import Samples

SCHEDULER_CALLS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
    "reset_cache",
)
WORKER_CALLS: Final = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
)
MAX_ENDING: Final = 1024  # first tokens of the steps under way


class OwnTime:
    """Of one side, in its process: `seconds` in the connector's calls so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.inside = False


Connector = TypeVar("Connector")


def timed(connector: type[Connector]) -> type[Connector]:
    """A class decorator: adds up the time of each of these calls in `_own_time` of the connector."""
    for name in (*SCHEDULER_CALLS, *WORKER_CALLS):
        if (call := getattr(connector, name, None)) is not None:  # vLLM has some of them from 0.32 on
            setattr(connector, name, _timed(call))
    return connector


def _timed(call: Callable[..., Any]) -> Callable[..., Any]:
    clock = time.perf_counter

    @wraps(call)
    def timed_call(self: Any, *arguments: Any, **named: Any) -> Any:
        own = self._own_time
        if own.inside:  # a call by another one, of whose time this is part
            return call(self, *arguments, **named)
        own.inside, began_s = True, clock()
        try:
            return call(self, *arguments, **named)
        finally:
            own.seconds += clock() - began_s
            own.inside = False

    return timed_call


class FirstTokens:
    """Which requests have their first token by which step. Pure: `total` is the connector's time so far."""

    def __init__(self) -> None:
        self._arrived: dict[str, tuple[int, float]] = {}  # not scheduled yet: tokens of the prompt, the total then
        self._computing: dict[str, int] = {}  # tokens of the prompt that are left to compute
        self._ending: deque[tuple[int, float]] = deque(maxlen=MAX_ENDING)  # the step, the total at arrival

    def arrived(self, request: str, tokens: int, total: float) -> None:
        self._arrived[request] = tokens, total

    def scheduled(self, output: Any, step: int) -> None:
        """What vLLM's SchedulerOutput says of a step. A request that is preempted before its first token counts no
        more."""
        if gone := (*(output.finished_req_ids or ()), *(output.preempted_req_ids or ())):
            for request in gone:
                self._arrived.pop(request, None)
                self._computing.pop(request, None)
        for new in output.scheduled_new_reqs:
            if new.req_id in self._arrived:
                self._computing[new.req_id] = self._arrived[new.req_id][0] - new.num_computed_tokens
        if not self._computing:
            return
        for request in list(self._computing):
            self._computing[request] -= output.num_scheduled_tokens.get(request, 0)
            if self._computing[request] <= 0:
                del self._computing[request]
                self._ending.append((step, self._arrived.pop(request)[1]))

    @property
    def waiting(self) -> bool:
        """Whether there are steps with first tokens that have not ended."""
        return bool(self._ending)

    def ended(self, step: int, total: float) -> list[float]:
        """The connector's time before each first token of the steps up to this one."""
        ended = []
        while self._ending and self._ending[0][0] <= step:
            ended.append(max(0.0, total - self._ending.popleft()[1]))
        return ended


class OwnTimes:
    """Of both sides, in the scheduler's process. `published`: the last step that the first rank has ended, and its
    seconds in all steps."""

    def __init__(self, scheduler: OwnTime, published: Callable[[], tuple[int, float]]) -> None:
        self.scheduler = scheduler
        self._published = published
        self._first_tokens = FirstTokens()
        self._samples = Samples()

    def arrived(self, request: str, tokens: int) -> None:
        self._first_tokens.arrived(request, tokens, self.scheduler.seconds + self._published()[1])

    def scheduled(self, output: Any, step: int) -> None:
        self._first_tokens.scheduled(output, step)

    def look(self) -> None:
        """Once a step: whether there are first tokens by now."""
        if not self._first_tokens.waiting:
            return
        step, worker_s = self._published()
        for seconds in self._first_tokens.ended(step, self.scheduler.seconds + worker_s):
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
