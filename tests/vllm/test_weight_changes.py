"""A rank publishes that its weights are being changed, whoever changes them, and ends its copies before it sleeps."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.vllm.weight_changes import CALLS, STARTS, watch_weights
from nixl_tiers.vllm.worker import drain_before_sleep


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(Geometry(cells=2, cell_payload=8192), 1) as region:
        yield region


class Model:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def load_weights(self, weights: Any = ()) -> set[str]:
        self._worker.see()
        return {"loaded"}


class Worker:
    """Notes what its rank has published whenever the weights change."""

    def __init__(self, region: HostRegion, *, draft: bool = True) -> None:
        self.region = region
        self.seen: list[int] = []
        self.fails = False
        self.model, self.draft = Model(self), Model(self) if draft else None
        self.model_runner = SimpleNamespace(get_model=lambda: self.model, get_draft_model=lambda: self.draft)

    @property
    def word(self) -> int:
        return self.region.ranks.weights[1]

    def see(self) -> None:
        self.seen.append(self.word)
        if self.fails:
            raise OSError("the trainer is gone")

    def reload_weights(self, weights_path: str | None = None) -> None:
        self.model.load_weights()
        self.see()  # it goes on


for name in CALLS[:-1]:
    setattr(Worker, name, lambda self, *_: self.see())


@pytest.fixture
def worker(region: HostRegion) -> Worker:
    worker = type("ThisWorker", (Worker,), {})(region)  # its class is changed
    watch_weights(region, 1, worker)
    return worker  # type: ignore[no-any-return]


def test_a_reload_is_one_change(worker: Any) -> None:
    worker.reload_weights(weights_path="elsewhere")
    assert worker.seen == [1, 1], "while the model's own load_weights, which it calls, changes them, and after that"
    assert worker.region.ranks.weights == (0, 2), "and of this rank only"
    worker.reload_weights()
    assert worker.word == 4


@pytest.mark.parametrize("which", ["model", "draft"])
def test_weights_that_are_loaded_into_a_model_behind_vllms_back_are_a_change(worker: Any, which: str) -> None:
    assert getattr(worker, which).load_weights([("w", 1)]) == {"loaded"}
    assert (worker.seen, worker.word) == ([1], 2)


@pytest.mark.parametrize("start", STARTS)
def test_an_update_is_one_change_from_its_start_to_its_finish(worker: Any, start: str) -> None:
    """Also between its calls: some transports write in the background."""
    getattr(worker, start)()
    words = [worker.word]
    for _ in range(2):
        worker.update_weights({})
        words.append(worker.word)
    worker.model.load_weights()
    words.append(worker.word)
    worker.finish_weight_update()
    assert (worker.seen, words, worker.word) == ([1] * 5, [1] * 4, 2)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_is_a_change_that_has_ended(worker: Any, name: str, within: bool) -> None:
    """The weights may have changed in part, and the engine may go on. Within an update only its own calls end it: vLLM
    refuses a second start and goes on with the first; and the model's own calls are no part of the update."""
    if within:
        worker.start_weight_update()
    worker.fails = True
    with pytest.raises(OSError, match="trainer"):
        getattr(worker, name)(*([{}] if name == "update_weights" else []))
    ended = not within or name in ("update_weights", "finish_weight_update")
    assert (worker.seen, worker.word) == ([1] * (1 + within), 2 if ended else 1)
    worker.fails = False
    if not within:
        worker.start_weight_update()
    worker.finish_weight_update()
    assert worker.word == (4 if ended else 2)


def test_a_second_engine_in_the_process_sees_changes_once(region: HostRegion, worker: Any) -> None:
    with HostRegion.create(region.geometry, 1) as second:
        wrapped = type(worker).update_weights
        watch_weights(second, 0, worker)
        assert type(worker).update_weights is wrapped, "calls do not become slower with each engine"
        worker.reload_weights()
        assert (worker.word, second.ranks.weights) == (2, (2, 0))
    worker.reload_weights()
    assert worker.word == 4, "also after the other region was closed"


def test_the_worker_is_the_one_that_makes_the_connector(region: HostRegion, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM gives connectors no reference to it."""
    base = pytest.importorskip("vllm.v1.worker.worker_base", exc_type=ImportError).WorkerBase

    class Real(Worker, base):  # type: ignore[misc]
        def initialize_from_config(self) -> None:
            self.make_connector()

        def make_connector(self) -> None:
            watch_weights(self.region, 1)

    worker = Real(region)
    worker.initialize_from_config()
    assert "restart it" not in caplog.text
    worker.reload_weights()
    assert worker.word == 2
    with caplog.at_level(logging.WARNING):
        watch_weights(region, 0)
    assert "restart it after each change of its weights" in caplog.text


class Copies:
    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name

    def drain(self) -> None:
        self.seen.append(self.name)


def test_every_swap_is_drained_once_before_the_worker_sleeps() -> None:
    seen: list[str] = []

    class Worker:
        def sleep(self, level: int = 1) -> int:
            seen.append("asleep")
            return level

    first, second = Copies(seen, "copies"), Copies(seen, "copies")
    drain_before_sleep(first, Worker)
    drain_before_sleep(second, Worker)
    assert Worker().sleep(2) == 2
    assert seen == ["copies", "copies", "asleep"]
    seen.clear()
    del second
    gc.collect()
    assert Worker().sleep(level=1) == 1
    assert seen == ["copies", "asleep"]
    del first
    gc.collect()


def test_vllms_worker_has_the_methods() -> None:
    worker = pytest.importorskip("vllm.v1.worker.gpu_worker", exc_type=ImportError).Worker
    assert [name for name in CALLS if not hasattr(worker, name)] == []
    assert list(inspect.signature(worker.sleep).parameters)[:2] == ["self", "level"]
