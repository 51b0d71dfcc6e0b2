"""Where a load begins in the order of a step, in both of vLLM's model runners: behind all that the engine still does
with the blocks that it overwrites, and before the step's own forward pass. On the fake CUDA driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.forward_context import override_forward_context
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.worker.gpu import kv_connector as of_v2
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from nixl_tiers.swap import kernels
from nixl_tiers.swap.driver import Device
from nixl_tiers.vllm.connector import NixlTiersConnector
from nixl_tiers.vllm.copy_jobs import RowsSpec
from tests.system.vllm.test_worker import LAYERS, PAGE, SUB_BLOCKS, Rank

ROW, LOADED, COMPUTED = 2, 77, 5
Launch = Callable[[], object]


def nothing() -> None: ...


class Engine:
    """One rank behind the connector that its model runner calls, and what the runner gives the GPU."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        rank.worker.collect()
        self.groups = len(rank.worker._plan.groups)
        parts = object.__new__(OffloadingConnectorWorker)
        vars(parts).update(
            worker=rank.worker,
            _unsubmitted_store_jobs=[],
            _load_jobs={},
            _connector_worker_meta=OffloadingWorkerMetadata(),
            _is_store_writer=True,
        )
        self.connector = object.__new__(NixlTiersConnector)
        of_connector = {"connector_worker": parts, "connector_scheduler": None, "_connector_metadata": None}
        vars(self.connector).update(**of_connector, _loading={})
        self.of_v2 = object.__new__(of_v2.ActiveKVConnector)
        vars(self.of_v2).update(
            kv_connector=self.connector, vllm_config=None, _pending_load_kwargs=None, _disabled=False
        )
        self.without_forward = False
        self.patience_s = 60.0  # which stands for never
        self.loading: set[str] = set()
        self.jobs = 100
        self.read = [np.zeros_like(memory) for memory in self.targets(0)]  # what the engine has read of them
        self._ends: list[Launch] = []

    # --- what the scheduler asks for

    def blocks(self, place: int) -> GPULoadStoreSpec:
        """Those of a load or store, one chunk of each group; two places have none in common."""
        first = place * self.groups * SUB_BLOCKS
        blocks = list(range(first, first + self.groups * SUB_BLOCKS))
        return GPULoadStoreSpec(blocks, [SUB_BLOCKS] * self.groups, [0] * self.groups)

    def targets(self, place: int) -> list[NDArray[np.uint8]]:
        """The memory of these blocks."""
        blocks = self.blocks(place).block_ids
        return [cache[blocks[0] : blocks[-1] + 1] for cache in self.rank.caches]

    def rows(self, first: int, store_seq: int = 0) -> RowsSpec:
        return RowsSpec(np.arange(first, first + self.groups), (1,) * self.groups, store_seq)

    def loads(self, *places: int) -> OffloadingConnectorMetadata:
        """Of a step with a load into each of these places."""
        meta = OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())
        for place in places:
            self.jobs += 1
            request = f"r{self.jobs}"
            meta.load_jobs[self.jobs] = TransferJob(request, src_spec=self.rows(ROW), dst_spec=self.blocks(place))
            self.loading.add(request)
        return meta

    def with_store(self, meta: OffloadingConnectorMetadata, place: int) -> int:
        """The step stores this place to the first rows too; returns the job."""
        self.jobs += 1
        meta.store_jobs[self.jobs] = TransferJob(f"r{self.jobs}", self.blocks(place), self.rows(0, store_seq=1))
        return self.jobs

    def scheduled(self, meta: OffloadingConnectorMetadata, *, sync: bool = False) -> Any:
        """`sync`: another connector loads in this step what its forward pass reads."""
        return SimpleNamespace(kv_connector_metadata=meta, has_sync_kv_loads=sync, finished_req_ids=set())

    # --- what the GPU has to do

    def kernel(self) -> Launch:
        """Give the engine's stream a kernel that runs until the returned call."""
        rank, submitter = self.rank, self.rank.worker._swap._loads._submitter  # type: ignore[attr-defined]
        with Device(rank.fake.driver, 0).current() as driver:
            aside, event = driver.stream(urgent=False), driver.event()
            rank.fake.hold(aside, held=True)
            submitter.record(event, aside)
            driver.wait_event(rank.compute, event)
        self._ends.append(partial(rank.fake.hold, aside, held=False))
        return self._ends[-1]

    def use(self, place: int) -> None:
        """Have the engine's stream read blocks, and then write to them."""
        for memory, out in zip(self.targets(place), self.read, strict=True):
            self.rank.fake.read(self.rank.compute, memory, out)
            self.rank.fake.write(self.rank.compute, memory, COMPUTED)

    def settle(self) -> None:
        """All has run that may: a load that begins too early has ended."""
        self.rank.worker._swap._loads._submitter.drain()  # type: ignore[attr-defined]
        self.rank.fake.finish()

    def wait(self) -> None:
        """Until all loads have ended."""
        until_s = time.monotonic() + self.patience_s
        while self.loading:
            self.loading -= self.connector.connector_worker.get_finished(set())[1]  # type: ignore[union-attr]
            assert time.monotonic() < until_s, "the load waits for the step"
            time.sleep(0.001)

    def finish(self) -> None:
        """Let everything end."""
        for end in self._ends:
            end()
        self.rank.fake.finish()

    def note(self, output: Any) -> None:
        if output is not None:
            self.loading -= output.finished_recving or set()


# --- the order of both runners, with the parts of vLLM that call connectors ---


Step = Callable[..., None]
"""`prepare`: blocks are zeroed and copied, and recurrent state is moved. `forward`: None in a step of which nothing is
computed. `after`: sampling, drafts, and recurrent state again."""

CONTEXT: Any = SimpleNamespace()


def v1(
    machine: Engine,
    meta: OffloadingConnectorMetadata,
    *,
    prepare: Launch = nothing,
    forward: Launch | None = nothing,
    after: Launch = nothing,
    drafts: bool = False,
    sync: bool = False,
) -> None:
    """`gpu_model_runner.py`. `drafts`: the connector's step ends behind them."""
    scheduled, machine.without_forward = machine.scheduled(meta, sync=sync), forward is None
    machine.connector.handle_preemptions(scheduled.kv_connector_metadata)
    prepare()
    drafts = drafts and forward is not None
    with (
        override_forward_context(CONTEXT),
        KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled, defer_finalize=drafts) as output,
    ):
        (forward or nothing)()
    if forward is not None:
        after()
    if drafts:
        KVConnectorModelRunnerMixin.finalize_kv_connector()
    machine.note(output)


def v2(
    machine: Engine,
    meta: OffloadingConnectorMetadata,
    *,
    prepare: Launch = nothing,
    forward: Launch | None = nothing,
    after: Launch = nothing,
    graph: bool = False,
    sync: bool = False,
) -> None:
    """`gpu/model_runner.py`. `graph`: the forward pass is one, and has no context."""
    scheduled, machine.without_forward = machine.scheduled(meta, sync=sync), forward is None
    prepare()
    if forward is None:
        machine.note(machine.of_v2.no_forward(scheduled).kv_connector_output)
        return
    with override_forward_context(None if graph else CONTEXT):
        machine.of_v2.pre_forward(scheduled)
        forward()
    machine.of_v2.finish_forward()
    after()
    machine.note(machine.of_v2.post_forward(set()))


RUNNERS: Final[dict[str, Step]] = {
    "v1": v1,
    "v1 with drafts": partial(v1, drafts=True),
    "v1 with synchronous loads": partial(v1, sync=True),
    "v2": v2,
    "v2 with graphs": partial(v2, graph=True),
    "v2 with synchronous loads": partial(v2, sync=True),
}
MACHINES: Final = {
    "copy_engine": ["copy_engine"],
    "staged": ["staged"],
    "two groups": ["copy_engine", "staged"],
}
"""The strategies of its KV groups."""


@pytest.fixture
def made(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], AbstractContextManager[Engine]]:
    """made("staged"): one of MACHINES."""
    monkeypatch.setattr(kernels, "images", lambda *_: iter([("here", lambda: b"image\0")]))
    monkeypatch.setattr(of_v2, "set_forward_context", lambda *_: override_forward_context(CONTEXT))

    @contextmanager
    def make(kind: str) -> Iterator[Engine]:
        rank = Rank(fake_library, *MACHINES[kind], own_stream=True)
        rank.region.rows_view[ROW : ROW + 2] = LOADED
        machine = Engine(rank)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", machine.connector)
        try:
            yield machine
        finally:
            machine.finish()
            rank.worker.shutdown()
            rank.fake.check()

    return make


def holds(memory: list[NDArray[np.uint8]], value: int) -> bool:
    return all((each == value).all() for each in memory)


# --- what must hold ---


def loads_of_two_steps(machine: Engine, step: Step, used: str, *, has_forward: bool = True) -> None:
    """The scheduler is ahead of the GPU: two steps with loads are launched while the first one's forward pass runs.
    `used`: by what the second one's blocks are read and written to before they are loaded."""
    before = [memory.copy() for memory in machine.targets(0)]
    ends: list[Launch] = []

    def compute() -> None:
        ends.append(machine.kernel())

    def use_behind_a_kernel() -> None:
        compute()
        machine.use(0)

    def use(where: str) -> Launch:
        return use_behind_a_kernel if where == used else nothing

    def first_forward() -> None:
        compute()
        use("forward")()

    step(machine, machine.loads(1), forward=first_forward, after=use("after"))
    machine.wait()
    assert holds(machine.targets(1), LOADED), "its step runs still"

    step(machine, machine.loads(0), prepare=use("prepare"), forward=compute if has_forward else None)
    step(machine, machine.loads(), forward=compute)
    for end in ends[:2]:  # of the first forward pass, and of what uses the blocks
        machine.settle()
        for memory, was in zip(machine.targets(0), before, strict=True):
            assert np.array_equal(memory, was), "what is launched before it runs still"
        end()

    machine.wait()
    for read, was in zip(machine.read, before, strict=True):
        assert np.array_equal(read, was)
    assert holds(machine.targets(0), LOADED), "what is launched behind it runs still"


def block_is_stored_and_loaded_in_one_step(machine: Engine, step: Step) -> None:
    """The store is that of a preemption."""
    step(machine, machine.loads(), forward=partial(machine.use, 0))
    meta = machine.loads(0)
    meta.jobs_to_flush = {machine.with_store(meta, 0)}
    step(machine, meta)
    machine.wait()
    rows = machine.rank.region.rows_view[: machine.groups, : SUB_BLOCKS * LAYERS * PAGE]
    assert holds([rows], COMPUTED)
    assert holds(machine.targets(0), LOADED)


def store_reads_what_its_step_computed(machine: Engine, step: Step) -> None:
    ends: list[Launch] = []

    def forward() -> None:
        ends.append(machine.kernel())
        machine.use(1)

    meta = machine.loads(0)
    job = machine.with_store(meta, 1)
    step(machine, meta, forward=forward)
    step(machine, machine.loads())
    machine.rank.worker._swap._stores._submitter.drain()  # type: ignore[attr-defined]
    machine.settle()
    ends[0]()
    machine.rank.worker.wait({job})
    rows = machine.rank.region.rows_view[: machine.groups, : SUB_BLOCKS * LAYERS * PAGE]
    assert holds([rows], COMPUTED)


def event_is_not_recorded_anew_while_copies_behind_it_are_queued(machine: Engine, step: Step) -> None:
    """Few copies are handed to the GPU at once. The others are to begin behind what their event stood for when they
    were queued."""
    end_first = machine.kernel()
    step(machine, machine.loads(*[0] * 8))
    step(machine, machine.loads(1), forward=machine.kernel)
    waiting, machine.loading = machine.loading, set()
    step(machine, machine.loads(1))
    machine.loading = waiting
    end_first()
    machine.wait()


def mark_is_of_its_own_step_only(machine: Engine, _: Step) -> None:
    """A step whose loads were never submitted leaves none behind; what is loaded without one, as by vLLM's own
    connector, begins behind all that was launched when it is submitted."""
    rank = machine.rank
    machine.connector.bind_connector_metadata(machine.loads(0))
    machine.connector.clear_connector_metadata()
    before = [memory.copy() for memory in machine.targets(0)]
    end = machine.kernel()
    machine.use(0)
    rank.worker.submit_load(1, machine.rows(ROW), machine.blocks(0))
    rank.worker.flush()
    machine.settle()
    end()
    rank.worker.wait({1})
    for read, was in zip(machine.read, before, strict=True):
        assert np.array_equal(read, was)


Shown = Callable[[Engine, Step], None]
SHOWN: Final[list[Shown]] = [
    # The last step reads blocks that are freed while it runs: of a request that was preempted, or that ended one step
    # before the scheduler knew; state moves out of blocks that its own request gives up.
    *(
        partial(loads_of_two_steps, used=used, has_forward=has_forward)
        for used, has_forward in product(("forward", "after", "prepare"), (True, False))
    ),
    block_is_stored_and_loaded_in_one_step,
    store_reads_what_its_step_computed,
    event_is_not_recorded_anew_while_copies_behind_it_are_queued,
    mark_is_of_its_own_step_only,
]
SMOKE: Final = ("v1", "v2 with graphs")


@pytest.mark.parametrize(
    "runner", [pytest.param(name, marks=[pytest.mark.smoke] * (name in SMOKE)) for name in RUNNERS]
)
def test_a_load_begins_behind_the_step_before_and_not_behind_its_own(
    runner: str, made: Callable[[str], AbstractContextManager[Engine]]
) -> None:
    step = RUNNERS[runner]
    for kind, shown in product(MACHINES, SHOWN):
        with made(kind) as machine:
            shown(machine, step)


def test_the_capture_of_graphs_gives_the_gpu_nothing_to_do(
    made: Callable[[str], AbstractContextManager[Engine]],
) -> None:
    """An event that is recorded on a stream that captures would be the graph's."""
    with made("copy_engine") as machine:
        fake, names = machine.rank.fake, ("cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel", "cuMemcpyBatchAsync")
        before = [fake.calls(name) for name in names]
        machine.of_v2.set_disabled(True)
        machine.of_v2.pre_forward(SimpleNamespace(kv_connector_metadata=None))  # type: ignore[arg-type]
        machine.connector.wait_for_layer_load("layer")
        machine.connector.save_kv_layer("layer", None, None)  # type: ignore[arg-type]
        machine.of_v2.finish_forward()
        assert machine.of_v2.post_forward(set()) is None
        machine.of_v2.set_disabled(False)
        machine.of_v2.reset_capture_state()
        assert [fake.calls(name) for name in names] == before
        loads_of_two_steps(machine, RUNNERS["v2 with graphs"], "prepare")
