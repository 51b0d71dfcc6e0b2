"""The samples of the prefill estimate: tokens and times of steps, by every way in which vLLM schedules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm import compat
from nixl_tiers.vllm.prefill_meter import PrefillMeter
from nixl_tiers.vllm.step_clock import EventClock, HostClock

# A prompt is computed in two steps, decodes, is asked again and loaded but for its last token; others decode meanwhile.
STEPS = [
    ([(0, 2048, True)], 2.0),
    ([(2048, 512, True), (3000, 1, False)], 0.6),
    ([(2560, 1, False)], 0.1),
    ([(2559, 1, True)], 0.11),
    ([(2559, 1, True)] + [(999, 1, False)] * 2, 0.13),
    ([(0, 40, True)] + [(3000, 1, False)] * 64, 1.0),
    ([], 1.0),
]
SAMPLES = [(2048, 1024.0, 2.0), (513, (512 * 2304 + 3000.5) / 513, 0.6), (1, 2559.5, 0.11)]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_published_times_are_paired_with_the_steps_of_prompts_however_late_they_come(late: int) -> None:
    samples: list[tuple[int, float, float]] = []
    published: dict[int, float] = {}
    meter = PrefillMeter(lambda *sample: samples.append(sample), published.get)
    for number, (requests, _) in enumerate([*STEPS, *[([], 1.0)] * late]):
        meter.number += 1
        assert meter.scheduled(requests) == number
        if number >= late:
            published[number - late] = STEPS[number - late][1]
        meter.take_published()
    assert samples == [pytest.approx(each) for each in SAMPLES]


def test_time_that_never_comes_is_forgotten() -> None:
    meter = PrefillMeter(lambda *_: None, lambda _: None)
    for _ in range(1000):
        meter.number += 1
        meter.scheduled([(0, 512, True)])
        meter.take_published()
    assert len(meter.unpublished) <= 32


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
