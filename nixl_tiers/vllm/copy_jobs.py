"""How a worker's copy jobs run beside the engine's step, and how their ends are noticed.

Copies on a GPU are queued at submission and need nobody: their ends are polled when vLLM asks for finished jobs, once a
step. Threads that wait for them would take the interpreter's lock from the step at each end. Copies in host memory
block their caller, so they run on a thread for each direction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.vllm.compat import LoadStoreSpec, TransferResult

log = logging.getLogger(__name__)

OVERDUE_S: Final = 10.0
POLL_S: Final = 0.0001


class Direction(StrEnum):
    STORE = "store"
    LOAD = "load"


class Transfer(Protocol):
    """A copy in flight. A host copy ends before its call returns, and has none."""

    def done(self) -> bool: ...  # does not wait; raises if the copy failed

    def elapsed_s(self) -> float: ...  # waits for its end; raises if the copy failed


class Moved(NamedTuple):
    """What a copy moved, and how long that took on the device, where that is measured."""

    nbytes: int = 0
    device_s: float = 0.0


# Waits for a job that was started: of each of its ids, None of one that has failed; raises if all have.
Finish = Callable[[], list[Moved | None]]


class Started(NamedTuple):
    """A job that was started: its copies in flight, and what is to be done once they have ended."""

    transfers: list[Transfer]
    finish: Finish


class Job:
    """Transfer jobs of vLLM that are one here, from their start to their results."""

    def __init__(self, ids: Sequence[int], start: Callable[[], Started]) -> None:
        self.ids = ids
        self._start: Callable[[], Started] | None = start
        self._started: Started | None = None
        self.began_s = 0.0

    def start(self) -> None:
        start, self._start = self._start, None  # it refers to the worker
        if start is None:
            return
        self.began_s = time.perf_counter()
        try:
            self._started = start()
        except Exception:
            log.exception("nixl_tiers: job %d could not be started", self.ids[0])

    def ready(self) -> bool:
        """Whether `end` of this started job will not wait."""
        return self._started is None or all(map(_over, self._started.transfers))

    def end(self) -> list[TransferResult]:
        """Start the job unless it has been started, and wait for its end."""
        self.start()
        moved: list[Moved | None] = [None] * len(self.ids)
        if self._started is not None:
            try:
                moved = self._started.finish()
            except Exception:
                log.exception("nixl_tiers: job %d failed", self.ids[0])
        took_s = time.perf_counter() - self.began_s
        return [
            TransferResult(job_id, False, 0, took_s)
            if each is None
            else TransferResult(job_id, True, each.nbytes, each.device_s or took_s)
            for job_id, each in zip(self.ids, moved, strict=True)
        ]


def _over(transfer: Transfer) -> bool:
    try:
        return transfer.done()
    except Exception:  # noqa: BLE001 - `finish` raises it again
        return True


class CopyJobs(Protocol):
    """The jobs of one worker. For the thread that submits them, but for `stop`."""

    @property
    def open(self) -> Collection[int]:
        """The ids of those whose results `finished` has not returned."""

    def submit(self, direction: Direction, job: Job) -> None: ...

    def finished(self) -> list[TransferResult]:
        """The results of the jobs that have ended since the last call."""

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs have ended; unknown ones count as ended."""

    def stop(self) -> bool:
        """End what was submitted, within some seconds; whether all has ended. May be called twice."""


class PolledJobs:
    """Jobs whose copies run on a GPU, those of each direction in the order of submission."""

    def __init__(self, end_s: float = PRODUCTION.copies_end_s, overdue_s: float = OVERDUE_S) -> None:
        self._end_s = end_s
        self._overdue_s = overdue_s
        self.open: set[int] = set()
        self._running: dict[Direction, deque[Job]] = {direction: deque() for direction in Direction}
        self._results: list[TransferResult] = []
        self._reported = -1  # the job that was logged last as overdue

    def submit(self, direction: Direction, job: Job) -> None:
        job.start()
        self.open.update(job.ids)
        self._running[direction].append(job)

    def finished(self) -> list[TransferResult]:
        self._poll()
        results, self._results = self._results, []
        self.open.difference_update([result.job_id for result in results])
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        wanted = set(job_ids)
        while self._poll() and any(not wanted.isdisjoint(job.ids) for jobs in self._running.values() for job in jobs):
            time.sleep(POLL_S)

    def stop(self) -> bool:
        until_s = time.monotonic() + self._end_s
        while left := self._poll():
            if time.monotonic() >= until_s:
                break
            time.sleep(POLL_S)
        return not left

    def _poll(self) -> bool:
        """Take the results of jobs that have ended. Returns whether any are left."""
        for direction, jobs in self._running.items():
            while jobs and jobs[0].ready():
                self._results += jobs.popleft().end()
            if jobs and jobs[0].ids[0] != self._reported and time.perf_counter() - jobs[0].began_s > self._overdue_s:
                self._reported = jobs[0].ids[0]
                log.warning(
                    "nixl_tiers: a %s between GPU and host memory has not ended after %.0f s (job %d, and %d behind "
                    "it): the GPU's work before it has not ended, or the GPU hangs: see Xid in dmesg",
                    direction.value,
                    time.perf_counter() - jobs[0].began_s,
                    jobs[0].ids[0],
                    sum(len(job.ids) for job in jobs) - 1,
                )
        return any(self._running.values())


class ThreadedJobs:
    """Jobs whose copies block their caller: a thread for each direction, so that neither waits for the other."""

    def __init__(self, end_s: float = PRODUCTION.copies_end_s) -> None:
        self._end_s = end_s
        self._threads = {direction: _SerialExecutor(f"nixl_tiers-{direction.value}") for direction in Direction}
        self.open: dict[int, threading.Event] = {}
        self._results: deque[TransferResult] = deque()

    def submit(self, direction: Direction, job: Job) -> None:
        ended, results = threading.Event(), self._results
        self.open.update(dict.fromkeys(job.ids, ended))

        def end() -> None:
            results.extend(job.end())
            ended.set()

        self._threads[direction].put(end)

    def finished(self) -> list[TransferResult]:
        results = []
        while self._results:
            results.append(self._results.popleft())
            self.open.pop(results[-1].job_id, None)
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        for job_id in job_ids:
            ended = self.open.get(job_id)
            if ended is not None:
                ended.wait()

    def stop(self) -> bool:
        stopped = [thread.stop(self._end_s) for thread in self._threads.values()]
        return all(stopped)


class _SerialExecutor:
    """One thread that runs calls in the order of submission."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def stop(self, timeout_s: float) -> bool:
        """End after the calls that were submitted before; whether that took no longer than `timeout_s`. On this very
        thread (the last call had the last reference to the worker, which is collected now) there are none."""
        self._calls.put(None)
        if self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it refers to its worker, which could not be collected while this thread waits


class RowsSpec(LoadStoreSpec):
    """The host side of a job: region rows, ordered by KV group, sent from the scheduler to every worker.

    `rows`: int64 (n,); `packed`: the same as 32-bit numbers. `counts`: rows of each KV group, in the order of
    OffloadingConfig.groups; they add up to n. `store_seq`: what a store's rows are marked with; 0 for loads. `missing`:
    of a load's rows, those that lack sub-blocks: place in `rows` -> how many at the row's beginning.
    """

    def __init__(
        self,
        rows: NDArray[np.int64] | bytes,
        counts: Sequence[int],
        store_seq: int = 0,
        missing: Mapping[int, int] | None = None,
    ) -> None:
        """`rows`: or packed."""
        self.packed = rows if isinstance(rows, bytes) else rows.astype("<u4").tobytes()
        self.counts = tuple(counts)
        self.store_seq = store_seq
        self.missing = dict(missing or {})

    @property
    def rows(self) -> NDArray[np.int64]:
        return np.frombuffer(self.packed, "<u4").astype(np.int64)

    def __reduce__(self) -> tuple[type[RowsSpec], tuple[bytes, tuple[int, ...], int, dict[int, int]]]:
        return RowsSpec, (self.packed, self.counts, self.store_seq, self.missing)

    def __repr__(self) -> str:
        return f"RowsSpec(rows={self.rows.tolist()}, counts={self.counts}, store_seq={self.store_seq})"
