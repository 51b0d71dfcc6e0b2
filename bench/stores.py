"""What storing new prompts costs the engine's step thread, in us of thread CPU time, beside vLLM's own CPU offloading.

    python -m bench.stores [REPEATS] [--row-bytes BYTES] [--rows ROWS] [--cold]

vLLM's own scheduler side of the offloading connector, driven as an engine drives it: REQUESTS prompts of CHUNKS new
chunks arrive at once, a few of them are computed in each step, all of them decode for STEPS steps more. The workers'
jobs end one step later. Sides: `vllm` (its CPUOffloadingManager), `cpu` (a cpu tier), `cpu+file` (a file tier below,
with its mover and the supervisor's thread at work meanwhile). Engine, model and copies are left out.

The least of all repeats for each call, since a busy machine only adds to that, and the median of their sums. Then what
a step costs in which DECODING requests decode and nothing is stored: the median of all such steps. `--cold`: before
each step the processor's caches are emptied, as a model's weights empty them, after 3 ms of sleep; a loop that does
nothing else is three times as fast.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from bench.cold import Cold, warm
from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.chains import Arrivals
from nixl_tiers.vllm.connector import NixlTiersConnector
from nixl_tiers.vllm.manager import NixlTiersManager
from tests.support.vllm_lookups import hashes
from tests.support.vllm_scheduler import offloading_scheduler

TOKENS: Final = 16
REQUESTS: Final = 32
CHUNKS: Final = 62
AT_ONCE: Final = 7  # requests whose prompts are computed in one step
STEPS: Final = 32
DECODING: Final = 16
ROWS: Final = REQUESTS * CHUNKS
CALLS: Final = ("arrive", "look up", "build", "output", "stats", "finish")


class Connector:
    """The scheduler's side of a connector over a manager, without an engine."""

    def __init__(self, manager: Any, made: type[OffloadingConnector], blocks_per_chunk: int = 1) -> None:
        self.connector: Any = object.__new__(made)
        self.connector.connector_scheduler = offloading_scheduler(manager, TOKENS, blocks_per_chunk)
        self.connector.connector_worker = None
        self.connector._bounding_group_ids = ()
        pool = SimpleNamespace(get_cached_block=lambda *_: None)  # the engine has nothing itself
        self.connector._kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.connector._by_priority = False
        self.connector._anticipates = True
        self.connector._arrivals = Arrivals()
        self.connector._withdrawn = []
        self.connector._prepares_first = False


class Turn:
    """`count` new prompts, from their arrival to their end; `took_s`: of each call; `decoding_s`: of each step in which
    all of them decode and nothing is stored. `before_step` is called before each."""

    def __init__(self, side: Any, count: int = REQUESTS, before_step: Callable[[], object] = warm) -> None:
        self._count = count
        self._before_step = before_step
        self.decoding_s: list[float] = []
        self._connector = side.connector
        self._written = side.written
        self._end_step = side.end_step
        self.took_s = dict.fromkeys(CALLS, 0.0)
        self.jobs = self.steps = 0

    def run(self) -> None:
        requests = [new_request(f"{id(self)}-{number}", hashes(CHUNKS)) for number in range(self._count)]
        with self._timed("arrive"):
            for request in requests:
                self._connector.on_new_request(request)
        waiting, running, open_jobs, block = list(requests), list[Any](), dict[int, Any](), 1
        for _ in range(-(-REQUESTS // AT_ONCE) + STEPS + 1):
            self._before_step()
            before_s = sum(self.took_s.values())
            new, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            with self._timed("look up"):
                for request in new:
                    self._connector.get_num_new_matched_tokens(request, 0)
            for request in new:
                request.blocks = list(range(block, block + CHUNKS + 1))
                block += CHUNKS + 1
            ended = [request for request in running if request.left == 0]
            running = [request for request in running if request.left]
            with self._timed("finish"):
                for request in ended:
                    request.status = "finished"
                    self._connector.request_finished(request, [])
            output = scheduled(new, running, [request.request_id for request in ended])
            with self._timed("build"):
                meta = self._connector.build_connector_meta(output)
            for request in (*new, *running):
                request.num_computed_tokens += output.num_scheduled_tokens[request.request_id]
                request.left -= request not in new
            self._end_step(meta)
            for job in open_jobs.values():
                self._written(job.dst_spec)
            output = reported(open_jobs)
            with self._timed("output"):
                self._connector.update_connector_output(output)
            with self._timed("stats"):
                self._connector.get_kv_connector_stats()
            if len(running) == self._count and not (new or ended or open_jobs or meta.store_jobs):
                self.decoding_s.append(sum(self.took_s.values()) - before_s)
            open_jobs = meta.store_jobs
            self.jobs += len(open_jobs)
            self.steps += 1
            running += new
        assert not running
        assert not waiting
        assert not open_jobs

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        began_s = time.thread_time()
        yield
        self.took_s[call] += time.thread_time() - began_s


def new_request(name: str, hashes: list[bytes]) -> Any:
    """A request of as many blocks as `hashes`, and a token more."""
    tokens = len(hashes) * TOKENS + 1
    request = SimpleNamespace(
        request_id=name,
        kv_transfer_params=None,
        kv_hints=None,
        cache_salt=None,
        block_hashes=hashes,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        skip_reading_prefix_cache=False,
        shared_prefix_boundary=None,
        status=None,
        left=STEPS - REQUESTS // AT_ONCE,
    )
    request.is_finished = lambda: request.status is not None
    return request


def scheduled(new: list[Any], running: list[Any], ended: list[str]) -> Any:
    """vLLM's SchedulerOutput of a step in which `new` compute all that they have not, and each of `running` a token."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=request.request_id,
                block_ids=(request.blocks,),
                num_computed_tokens=request.num_computed_tokens,
            )
            for request in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request.request_id for request in running],
            new_block_ids=[None] * len(running),
            num_computed_tokens=[request.num_computed_tokens for request in running],
            resumed_req_ids=set(),
        ),
        num_scheduled_tokens={
            **{request.request_id: request.num_tokens - request.num_computed_tokens for request in new},
            **{request.request_id: 1 for request in running},
        },
        scheduled_spec_decode_tokens={},
        finished_req_ids=ended,
        preempted_req_ids=None,
        kv_cache_block_copies=None,
        kv_connector_block_state=None,
    )


def reported(jobs: Iterable[int]) -> Any:
    """vLLM's KVConnectorOutput of a step by whose end workers have ended these jobs."""
    report = OffloadingWorkerMetadata()
    for job in jobs:
        report.mark_completed(job)
    return SimpleNamespace(failed_recving=set(), kv_connector_worker_meta=report)


class Vllm:
    def __init__(self, rows: int) -> None:
        self.connector = Connector(CPUOffloadingManager(rows), OffloadingConnector).connector

    def written(self, spec: Any) -> None:
        pass

    def end_step(self, meta: Any) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class Tiers:
    def __init__(self, rows: int, row_bytes: int, path: str | None) -> None:
        geometry = Geometry(1, row_bytes - 4096)
        tiers: list[dict[str, Any]] = [{"type": "cpu", "capacity": rows * geometry.row_bytes}]
        if path is not None:
            tiers.append({"type": "file", "path": path, "capacity": 2 * rows * geometry.row_bytes, "min_free": 0})
        config = schema.load({"prefill_tokens_per_s": 10_000, "tiers": tiers})
        self.region = HostRegion.create(geometry, rows)
        self.region.rows_view[:] = 1
        self.coordinator = Coordinator.open(config, Namespace.of({"bench": 1}), self.region, ready_s=30.0)
        manager = NixlTiersManager(self.coordinator, config, (0,), None, chunk_tokens=(TOKENS,))
        self.connector = Connector(manager, NixlTiersConnector).connector
        manager.times_are_published(7168)

    def written(self, spec: Any) -> None:
        self.region.mark(spec.rows, 0, spec.store_seq, ok=True)

    def end_step(self, meta: Any) -> None:
        self.region.publish_step(meta.step, 0.01)

    def settle(self) -> None:
        self.coordinator.flush(60.0)

    def close(self) -> None:
        self.coordinator.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("repeats", nargs="?", type=int, default=9)
    parser.add_argument("--row-bytes", type=int, default=64 << 10)
    parser.add_argument("--rows", type=int, default=3 * ROWS, help="of the host: later turns evict")
    parser.add_argument("--cold", action="store_true", help="empty the processor's caches before each step")
    given = parser.parse_args()
    before_step = Cold() if given.cold else warm
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Any] = {
            "vllm": Vllm(given.rows),
            "cpu": Tiers(given.rows, given.row_bytes, None),
            "cpu+file": Tiers(given.rows, given.row_bytes, folder),
        }
        turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for _ in range(given.repeats + 1):
            for name, side in sides.items():
                turn = Turn(side, before_step=before_step)
                turn.run()
                turns[name].append(turn)
                side.settle()
        first = turns["vllm"][0]
        print(f"us a row of {ROWS}, {first.jobs} jobs, {first.steps} steps; load {os.getloadavg()[0]:.1f}")
        print(f"{'':9} | " + " | ".join(f"{call:>7}" for call in CALLS) + " |     sum | median")
        for name, made in turns.items():
            each = [min(turn.took_s[call] for turn in made[1:]) * 1e6 / ROWS for call in CALLS]
            sums = median(sum(turn.took_s.values()) for turn in made[1:]) * 1e6 / ROWS
            print(f"{name:9} | " + " | ".join(f"{us:7.2f}" for us in each) + f" | {sum(each):7.2f} | {sums:6.2f}")
        decoding: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(given.repeats):
            for name, side in sides.items():
                turn = Turn(side, DECODING, before_step)
                turn.run()
                decoding[name] += turn.decoding_s
                side.settle()
        state = "emptied before each" if given.cold else "warm"
        print(f"us a step of {DECODING} requests that decode, the caches {state}")
        for name, each in decoding.items():
            print(f"{name:9} | {1e6 * median(each):7.1f} | of {len(each)} steps")
        for side in sides.values():
            side.close()


if __name__ == "__main__":
    main()
