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
from collections.abc import Callable, Collection
from enum import Enum
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol

from nixl_tiers.vllm.compat import TransferResult

log = logging.getLogger(__name__)

STOP_S: Final = 2.0
OVERDUE_S: Final = 10.0
POLL_S: Final = 0.0001


class Direction(Enum):
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

    def plus(self, other: Moved) -> Moved:
        return Moved(self.nbytes + other.nbytes, self.device_s + other.device_s)


Finish = Callable[[], Moved]  # waits for a job that was started; raises if it failed


class Started(NamedTuple):
    """A job that was started: its copies in flight, and what is to be done once they have ended."""

    transfers: list[Transfer]
    finish: Finish


class Job:
    """One transfer job of vLLM, from its start to its result."""

    def __init__(self, job_id: int, start: Callable[[], Started]) -> None:
        self.id = job_id
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
            log.exception("nixl_tiers: job %d could not be started", self.id)

    def ready(self) -> bool:
        """Whether `end` of this started job will not wait."""
        return self._started is None or all(map(_over, self._started.transfers))

    def end(self) -> TransferResult:
        """Start the job unless it has been started, and wait for its end."""
        self.start()
        success, moved = False, Moved()
        if self._started is not None:
            try:
                moved = self._started.finish()
                success = True
            except Exception:
                log.exception("nixl_tiers: job %d failed", self.id)
        took_s = moved.device_s or time.perf_counter() - self.began_s
        return TransferResult(self.id, success, moved.nbytes, took_s)


def _over(transfer: Transfer) -> bool:
    try:
        return transfer.done()
    except Exception:  # noqa: BLE001 - `finish` raises it again
        return True


class CopyJobs(Protocol):
    """The jobs of one worker. For the thread that submits them, but for `stop`."""

    def submit(self, direction: Direction, job: Job) -> None: ...

    def finished(self) -> list[TransferResult]:
        """The results of the jobs that have ended since the last call."""

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these jobs have ended; unknown ones count as ended."""

    def stop(self) -> bool:
        """End what was submitted, within some seconds; whether all has ended. May be called twice."""


class PolledJobs:
    """Jobs whose copies run on a GPU, those of each direction in the order of submission."""

    def __init__(self, overdue_s: float = OVERDUE_S) -> None:
        self._overdue_s = overdue_s
        self._open: dict[Direction, deque[Job]] = {direction: deque() for direction in Direction}
        self._results: list[TransferResult] = []
        self._reported = -1  # the job that was logged last as overdue

    def submit(self, direction: Direction, job: Job) -> None:
        job.start()
        self._open[direction].append(job)

    def finished(self) -> list[TransferResult]:
        self._poll()
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        wanted = set(job_ids)
        while self._poll() and any(job.id in wanted for jobs in self._open.values() for job in jobs):
            time.sleep(POLL_S)

    def stop(self) -> bool:
        until_s = time.monotonic() + STOP_S
        while left := self._poll():
            if time.monotonic() >= until_s:
                break
            time.sleep(POLL_S)
        return not left

    def _poll(self) -> bool:
        """Take the results of jobs that have ended. Returns whether any are left."""
        for direction, jobs in self._open.items():
            while jobs and jobs[0].ready():
                self._results.append(jobs.popleft().end())
            if jobs and jobs[0].id != self._reported and time.perf_counter() - jobs[0].began_s > self._overdue_s:
                self._reported = jobs[0].id
                log.warning(
                    "nixl_tiers: a %s between GPU and host memory has not ended after %.0f s (job %d, and %d behind "
                    "it): the GPU's work before it has not ended, or the GPU hangs",
                    direction.value,
                    time.perf_counter() - jobs[0].began_s,
                    jobs[0].id,
                    len(jobs) - 1,
                )
        return any(self._open.values())


class ThreadedJobs:
    """Jobs whose copies block their caller: a thread for each direction, so that neither waits for the other."""

    def __init__(self) -> None:
        self._threads = {direction: _SerialExecutor(f"nixl_tiers-{direction.value}") for direction in Direction}
        self._open: dict[int, threading.Event] = {}
        self._results: deque[TransferResult] = deque()

    def submit(self, direction: Direction, job: Job) -> None:
        ended, results = threading.Event(), self._results
        self._open[job.id] = ended

        def end() -> None:
            results.append(job.end())
            ended.set()

        self._threads[direction].put(end)

    def finished(self) -> list[TransferResult]:
        results = []
        while self._results:
            results.append(self._results.popleft())
            self._open.pop(results[-1].job_id, None)
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        for job_id in job_ids:
            ended = self._open.get(job_id)
            if ended is not None:
                ended.wait()

    def stop(self) -> bool:
        stopped = [thread.stop(STOP_S) for thread in self._threads.values()]
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
