"""The worker's side: copies between vLLM's KV blocks and the region's rows, outside the engine's step.

How jobs run is in copy_jobs.py, what they copy in copier.py. vLLM stops the engine when a job is reported as failed, so
a failed store is reported as successful and the failure is recorded in the rows' control words, where the scheduler's
side reads it. A failed load cannot be hidden that way, because the request would go on with wrong bytes:
NixlTiersConnector collects it and has the request recomputed; with vLLM's own connector the engine stops.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from typing_extensions import override

from nixl_tiers.base.lifetime import finalize_once
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.memory.backing import Backing
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.host import HostSwap
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from nixl_tiers.swap.step import Pairs, Step
from nixl_tiers.vllm.compat import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from nixl_tiers.vllm.copier import Copier, Submitted, Swap
from nixl_tiers.vllm.copy_jobs import CopyJobs, Direction, Job, PolledJobs, RowsSpec, Started, ThreadedJobs
from nixl_tiers.vllm.step_clock import EventClock, HostClock, NoClock, StepClock

if TYPE_CHECKING:
    from collections.abc import Callable


log = logging.getLogger(__name__)


def worker_over(
    region: HostRegion,
    kv_caches: CanonicalKVCaches,
    rank: int,
    last_block_only: Collection[int] = (),
    times: Times = PRODUCTION,
) -> NixlTiersWorker:
    """A worker for these caches, with the swap that their device needs; it closes the region when it shuts down.

    `last_block_only`: places of the KV groups of whose chunks loads read only the last block. Raises ValueError for
    caches that it cannot copy.
    """
    geometry = region.geometry
    segments, share = segments_of(kv_caches, geometry.sub_block_bytes), Share.of(rank, region.copies)
    plan = CopyPlan(segments, geometry, share, region.address, region.rows)
    device = kv_caches.tensors[0].tensor.device
    if device.type == "cpu":
        region.prefault(rank=rank)
        threads = ThreadedJobs(times.copies_end_s)
        return NixlTiersWorker(region, plan, HostSwap(plan), rank, last_block_only, jobs=threads)
    if device.type != "cuda" or torch.version.hip:
        raise ValueError(f"nixl_tiers copies KV blocks of CUDA GPUs and CPUs, not of {device.type} devices")
    from nixl_tiers.memory.pages import cpus_of, node_of
    from nixl_tiers.swap.cuda import CudaSwap
    from nixl_tiers.swap.driver import open_driver

    ordinal = torch.cuda.current_device() if device.index is None else device.index
    node = node_of(open_driver().pci_address(ordinal))
    cpus = cpus_of(node)
    if node is not None and not region.hugetlb:  # whose pages are where they are
        log.info(
            "nixl_tiers: rank %d allocates its part of the host region on NUMA node %d, its GPU's%s",
            rank,
            node,
            "" if cpus else ", if that is where it runs: it may not use a processor there",
        )
    backing = Backing(region, rank, cpus)
    swap = CudaSwap(plan, ordinal, rows=backing.back_first(times.nodes_s))
    region.at_close(swap.close)
    drain_before_sleep(backing)  # the driver's locks are free then
    drain_before_sleep(swap)
    jobs = PolledJobs(times.copies_end_s)
    worker = NixlTiersWorker(region, plan, swap, rank, last_block_only, jobs=jobs, backing=backing)
    backing.go_on(swap.lock if swap.pinned else None, at_first_step=True)
    return worker


def step_clock_of(region: HostRegion, jobs: CopyJobs, rank: int) -> StepClock:
    """The first rank measures: all ranks of a step wait for each other. Stages of a pipeline do not: they take as long,
    with equally many layers, and that a prompt passes through them once is left out, so that no load seems worth more
    than it is."""
    if rank:
        return NoClock()
    return EventClock(region.publish_step) if isinstance(jobs, PolledJobs) else HostClock(region.publish_step)


def segments_of(kv_caches: CanonicalKVCaches, sub_block_bytes: int) -> list[list[Segment]]:
    """Where each group's layers are in vLLM's memory and in a row's sub-block: one after the other.

    Raises ValueError if a group has more bytes a block than the scheduler assumes.
    """
    groups = []
    for group, refs in enumerate(kv_caches.group_data_refs):
        offset = 0
        segments = []
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx].tensor
            stride = tensor.stride(0) * tensor.element_size()
            segments.append(Segment(tensor.data_ptr(), stride, ref.page_size_bytes, offset, tensor.shape[0]))
            offset += ref.page_size_bytes
        if offset > sub_block_bytes:
            raise ValueError(
                f"KV group {group} has {offset} bytes a block, but vLLM announced {sub_block_bytes}; "
                "this cache layout cannot be offloaded"
            )
        groups.append(segments)
    return groups


class NixlTiersWorker(OffloadingWorker):
    """One rank's copies into and out of its cell of every row, by the kind of jobs that its swap needs."""

    def __init__(
        self,
        region: HostRegion,
        plan: CopyPlan,
        swap: Swap,
        rank: int,
        last_block_only: Collection[int] = (),
        *,
        jobs: CopyJobs,
        backing: Backing | None = None,
    ) -> None:
        """`backing`: what goes on locking the region from the first step on."""
        self._region = region
        self._backing = backing
        self._plan = plan
        self._swap = swap
        self._copier = Copier(region, plan, swap, last_block_only)
        self._jobs = jobs
        self._stores: list[Submitted] = []
        self._loads: list[Submitted] = []
        self._collects = False
        self._failed_loads: set[int] | None = None  # None: they are reported to vLLM as failed
        self.step_clock = step_clock_of(region, jobs, rank)
        # vLLM does not always call shutdown, and the region would stay mapped.
        self._end = finalize_once(self, partial(_end, jobs, region))

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, RowsSpec)
        self._stores.append(Submitted(job_id, src_spec, dst_spec))
        if not self._collects:
            self.flush()
        return True

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: object) -> bool:
        """`expedited` (newer vLLM) changes nothing: loads start in the order of submission."""
        assert isinstance(src_spec, RowsSpec)
        self._loads.append(Submitted(job_id, dst_spec, src_spec))
        if not self._collects:
            self.flush()
        return True

    def collect(self) -> None:
        """From now on jobs begin at the next `flush`, all of a step together: it submits one for each request. Whoever
        calls this calls `flush` before the engine may write to the blocks."""
        self._collects = True

    def mark_loads(self) -> None:
        """The loads of this step may begin behind the compute that has been launched by now, before its own."""
        try:
            self._swap.mark_loads()
        except Exception:
            log.exception("nixl_tiers: the loads of a step begin behind its compute")

    def unmark_loads(self) -> None:
        """Loads begin behind the compute that has been launched when they are submitted."""
        self._swap.unmark_loads()

    def flush(self) -> None:
        """Begin what was collected."""
        if self._stores:
            stores, self._stores = self._stores, []
            step = self._copier.plan(stores, to_host=True)
            self._jobs.submit(Direction.STORE, Job([store.id for store in stores], partial(self._store, step)))
        if self._loads:
            loads, self._loads = self._loads, []
            step = self._copier.plan(loads, to_host=False)
            copies: list[list[tuple[int, Pairs]]] = [[] for _ in loads]
            for place, group, pairs in step.of_jobs():
                copies[place].append((group, pairs))
            for place, load in enumerate(loads):
                start = partial(self._load, step, place, copies[place])
                self._jobs.submit(Direction.LOAD, Job((load.id,), start))

    @override
    def get_finished(self) -> list[TransferResult]:
        if self._stores or self._loads:
            self.flush()
        if self._backing is not None:  # vLLM asks in a step, and none ran before
            self._backing.allow_locking()
            self._backing = None
        if not self._jobs.open:  # as in most steps
            return []
        return [self._reported(result) for result in self._jobs.finished()]

    def keep_failed_loads(self) -> None:
        """From now on report failed loads to vLLM as successful, and through take_failed_loads as failed."""
        self._failed_loads = set()

    def take_failed_loads(self) -> set[int]:
        """Jobs among those that get_finished reported since the last call, and whose blocks were not loaded."""
        failed, self._failed_loads = self._failed_loads or set(), set()
        return failed

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Until these jobs, stores or loads, have ended; unknown ones count as ended."""
        self.flush()
        self._jobs.wait(job_ids)

    @override
    def shutdown(self) -> None:
        """Copies that began end first: afterwards nothing touches the engine's memory or the region."""
        self._end()

    def _reported(self, result: TransferResult) -> TransferResult:
        if result.success:
            return result
        if self._failed_loads is None:
            log.error(
                "nixl_tiers: load job %d failed, and vLLM's own OffloadingConnector can only stop the engine now; with "
                "kv_connector NixlTiersConnector and kv_load_failure_policy recompute its request would be recomputed",
                result.job_id,
            )
            return result
        self._failed_loads.add(result.job_id)
        return TransferResult(result.job_id, success=True)

    # While a job runs on a thread it keeps its worker, so that what is collected with that has ended.

    def _store(self, step: Step) -> Started:
        return self._copier.store(step)

    def _load(self, step: Step, place: int, copies: Sequence[tuple[int, Pairs]]) -> Started:
        return self._copier.load(step, place, copies)


def _end(jobs: CopyJobs, region: HostRegion) -> None:
    if jobs.stop():
        region.close()


_swaps: weakref.WeakSet[Any] = weakref.WeakSet()
_patched: set[type] = set()


class Drained(Protocol):
    """What copies in the background."""

    def drain(self) -> None:
        """Return when nothing is queued or in flight."""


def drain_before_sleep(swap: Drained, worker: Any = None) -> None:
    """Have the process's vLLM worker wait for `swap` whenever it is put to sleep. `worker`: its class."""
    if worker is None:
        from vllm.v1.worker.gpu_worker import Worker

        worker = Worker
    _swaps.add(swap)
    if worker not in _patched:
        _patched.add(worker)
        worker.sleep = _drained_first(worker.sleep)


def _drained_first(sleep: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sleep)
    def drained(*how: Any, **named: Any) -> Any:
        for swap in list(_swaps):
            swap.drain()
        return sleep(*how, **named)

    return drained
