"""The worker's side: copies between vLLM's KV blocks and the region's rows, outside the engine's step.

Stores and loads have a thread each, so that neither waits for the other. vLLM stops the engine when a job is reported
as failed, so a failed store is reported as successful and the failure is recorded in the rows' control words, where the
scheduler's side reads it. A failed load cannot be hidden that way, because the request would go on with wrong bytes:
NixlTiersConnector collects it and has the request recomputed; with vLLM's own connector the engine stops.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from nixl_tiers.lifetime import finalize_once
from nixl_tiers.memory.prefault import Prefault
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.host import HostSwap
from nixl_tiers.swap.numa import prefer
from nixl_tiers.swap.plan import CopyPlan, Segment
from nixl_tiers.vllm.compat import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from nixl_tiers.vllm.transfer import Part, RowsSpec, split_load, split_store

log = logging.getLogger(__name__)

STOP_S: Final = 2.0


class Transfer(Protocol):
    """A copy in flight. A host copy ends before its call returns, and has none."""

    def elapsed_s(self) -> float: ...  # waits for its end; raises if the copy failed


class Swap(Protocol):
    """Copies one group's blocks to places in the region and back."""

    def store(self, group: int, blocks: NDArray[np.int64], places: NDArray[np.uint32]) -> Transfer | None: ...

    def load(self, group: int, blocks: NDArray[np.int64], places: NDArray[np.uint32]) -> Transfer | None: ...


class Moved(NamedTuple):
    """What a copy moved, and how long that took on the device, where that is measured."""

    nbytes: int = 0
    device_s: float = 0.0

    def plus(self, other: Moved) -> Moved:
        return Moved(self.nbytes + other.nbytes, self.device_s + other.device_s)


Finish = Callable[[], Moved]  # waits for a job that was started; raises if it failed


def worker_over(
    region: HostRegion, kv_caches: CanonicalKVCaches, cell: int, last_block_only: Collection[int] = ()
) -> NixlTiersWorker:
    """A worker for these caches, with the swap that their device needs; it closes the region when it shuts down.

    `last_block_only`: places of the KV groups of whose chunks loads read only the last block. Raises ValueError for
    caches that it cannot copy.
    """
    geometry = region.geometry
    plan = CopyPlan(segments_of(kv_caches, geometry.sub_block_bytes), geometry, cell, region.address, region.rows)
    device = kv_caches.tensors[0].tensor.device
    if device.type == "cpu":
        prefault(region, cell, None)
        return NixlTiersWorker(region, plan, HostSwap(plan), cell, last_block_only, on_device=False)
    if device.type != "cuda" or torch.version.hip:
        raise ValueError(f"nixl_tiers copies KV blocks of CUDA GPUs and CPUs, not of {device.type} devices")
    from nixl_tiers.swap.cuda import CudaSwap
    from nixl_tiers.swap.driver import open_driver
    from nixl_tiers.swap.numa import node_of

    ordinal = torch.cuda.current_device() if device.index is None else device.index
    prefaulted = prefault(region, cell, node_of(open_driver().pci_address(ordinal)))
    if prefaulted is not None:
        prefaulted.wait()  # pinning would allocate the same pages, on one thread
    swap = CudaSwap(plan, ordinal)
    region.at_close(swap.close)
    return NixlTiersWorker(region, plan, swap, cell, last_block_only, on_device=True)


def prefault(region: HostRegion, cell: int, node: int | None) -> Prefault | None:
    """Have the first rank allocate the region's pages: on its GPU's NUMA node if no other rank may have another one."""
    if cell:
        return None
    if node is not None and region.geometry.cells == 1 and not region.hugetlb:  # whose pages are where they are
        accepted = prefer(region.address, region.nbytes, node)
        log.info(
            "nixl_tiers: the host region's pages are allocated on NUMA node %d, the GPU's%s",
            node,
            "" if accepted else ", but the kernel refuses (a container may need SYS_NICE): copies may cross sockets",
        )
    return region.prefault()


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
    """One rank's copies into and out of cell `cell` of every row.

    `on_device`: the swap only starts copies, in the order of the caller's CUDA stream, and must be called at
    submission. Otherwise a copy blocks its caller, and runs on a thread.
    """

    def __init__(
        self,
        region: HostRegion,
        plan: CopyPlan,
        swap: Swap,
        cell: int,
        last_block_only: Collection[int] = (),
        *,
        on_device: bool,
    ) -> None:
        self._region = region
        self._plan = plan
        self._swap = swap
        self._cell = cell
        self._last_block_only = frozenset(last_block_only)
        self._on_device = on_device
        self._blocks_per_chunk = region.geometry.sub_blocks
        self._open: dict[int, threading.Event] = {}
        self._finished: deque[TransferResult] = deque()
        self._failed_loads: set[int] | None = None  # None: they are reported to vLLM as failed
        self._stores = _SerialExecutor("nixl_tiers-store")
        self._loads = _SerialExecutor("nixl_tiers-load")
        # vLLM does not always call shutdown, and two threads would keep the region mapped.
        self._end = finalize_once(self, partial(_end, (self._stores, self._loads), region))

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, RowsSpec)
        self._submit(self._stores, job_id, lambda: self._store(src_spec, dst_spec))
        return True

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: object) -> bool:
        """`expedited` (newer vLLM) changes nothing: loads start in the order of submission."""
        assert isinstance(src_spec, RowsSpec)
        self._submit(self._loads, job_id, lambda: self._load(src_spec, dst_spec))
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        results = []
        while self._finished:
            result = self._finished.popleft()
            self._open.pop(result.job_id, None)
            results.append(self._reported(result))
        return results

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
        for job_id in job_ids:
            ended = self._open.get(job_id)
            if ended is not None:
                ended.wait()

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

    def _submit(self, executor: _SerialExecutor, job_id: int, start: Callable[[], Finish]) -> None:
        ended = self._open[job_id] = threading.Event()
        job = _Job(job_id, start)
        if self._on_device:
            job.start()

        def end() -> None:
            self._finished.append(job.end())
            ended.set()

        executor.put(end)

    def _store(self, engine: GPULoadStoreSpec, rows: RowsSpec) -> Finish:
        """A store never fails: a row that is not marked as written does not become a hit."""
        copies: list[Finish] = []
        try:
            copies = [
                self._store_part(part, rows.store_seq) for part in split_store(rows, engine, self._blocks_per_chunk)
            ]
        except Exception:
            log.exception("nixl_tiers: blocks and rows of a store do not match; its chunks are dropped")

        def finish() -> Moved:
            moved = Moved()
            for copy in copies:
                try:
                    moved = moved.plus(copy())
                except Exception:
                    log.exception("nixl_tiers: what a store wrote could not be marked; its chunks are dropped")
            return moved

        return finish

    def _store_part(self, part: Part, store_seq: int) -> Finish:
        def finish() -> Moved:
            copied, moved = not part.known, Moved()  # an unknown part is not a failure
            if started is not None:
                try:
                    moved = started()
                    copied = True
                except Exception:
                    log.exception("nixl_tiers: a copy to host memory failed; %d chunks are dropped", len(part.rows))
            missing = np.zeros(len(part.rows), np.int64)
            missing[0] = part.first
            # In other groups a look-up cannot know whether the load would read the missing blocks.
            whole = part.known & ((missing == 0) | (part.group in self._last_block_only))
            self._region.mark(part.rows, self._cell, store_seq, copied, missing, whole=whole)
            return moved

        started: Finish | None = None
        if part.known:
            try:
                started = self._copy(self._swap.store, part)
            except Exception:
                log.exception("nixl_tiers: a copy to host memory did not start; %d chunks are dropped", len(part.rows))
        return finish

    def _load(self, rows: RowsSpec, engine: GPULoadStoreSpec) -> Finish:
        """Copies that did not start fail at the end, after all others have ended: until then blocks are being
        written."""
        copies: list[Finish] = []
        failures: list[Exception] = []
        for part in split_load(rows, engine, self._blocks_per_chunk):
            try:
                copies.append(self._copy(self._swap.load, part))
            except Exception as error:  # noqa: BLE001 - raised again by finish
                failures.append(error)

        def finish() -> Moved:
            moved = Moved()
            for copy in copies:
                try:
                    moved = moved.plus(copy())
                except Exception as error:  # noqa: BLE001 - raised again below
                    failures.append(error)
            if failures:
                raise failures[0]
            return moved

        return finish

    def _copy(
        self, copy: Callable[[int, NDArray[np.int64], NDArray[np.uint32]], Transfer | None], part: Part
    ) -> Finish:
        transfer = copy(part.group, part.blocks, self._plan.places(part.rows, part.first, len(part.blocks)))
        nbytes = len(part.blocks) * self._plan.groups[part.group].block_bytes

        def finish() -> Moved:
            return Moved(nbytes, 0.0 if transfer is None else transfer.elapsed_s())

        return finish


def _end(executors: Iterable[_SerialExecutor], region: HostRegion) -> None:
    stopped = [executor.stop(STOP_S) for executor in executors]
    if all(stopped):
        region.close()


class _Job:
    """One transfer, from its start to its result for vLLM."""

    def __init__(self, job_id: int, start: Callable[[], Finish]) -> None:
        self._id = job_id
        self._start = start
        self._finish: Finish | None = None
        self._began_s: float | None = None

    def start(self) -> None:
        self._began_s = time.perf_counter()
        try:
            self._finish = self._start()
        except Exception:
            log.exception("nixl_tiers: job %d could not be started", self._id)

    def end(self) -> TransferResult:
        """Start the job unless it has been started, and wait for its end."""
        if self._began_s is None:
            self.start()
        assert self._began_s is not None
        success, moved = False, Moved()
        if self._finish is not None:
            try:
                moved = self._finish()
                success = True
            except Exception:
                log.exception("nixl_tiers: job %d failed", self._id)
        took_s = moved.device_s or time.perf_counter() - self._began_s
        return TransferResult(self._id, success, moved.nbytes, took_s)


class _SerialExecutor:
    """One thread that runs calls in the order of submission."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def stop(self, timeout_s: float) -> bool:
        """End after the calls that were submitted before; whether that took no longer than `timeout_s`."""
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it refers to its worker, which could not be collected while this thread waits
