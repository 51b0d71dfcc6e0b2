"""An engine of bench.crossover, in its child process: it says what was expected of a request, beside what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

from bench.first_token_engine import FirstTokenEngine
from bench.rounds import cpu_seconds
from demo import vllm_cpu
from nixl_tiers.core import pricing
from tests.support import inside

READY_S: Final = 300.0
MEASURES_S: Final = 5.0


class Trace:
    """What happens in a coordinator's core, as [milliseconds since `begin`, what, numbers].

    arrives: chunks. chooses: chunks to load, chunks that are known, what was expected. declines: chunks. starts and
    ends load or store: rows, rows that a request waits for, seconds. gives up: waiting. loads: chunks. copied: rows,
    seconds. computed: tokens, mean context, seconds, seconds that were expected.
    """

    def __init__(self, coordinator: Any, manager: Any) -> None:
        self.events: list[list[Any]] = []
        self._core = core = coordinator._core
        self._clock = coordinator.now
        self._began_s = 0.0
        note = self._note
        _after(pricing, "choose", self._chosen)
        _after(core, "anticipate", lambda _, *given: note("arrives", len(given[1])))
        _after(core, "prepare_load", lambda _, __, keys, *_more, **_named: note("loads", len(keys)))
        _after(core._copies, "copied", lambda _, rows, seconds, *_more, **_named: note("copied", rows, seconds))
        _after(core._promotion, "give_up_waiting", lambda *_: note("gives up"))
        _after(core._measurements, "declined", lambda _, *given: note("declines", len(given[1])))
        _after(core, "turn", lambda jobs, *_: [self._note_job("starts", job) for job in jobs])
        finished, observe = core.events.finished, manager._meter._observe

        def note_finished(tier: int, job_id: int, *more: Any, **named: Any) -> None:
            if (job := core.movers[tier].jobs.get(job_id)) is not None:
                self._note_job("ends", job)
            finished(tier, job_id, *more, **named)

        def note_step(tokens: int, context: float, seconds: float) -> None:
            half = tokens / 2
            expected_s = core.prefill.seconds(max(0, round(context - half)), round(context + half))
            note("computed", tokens, context, seconds, expected_s or 0.0)
            observe(tokens, context, seconds)

        core.events.finished, manager._meter._observe = note_finished, note_step

    @property
    def measures(self) -> bool:
        """Whether rows are being loaded, or are going to be, that no request waits for."""
        return bool(self._core._measurements.to_come) or any(tier.rows_loading for tier in self._core.tiers)

    def begin(self) -> None:
        self.events = []
        self._began_s = time.perf_counter()

    # --- inside ------------------------------------------------------------------------------------------------

    def _note(self, what: str, *numbers: float) -> None:
        at_ms = 1e3 * (time.perf_counter() - self._began_s)
        self.events.append([round(at_ms, 1), what, *(round(number, 4) for number in numbers)])

    def _note_job(self, what: str, job: Any) -> None:
        waited = sum(inside.pins(self._core, move.key) > 0 for move in job.moves)
        self._note(f"{what} {job.direction.value}", len(job.moves), waited, self._clock() - job.started_s)

    def _chosen(
        self, choice: pricing.Choice, runs: Sequence[pricing.Run], chain: pricing.Chain, *rest: Any, **_named: Any
    ) -> None:
        """Of three ends, seconds to compute what is behind them: nothing loaded, the choice, all that is known."""
        tiers, compute_s = rest
        known = sum(run.steps for run in runs)
        ends = (chain.start, choice.end, chain.start + known * chain.step_tokens)
        self._note("chooses", (choice.end - chain.start) // chain.step_tokens, known)
        self.events[-1].append(
            {
                "runs": [list(run) for run in runs],
                "tiers": [[round(number, 5) for number in price] for price in tiers],  # latency, a row, rows ahead
                "compute_s": [round(compute_s(end) or 0.0, 4) for end in ends],
                "wait_s": round(choice.wait_s, 4),
            }
        )


def _after(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Have `then(result, *arguments)` called after each call of this function."""
    inner = getattr(owner, name)

    @wraps(inner)
    def call(*arguments: Any, **named: Any) -> Any:
        result = inner(*arguments, **named)
        then(result, *arguments, **named)
        return result

    setattr(owner, name, call)


class Engine(FirstTokenEngine):
    VERBS = ("ask", "forget", "traced")

    def __init__(self, plan: dict[str, Any]) -> None:
        """`plan`: its `tiers`, and `prefill`, the speed that it is told; None to have it measured."""
        extra = {"prefill_tokens_per_s": plan["prefill"], "on_reset": "keep", "wait_s": 120.0, "probe_s": 0}
        transfer = vllm_cpu.recomputing_transfer(plan["tiers"], **extra) if plan["tiers"] else None
        super().__init__(transfer, 8192, READY_S)
        self._trace: Trace | None = None
        self._movers: list[int] = []
        if self.store is not None:
            connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
            self._trace = Trace(self.store.coordinator, connector.connector_scheduler.manager)
            self._movers = [pid for pid in self.store.coordinator.mover_pids if pid]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache and host memory; storage keeps what it has."""
        assert self.llm.reset_prefix_cache(reset_connector=self.store is not None)
        if self.store is not None:
            assert self.store.wait_ready(READY_S)

    def traced(self, prompts: list[list[int]], params: dict[str, Any] | None = None) -> dict[str, Any]:
        """`ask`, with what happened meanwhile and the processor seconds of this process and of its movers; until what
        it measures has ended, as that takes some of the medium and of the machine from whatever comes next."""
        if self._trace is not None:
            self._trace.begin()
        own_s, all_s = cpu_seconds(), cpu_seconds(self._movers)
        seconds = self.ask(prompts, params)
        until_s = time.monotonic() + MEASURES_S
        while self._trace is not None and self._trace.measures and time.monotonic() < until_s:
            time.sleep(0.01)
        own_s, all_s = cpu_seconds() - own_s, cpu_seconds(self._movers) - all_s
        events = self._trace.events if self._trace is not None else []
        return {"seconds": seconds, "cpu_s": round(own_s, 3), "movers_cpu_s": round(all_s - own_s, 3), "events": events}
