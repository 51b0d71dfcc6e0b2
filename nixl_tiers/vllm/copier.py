"""What a worker's jobs copy: blocks of vLLM's jobs to and from this rank's cell of the region's rows.

The jobs of a step are planned together (swap/step.py). Its stores are one copy for each KV group: what costs time is
each call, not each row. A store never fails: a row that is not marked as written does not become a hit. Loads are
copies of their own: each request goes on as soon as its own blocks have come.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.problems import PROBLEMS
from nixl_tiers.swap.step import Numbers, Pairs, Step, Steps
from nixl_tiers.vllm.compat import GPULoadStoreSpec
from nixl_tiers.vllm.copy_jobs import Moved, RowsSpec, Started, Transfer

log = logging.getLogger(__name__)


class Swap(Protocol):
    """Copies one group's blocks to places in the region and back."""

    def copy(self, group: int, pairs: Pairs, *, to_host: bool) -> Transfer | None: ...

    def mark_loads(self) -> None:
        """Loads until `unmark_loads` begin behind the compute that has been launched by now."""

    def unmark_loads(self) -> None: ...


class Submitted(NamedTuple):
    """One job of vLLM."""

    id: int
    engine: GPULoadStoreSpec
    rows: RowsSpec


class Copier:
    """`last_block_only`: places of the KV groups of whose chunks loads read only the last block."""

    def __init__(self, region: HostRegion, plan: CopyPlan, swap: Swap, last_block_only: Collection[int]) -> None:
        self._swap = swap
        self._groups = len(plan.groups)
        self._steps = Steps(plan, region.control, last_block_only)
        region.at_close(self._steps.close)

    def plan(self, jobs: Sequence[Submitted], *, to_host: bool) -> Step:
        """What these jobs copy; those that are not as they should be copy nothing. Raises nothing: that would end the
        engine."""
        try:
            step = self._steps.plan(self._numbers(jobs), to_host=to_host)
        except Exception:
            log.exception("nixl_tiers: the copies of a step cannot be planned")
            step = self._steps.plan(Numbers.of_nothing(len(jobs), self._groups), to_host=to_host)
        if any(step.verdicts):
            for job, verdict in zip(jobs, step.verdicts, strict=True):
                if verdict:
                    log.error("nixl_tiers: job %d cannot be copied: %s", job.id, PROBLEMS[verdict])
        return step

    def _numbers(self, jobs: Sequence[Submitted]) -> Numbers:
        numbers: list[int] = []
        packed: list[bytes] = []
        blocks: list[Any] = []
        for _, engine, rows in jobs:
            sizes, counts, missing = engine.group_sizes, rows.counts, rows.missing
            numbers += (len(rows.packed) // 4, len(engine.block_ids), rows.store_seq, len(missing))
            if len(sizes) == len(counts) == self._groups:
                for share in zip(counts, sizes, engine.block_indices, strict=True):
                    numbers += share
            else:
                numbers += (-1, 0, 0) * self._groups  # which is its verdict
            for lacking in missing.items():
                numbers += lacking
            packed.append(rows.packed)
            blocks.append(engine.block_ids)
        return Numbers(len(jobs), array("q", numbers), b"".join(packed), b"".join(blocks), blocks[0].itemsize)

    def store(self, step: Step) -> Started:
        """Starts the copies of planned stores, all of a group together."""
        transfers: list[tuple[int, Transfer | None]] = []
        failed: list[int] = []  # groups
        for group, pairs in step.of_groups():
            try:
                transfers.append((group, self._swap.copy(group, pairs, to_host=True)))
            except Exception:
                log.exception("nixl_tiers: a copy to host memory did not start; its chunks are dropped")
                failed.append(group)

        def finish() -> list[Moved | None]:
            took_s = 0.0
            for group, transfer in transfers:
                try:
                    took_s += 0.0 if transfer is None else transfer.elapsed_s()
                except Exception:
                    log.exception("nixl_tiers: a copy to host memory failed; its chunks are dropped")
                    failed.append(group)
            if failed:
                for job in range(step.numbers.jobs):
                    if any(step.counts[job * self._groups + group] for group in failed):
                        step.fail(job)
            try:
                self._steps.mark(step)
            except Exception:
                log.exception("nixl_tiers: what a store wrote could not be marked; its chunks are dropped")
                return [Moved()] * step.numbers.jobs
            nbytes = [0 if bad else moved for moved, bad in zip(step.nbytes, step.verdicts, strict=True)]
            total = sum(nbytes) or 1
            return [Moved(moved, took_s * moved / total) for moved in nbytes]

        return Started([transfer for _, transfer in transfers if transfer is not None], finish)

    def load(self, step: Step, job: int, copies: Sequence[tuple[int, Pairs]]) -> Started:
        """Starts one of the planned loads. Copies that did not start fail at the end, after all others have ended:
        until then blocks are being written."""
        transfers: list[Transfer] = []
        failures: list[Exception] = []
        for group, pairs in copies:
            try:
                if (transfer := self._swap.copy(group, pairs, to_host=False)) is not None:
                    transfers.append(transfer)
            except Exception as error:  # noqa: BLE001 - raised again by finish
                failures.append(error)

        def finish() -> list[Moved | None]:
            took_s = 0.0
            for transfer in transfers:
                try:
                    took_s += transfer.elapsed_s()
                except Exception as error:  # noqa: BLE001 - raised again below
                    failures.append(error)
            if failures:
                raise failures[0]
            return [None if step.verdicts[job] else Moved(step.nbytes[job], took_s)]

        return Started(transfers, finish)
