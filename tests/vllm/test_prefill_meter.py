"""The samples of the prefill estimate: tokens and times of steps, by every way in which vLLM schedules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm import compat
from nixl_tiers.vllm.prefill_meter import PrefillMeter
from nixl_tiers.vllm.step_clock import EventClock, HostClock

CHUNK = 16


class Engine:
    """Plays vLLM's calls: steps take `seconds`, scheduling and processing of outputs take none."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, float, float]] = []
        self.meter = PrefillMeter(lambda *sample: self.samples.append(sample))
        self.published: dict[int, float] = {}
        self.now = 100.0

    def run(self, steps: list[tuple[float, list[tuple[str, int]]]], *, asynchronous: bool) -> None:
        """Each step: its seconds, and the requests that are offered to be stored in it, up to which token."""
        ends: list[float] = []
        for seconds, stored in steps:
            if asynchronous and len(ends) == 2:  # the step after the next is scheduled when a step has ended
                self._end(ends.pop(0))
            self.meter.begin(self.now)
            for request, end in stored:
                self.meter.stored(request, end, CHUNK)
            ends.append(max([self.now, *ends]) + seconds)
            if not asynchronous:
                self._end(ends.pop())
        for end_s in ends:
            self._end(end_s)

    def publish(self, number: int, seconds: list[float]) -> None:
        """The step ends, and the first rank has published its time."""
        self.published[number] = seconds[number]
        self._end(self.now + seconds[number])

    def _end(self, end_s: float) -> None:
        self.now = end_s
        self.meter.end(end_s)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tokens_beyond_a_local_hit_are_paired_with_the_time_of_their_own_step(
    engine: Engine, asynchronous: bool
) -> None:
    engine.meter.positions.hit("a", 512)  # of 2560: what is stored first begins at 0
    engine.run(
        [
            (2.0, [("a", 1536)]),
            (1.0, []),  # decodes
            (3.0, [("a", 2560)]),
            (0.1, [("a", 2576)]),  # a chunk of decoded tokens is full
            (0.1, []),
        ],
        asynchronous=asynchronous,
    )
    assert engine.samples == [(1024, 1024.0, pytest.approx(2.0)), (1024, 2048.0, pytest.approx(3.0))]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_pause_between_requests_is_not_time_of_a_step(engine: Engine, asynchronous: bool) -> None:
    for name in "ab":
        engine.meter.positions.hit(name, 0)
        engine.run([(2.0, [(name, 1024)]), (0.1, [])], asynchronous=asynchronous)
        engine.now += 60.0
    assert engine.samples == [(1024, 512.0, pytest.approx(2.0))] * 2


def test_prefix_that_vllm_had_whole_is_not_taken_for_computed(engine: Engine) -> None:
    """Nothing is looked up where the local hit covers all whole chunks, and all of them are offered to be stored."""
    engine.run([(0.1, [("a", 4096)]), (0.1, [])], asynchronous=False)
    assert engine.samples == []


def test_external_hit_counts_from_where_the_load_ends(engine: Engine) -> None:
    engine.meter.positions.hit("a", 0)  # looked up
    engine.meter.positions.hit("a", 2048)  # loaded
    engine.run([(1.0, [("a", 4096)])], asynchronous=False)
    assert engine.samples == [(2048, 3072.0, 1.0)]


def test_preempted_request_that_begins_again_adds_nothing_false(engine: Engine) -> None:
    engine.meter.positions.hit("a", 0)
    engine.run([(1.0, [("a", 1024)])], asynchronous=False)
    engine.meter.positions.forget("a")
    engine.run([(1.0, [("a", 4096)])], asynchronous=False)
    assert engine.samples == [(1024, 512.0, 1.0)]


def test_prompts_of_one_step_are_one_sample(engine: Engine) -> None:
    engine.meter.positions.hit("a", 0)
    engine.meter.positions.hit("b", 1000)
    engine.run([(1.0, [("a", 1000), ("b", 2000)])], asynchronous=False)
    assert engine.samples == [(2000, 1000.0, 1.0)]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_published_time_is_paired_with_its_step_however_late_it_comes(engine: Engine, late: int) -> None:
    meter = engine.meter
    meter.be_exact(engine.published.get)
    for step in range(10):
        meter.begin(engine.now)
        assert meter.scheduled([(step * 512, 512, True), (3000, 1, False)]) == step
        meter.stored("a", (step + 1) * 512, CHUNK)  # not counted twice
        if step >= late:
            engine.published[step - late] = float(step - late + 1)
        meter.end(engine.now)
    assert [(tokens, seconds) for tokens, _, seconds in engine.samples] == [(513, s + 1.0) for s in range(10 - late)]
    assert engine.samples[0][1] == pytest.approx((512 * 256 + 3000.5) / 513)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_step_behind_a_load_of_the_whole_prompt_is_a_sample_of_what_any_step_takes(
    engine: Engine, asynchronous: bool
) -> None:
    """The prompt is computed in two steps, decodes, is asked again and loaded but for its last token, decodes."""
    meter, steps = engine.meter, [[(0, 2048, True)], [(2048, 512, True)], [(2560, 1, False)]]
    meter.be_exact(engine.published.get)
    steps += [[(2559, 1, True)], [(2560, 1, False)], [(2559, 1, True)] + [(999, 1, False)] * 2]
    seconds = [2.0, 0.6, 0.1, 0.11, 0.12, 0.13]
    running: list[int] = []
    for number, requests in enumerate(steps):
        if asynchronous and len(running) == 2:
            engine.publish(running.pop(0), seconds)
        meter.begin(engine.now)
        assert meter.scheduled(requests) == number
        running.append(number)
        if not asynchronous:
            engine.publish(running.pop(), seconds)
    for number in running:
        engine.publish(number, seconds)
    assert engine.samples == [(2048, 1024.0, 2.0), (512, 2304.0, 0.6), (1, 2559.5, 0.11)]


def test_steps_that_mostly_decode_are_no_measure(engine: Engine) -> None:
    engine.meter.be_exact(lambda step: 1.0)
    for requests in ([(3000, 1, False)] * 8, [(0, 40, True)] + [(3000, 1, False)] * 64, []):
        engine.meter.begin(engine.now)
        engine.meter.scheduled(requests)
        engine.meter.end(engine.now)
    assert engine.samples == []


def test_time_that_never_comes_is_forgotten(engine: Engine) -> None:
    engine.meter.be_exact(lambda step: None)
    for _ in range(1000):
        engine.meter.begin(engine.now)
        engine.meter.scheduled([(0, 512, True)])
        engine.meter.end(engine.now)
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
