"""The samples of the prefill estimate: tokens and times of steps, by every way in which vLLM schedules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm import compat
from nixl_tiers.vllm.prefill_meter import PrefillMeter, Scheduled
from nixl_tiers.vllm.step_clock import EventClock, HostClock


class Engine:
    """Plays vLLM's calls."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, float, float]] = []
        self.published: dict[int, float] = {}
        self.meter = PrefillMeter(lambda *sample: self.samples.append(sample), self.published.get)

    def step(self, requests: list[Scheduled]) -> int:
        """A step is scheduled; its number."""
        self.meter.number += 1
        return self.meter.scheduled(requests)

    def publish(self, number: int, seconds: list[float]) -> None:
        """The step ends, and the first rank has published its time."""
        self.published[number] = seconds[number]
        self.meter.take_published()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize("late", [0, 1, 3])
def test_published_time_is_paired_with_its_step_however_late_it_comes(engine: Engine, late: int) -> None:
    for step in range(10):
        assert engine.step([(step * 512, 512, True), (3000, 1, False)]) == step
        if step >= late:
            engine.published[step - late] = float(step - late + 1)
        engine.meter.take_published()
    assert [(tokens, seconds) for tokens, _, seconds in engine.samples] == [(513, s + 1.0) for s in range(10 - late)]
    assert engine.samples[0][1] == pytest.approx((512 * 256 + 3000.5) / 513)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_step_behind_a_load_of_the_whole_prompt_is_a_sample_of_what_any_step_takes(
    engine: Engine, asynchronous: bool
) -> None:
    """The prompt is computed in two steps, decodes, is asked again and loaded but for its last token, decodes."""
    steps = [[(0, 2048, True)], [(2048, 512, True)], [(2560, 1, False)]]
    steps += [[(2559, 1, True)], [(2560, 1, False)], [(2559, 1, True)] + [(999, 1, False)] * 2]
    seconds = [2.0, 0.6, 0.1, 0.11, 0.12, 0.13]
    running: list[int] = []
    for number, requests in enumerate(steps):
        if asynchronous and len(running) == 2:
            engine.publish(running.pop(0), seconds)
        assert engine.step(requests) == number
        running.append(number)
        if not asynchronous:
            engine.publish(running.pop(), seconds)
    for number in running:
        engine.publish(number, seconds)
    assert engine.samples == [(2048, 1024.0, 2.0), (512, 2304.0, 0.6), (1, 2559.5, 0.11)]


def test_steps_that_mostly_decode_are_no_measure(engine: Engine) -> None:
    for requests in ([(3000, 1, False)] * 8, [(0, 40, True)] + [(3000, 1, False)] * 64, []):
        engine.publish(engine.step(requests), [1.0] * 3)
    assert engine.samples == []


def test_time_that_never_comes_is_forgotten(engine: Engine) -> None:
    for _ in range(1000):
        engine.step([(0, 512, True)])
        engine.meter.take_published()
    assert len(engine.meter.unpublished) <= 32


def test_output_of_vllm_is_read_as_prompts_and_decodes() -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id="new", num_computed_tokens=64),
            SimpleNamespace(req_id="loaded", num_computed_tokens=1023),
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["long", "decodes", "speculates"], num_computed_tokens=[2, 9, 8]),
        scheduled_spec_decode_tokens={"speculates": [1, 2, 3]},
        num_scheduled_tokens={"new": 100, "loaded": 1, "long": 2048, "decodes": 1, "speculates": 4},
    )
    assert compat.scheduled_tokens(output) == [
        (64, 100, True),
        (1023, 1, True),
        (2, 2048, True),
        (9, 1, False),
        (8, 4, False),
    ]


@pytest.mark.parametrize(("threshold", "most"), [(0, 4096), (512, 512), (8192, 4096)])
def test_tokens_of_a_step_are_limited_as_vllm_limits_them(threshold: int, most: int) -> None:
    config = SimpleNamespace(max_num_batched_tokens=4096, long_prefill_token_threshold=threshold)
    assert compat.step_tokens(config) == most


class Event:
    """Of a GPU whose time the test sets."""

    now_ms = 0.0
    ended = False

    def record(self) -> None:
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return Event.ended

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_gpu_publishes_a_step_once_its_events_have_fired_and_waits_for_none() -> None:
    published: list[tuple[int, float]] = []
    made: list[Event] = []

    def make() -> Event:
        made.append(Event())
        return made[-1]

    clock = EventClock(lambda *step: published.append(step), make)
    Event.now_ms, Event.ended = 0.0, False
    for step in range(100):
        clock.begin(step)
        Event.now_ms += 20.0
        clock.end()
    assert published == []
    Event.ended = True
    clock.begin(100)
    clock.end()
    clock.begin(101)
    assert published[:2] == [(0, 0.02), (1, 0.02)]
    assert published[-1][0] == 100
    assert len(made) < 40


def test_host_publishes_a_step_at_its_end() -> None:
    published: list[tuple[int, float]] = []
    times = iter([1.0, 3.5])
    clock = HostClock(lambda *step: published.append(step), lambda: next(times))
    clock.end()  # a forward pass without a step: warm-up
    clock.begin(7)
    clock.end()
    clock.end()
    assert published == [(7, 2.5)]
