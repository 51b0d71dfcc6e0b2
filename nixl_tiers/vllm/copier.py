"""What a worker's jobs copy: blocks of vLLM's jobs to and from this rank's cell of the region's rows.

The stores of a step are one copy for each KV group, and one stroke of marks at its end: what costs time is each call,
not each row. A store never fails: a row that is not marked as written does not become a hit. Loads are copies of their
own: each request goes on as soon as its own blocks have come.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.vllm.compat import GPULoadStoreSpec
from nixl_tiers.vllm.copy_jobs import Moved, Part, RowsSpec, Started, Transfer, split_load, split_store

log = logging.getLogger(__name__)

Number = TypeVar("Number", bound=np.generic)


class Swap(Protocol):
    """Copies one group's blocks to places in the region and back."""

    def store(self, group: int, blocks: NDArray[np.int64], places: NDArray[np.uint32]) -> Transfer | None: ...

    def load(self, group: int, blocks: NDArray[np.int64], places: NDArray[np.uint32]) -> Transfer | None: ...


class Store(NamedTuple):
    """One job of vLLM."""

    id: int
    engine: GPULoadStoreSpec
    rows: RowsSpec


class _Stored(NamedTuple):
    """A part of a store: of which job, what its rows are marked with, and how many bytes of it this rank writes."""

    job: int
    part: Part
    store_seq: int
    nbytes: int = 0


class _Copied:
    """Parts that are copied together; `transfer`: None where the copy has ended already, or did not start."""

    def __init__(self, parts: list[_Stored], *, started: bool, transfer: Transfer | None = None) -> None:
        self.parts = parts
        self._started = started
        self._transfer = transfer

    def end(self) -> float | None:
        """Waits for the end; how long it took on the device, None if it has failed."""
        if not self._started:
            return None
        try:
            return 0.0 if self._transfer is None else self._transfer.elapsed_s()
        except Exception:
            log.exception("nixl_tiers: a copy to host memory failed; %d chunks are dropped", _chunks(self.parts))
            return None


class Copier:
    """`last_block_only`: places of the KV groups of whose chunks loads read only the last block."""

    def __init__(self, region: HostRegion, plan: CopyPlan, swap: Swap, last_block_only: Collection[int]) -> None:
        self._region = region
        self._plan = plan
        self._swap = swap
        self._last_block_only = frozenset(last_block_only)
        self._blocks_per_chunk = region.geometry.sub_blocks

    # --- stores ------------------------------------------------------------------------------------------------

    def store(self, jobs: Sequence[Store]) -> Started:
        by_group: dict[int, list[_Stored]] = {}
        unknown: list[_Stored] = []
        for number, job in enumerate(jobs):
            try:
                for part in split_store(job.rows, job.engine, self._blocks_per_chunk):
                    parts = by_group.setdefault(part.group, []) if part.known else unknown
                    parts.append(_Stored(number, part, job.rows.store_seq))
            except Exception:
                log.exception("nixl_tiers: blocks and rows of a store do not match; its chunks are dropped")
        transfers: list[Transfer] = []
        copies = [copy for group, parts in by_group.items() for copy in self._start(group, parts, transfers)]

        def finish() -> list[Moved]:
            moved = [Moved()] * len(jobs)
            marked = [(part, True) for part in unknown]  # which is not a failure
            for copy in copies:
                took_s = copy.end()
                marked += [(part, took_s is not None) for part in copy.parts]
                if took_s is not None:
                    total = sum(part.nbytes for part in copy.parts) or 1
                    for part in copy.parts:
                        its = Moved(part.nbytes, took_s * part.nbytes / total)
                        moved[part.job] = moved[part.job].plus(its)
            if marked:
                try:
                    self._mark(marked)
                except Exception:
                    log.exception("nixl_tiers: what a store wrote could not be marked; its chunks are dropped")
                    return [Moved()] * len(jobs)
            return moved

        return Started(transfers, finish)

    def _start(self, group: int, parts: list[_Stored], transfers: list[Transfer]) -> list[_Copied]:
        """One copy of all parts; where it does not start, one of each, as the fault may be one part's."""
        try:
            return [self._copy(group, parts, transfers)]
        except Exception:
            if len(parts) == 1:
                chunks = _chunks(parts)
                log.exception("nixl_tiers: a copy to host memory did not start; %d chunks are dropped", chunks)
                return [_Copied(parts, started=False)]
            return [copy for part in parts for copy in self._start(group, [part], transfers)]

    def _copy(self, group: int, parts: list[_Stored], transfers: list[Transfer]) -> _Copied:
        places = _joined([self._places(stored.part) for stored in parts])
        blocks = _joined([stored.part.blocks for stored in parts])
        counts = [len(stored.part.blocks) for stored in parts]
        written = self._plan.writes(places)
        if not isinstance(written, slice):
            mine = written.astype(np.int64)
            counts = np.add.reduceat(mine, np.cumsum([0, *counts[:-1]])).tolist()
            blocks, places = blocks[written], places[written]
        transfer = self._swap.store(group, blocks, places) if len(blocks) else None
        if transfer is not None:
            transfers.append(transfer)
        block_bytes = self._plan.groups[group].block_bytes
        parts = [stored._replace(nbytes=n * block_bytes) for stored, n in zip(parts, counts, strict=True)]
        return _Copied(parts, started=True, transfer=transfer)

    def _mark(self, marked: Sequence[tuple[_Stored, bool]]) -> None:
        """Of all rows, what became of them; those that other ranks write are left out."""
        counts = [len(stored.part.rows) for stored, _ in marked]
        rows = _joined([stored.part.rows for stored, _ in marked])
        seqs: NDArray[np.int64] | int = marked[0][0].store_seq
        if len(marked) > 1:
            seqs = np.repeat([stored.store_seq for stored, _ in marked], counts)
        copied: NDArray[np.bool_] | bool = True
        if not all(good for _, good in marked):
            copied = np.repeat([good for _, good in marked], counts)
        missing: NDArray[np.int64] | int = 0
        whole: NDArray[np.bool_] | bool = True
        if any(stored.part.first or not stored.part.known for stored, _ in marked):
            missing = np.zeros(len(rows), np.int64)
            missing[np.cumsum([0, *counts[:-1]])] = [stored.part.first for stored, _ in marked]
            known, last_only = (
                np.repeat([value(stored.part) for stored, _ in marked], counts)
                for value in (lambda part: part.known, lambda part: part.group in self._last_block_only)
            )
            # In other groups a look-up cannot know whether the load would read the missing blocks.
            whole = known & ((missing == 0) | last_only)
        mine = self._plan.share.writes(rows)
        if not isinstance(mine, slice):
            rows = rows[mine]
            seqs = seqs if isinstance(seqs, int) else seqs[mine]
            copied = copied if isinstance(copied, bool) else copied[mine]
            missing = missing if isinstance(missing, int) else missing[mine]
            whole = whole if isinstance(whole, bool) else whole[mine]
        self._region.mark(rows, self._plan.share.cell, seqs, copied, missing, whole=whole)

    # --- loads -------------------------------------------------------------------------------------------------

    def load(self, rows: RowsSpec, engine: GPULoadStoreSpec) -> Started:
        """Copies that did not start fail at the end, after all others have ended: until then blocks are being
        written."""
        copies: list[tuple[int, Transfer | None]] = []  # bytes
        failures: list[Exception] = []
        for part in split_load(rows, engine, self._blocks_per_chunk):
            try:
                transfer = self._swap.load(part.group, part.blocks, self._places(part))
                copies.append((len(part.blocks) * self._plan.groups[part.group].block_bytes, transfer))
            except Exception as error:  # noqa: BLE001 - raised again by finish
                failures.append(error)

        def finish() -> list[Moved]:
            moved = Moved()
            for nbytes, transfer in copies:
                try:
                    moved = moved.plus(Moved(nbytes, 0.0 if transfer is None else transfer.elapsed_s()))
                except Exception as error:  # noqa: BLE001 - raised again below
                    failures.append(error)
            if failures:
                raise failures[0]
            return [moved]

        return Started([transfer for _, transfer in copies if transfer is not None], finish)

    def _places(self, part: Part) -> NDArray[np.uint32]:
        return self._plan.places(part.rows, part.first, len(part.blocks))


def _joined(arrays: Sequence[NDArray[Number]]) -> NDArray[Number]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _chunks(parts: Sequence[_Stored]) -> int:
    return sum(len(stored.part.rows) for stored in parts)
