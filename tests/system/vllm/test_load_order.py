"""Where a load begins in the order of a step, in both of vLLM's model runners: behind all that the engine still does
with the blocks that it overwrites, and before the step's own forward pass. On the fake CUDA driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker

from nixl_tiers.swap import kernels
from nixl_tiers.vllm.connector import NixlTiersConnector
from nixl_tiers.vllm.copy_jobs import RowsSpec
from tests.system.vllm.test_worker_cuda import Rank, engine

ROW, TARGETS, OTHER = 2, [4, 5], 9
Launch = Callable[[], None]


class Engine:
    """A connector over one rank, and a model runner's calls of it, in the order of vLLM 0.32."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        rank.worker.collect()
        parts = object.__new__(OffloadingConnectorWorker)
        vars(parts).update(
            worker=rank.worker,
            _unsubmitted_store_jobs=[],
            _load_jobs={},
            _connector_worker_meta=OffloadingWorkerMetadata(),
            _is_store_writer=True,
        )
        self.connector = object.__new__(NixlTiersConnector)
        vars(self.connector).update(
            connector_worker=parts, connector_scheduler=None, _connector_metadata=None, _loading={}
        )
        self.jobs = 100
        self.read = np.zeros_like(rank.caches[1][OTHER])  # what a step has read of a block

    def read_in_step(self, block: int) -> None:
        """Give the engine's stream a block to read."""
        self.rank.fake.read(self.rank.compute, self.rank.caches[1][block], self.read)

    def hold_compute(self) -> None:
        """What was launched before has ended; what is launched from now on waits."""
        self.rank.fake.finish()
        self.rank.fake.hold(self.rank.compute, held=True)

    def let_compute_go(self) -> None:
        """Once all has run that may run while it is held: a load that began too early has ended."""
        self.rank.worker._swap._loads._submitter.drain()  # type: ignore[attr-defined]
        self.rank.fake.finish()
        self.rank.fake.hold(self.rank.compute, held=False)

    def finish(self) -> None:
        """Let the step and its load end."""
        self.let_compute_go()
        self.wait()
        self.rank.fake.finish()

    def loads(self) -> OffloadingConnectorMetadata:
        """Of a step that loads ROW into TARGETS."""
        self.jobs += 1
        job = TransferJob(req_id="r", src_spec=RowsSpec(np.array([ROW]), (1,)), dst_spec=engine(TARGETS))
        return OffloadingConnectorMetadata(load_jobs={self.jobs: job}, store_jobs={}, jobs_to_flush=set())

    def step_of_v1(self, meta: Any, prepare: Launch, forward: Launch) -> None:
        """`gpu_model_runner.py`: blocks are zeroed and copied, and recurrent state is moved, between the two calls."""
        self.connector.handle_preemptions(meta)
        prepare()
        self.connector.bind_connector_metadata(meta)
        forward()
        self._end()

    def step_of_v2(self, meta: Any, prepare: Launch, forward: Launch) -> None:
        """`gpu/model_runner.py` and `gpu/kv_connector.py`."""
        prepare()
        self.connector.handle_preemptions(meta)
        self.connector.bind_connector_metadata(meta)
        forward()
        self._end()

    def _end(self) -> None:
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        self.connector.clear_connector_metadata()

    def ended(self) -> bool:
        return "r" in self.connector.connector_worker.get_finished(set())[1]

    def wait(self) -> None:
        """Until the load has ended; a minute stands for never."""
        until_s = time.monotonic() + 60
        while not self.ended():
            assert time.monotonic() < until_s, "the load waits for the step"
            time.sleep(0.001)


@pytest.fixture(params=["copy_engine", "staged"])
def machine(fake_library: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(kernels, "images", lambda *_: iter([("here", lambda: b"image\0")]))
    rank = Rank(fake_library, request.param, own_stream=True)
    rank.region.rows_view[ROW] = 77
    yield Engine(rank)
    rank.fake.hold(rank.compute, held=False)
    rank.fake.finish()
    rank.worker.shutdown()
    rank.fake.check()


RUNNERS = [Engine.step_of_v1, Engine.step_of_v2]
runners = pytest.mark.parametrize("step", RUNNERS, ids=["v1", "v2"])
Step = Callable[[Engine, Any, Launch, Launch], None]


def nothing() -> None: ...


def of_target(machine: Engine) -> NDArray[np.uint8]:
    return machine.rank.caches[1][TARGETS[0]]


@runners
def test_a_hit_does_not_wait_for_the_forward_pass_of_its_step(machine: Engine, step: Step) -> None:
    def forward() -> None:
        machine.hold_compute()
        machine.read_in_step(OTHER)

    step(machine, machine.loads(), nothing, forward)
    machine.wait()
    assert not machine.read.any(), "the step runs still"
    assert (of_target(machine) == 77).all()


@runners
def test_what_the_last_step_reads_is_overwritten_behind_it(machine: Engine, step: Step) -> None:
    """A block that is freed while the step that reads it runs: preemption, or a request that ended one step before
    the asynchronous scheduler knew."""
    before = of_target(machine).copy()
    machine.hold_compute()
    machine.read_in_step(TARGETS[0])
    step(machine, machine.loads(), nothing, nothing)
    machine.finish()
    assert np.array_equal(machine.read, before)
    assert (of_target(machine) == 77).all()


@runners
def test_a_block_copy_whose_source_is_loaded_reads_what_was_there(machine: Engine, step: Step) -> None:
    before = of_target(machine).copy()

    def prepare() -> None:
        machine.hold_compute()
        machine.read_in_step(TARGETS[0])

    step(machine, machine.loads(), prepare, nothing)
    machine.finish()
    assert np.array_equal(machine.read, before)


@runners
def test_a_block_that_is_zeroed_and_loaded_holds_what_was_loaded(machine: Engine, step: Step) -> None:
    rank = machine.rank

    def prepare() -> None:
        machine.hold_compute()
        rank.fake.write(rank.compute, of_target(machine), 0)

    step(machine, machine.loads(), prepare, nothing)
    machine.finish()
    assert (of_target(machine) == 77).all()


def test_a_mark_is_of_its_own_step_only(machine: Engine) -> None:
    """A step whose loads were never submitted leaves none behind; what is loaded without one, as by vLLM's own
    connector, begins behind all that was launched when it is submitted."""
    rank = machine.rank
    machine.connector.bind_connector_metadata(machine.loads())
    machine.connector.clear_connector_metadata()
    before = of_target(machine).copy()
    machine.hold_compute()
    machine.read_in_step(TARGETS[0])
    rank.worker.submit_load(1, RowsSpec(np.array([ROW]), (1,)), engine(TARGETS))
    rank.worker.flush()
    machine.let_compute_go()
    rank.worker.wait({1})
    rank.fake.finish()
    assert np.array_equal(machine.read, before)


def test_a_step_without_loads_marks_nothing(machine: Engine) -> None:
    empty = OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())
    machine.step_of_v2(machine.loads(), nothing, nothing)
    machine.wait()
    before = machine.rank.fake.calls("cuEventRecord")
    machine.step_of_v2(empty, nothing, nothing)
    assert machine.rank.fake.calls("cuEventRecord") == before
    assert machine.rank.worker._swap._loads._marked is None  # type: ignore[attr-defined]
