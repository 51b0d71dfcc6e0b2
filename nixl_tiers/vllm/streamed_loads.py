"""A worker's loads some of whose rows are still to come: copied as they arrive, by a thread of their own beside
ordinary jobs, of which they hold up none (docs/internals/streams.md)."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple, Protocol

from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.step import Pairs
from nixl_tiers.swap.streams import LoadCall, Stream, Streams, built
from nixl_tiers.vllm.compat import TransferResult
from nixl_tiers.vllm.copier import Submitted

log = logging.getLogger(__name__)


class _Load(NamedTuple):
    stream: Stream
    blocks: list[int]  # the engine's
    skipped: int  # sub-blocks of the first row before the first block


class _Swap(Protocol):
    def load_call(self, group: int) -> LoadCall: ...


def streamed_loads(region: HostRegion, plan: CopyPlan, swap: _Swap) -> StreamedLoads | None:
    """None where such loads are not possible."""
    return StreamedLoads(region, plan, swap) if len(plan.groups) == 1 and region.streams_possible and built() else None


class StreamedLoads:
    """Of one rank, in the one KV group that vLLM has. For the thread that submits them, but for `stop`."""

    def __init__(self, region: HostRegion, plan: CopyPlan, swap: _Swap) -> None:
        self._swap = swap
        self._streams = Streams(plan, region.words, region.limits, region.bell)
        region.at_close(self.stop)
        self._sub_blocks = plan.geometry.sub_blocks
        self._block_bytes = plan.groups[0].block_bytes
        self.open: dict[int, _Load] = {}
        """By job: those whose results `finished` has not returned."""
        self.invalid_blocks: set[int] = set()
        """Of the results that `finished` has returned: the engine's blocks that were not copied, from each first gap
        on."""

    def begin(self, load: Submitted, pairs: Pairs) -> None:
        """Begin one of a step's loads, whose pairs are checked. Raises ValueError, OSError."""
        rows, stream = load.rows, load.rows.stream
        assert stream is not None
        skipped = load.engine.block_indices[0] % self._sub_blocks
        begun = self._streams.begin(
            self._swap.load_call(0), pairs, rows.packed,
            skipped=skipped, coming=stream.coming, limit=(stream.slot, stream.stream), deadline_s=stream.deadline_s,
        )  # fmt: skip
        self.open[load.id] = _Load(begun, list(map(int, load.engine.block_ids)), skipped)

    def finished(self) -> list[TransferResult]:
        """The results of those that have ended since the last call: the bytes that were copied, and what that took."""
        results = []
        for job_id, load in list(self.open.items()):
            if (ended := self._streams.ended(load.stream)) is None:
                continue
            del self.open[job_id]
            if not ended.failed:  # else none are good
                self.invalid_blocks.update(load.blocks[max(0, ended.gap * self._sub_blocks - load.skipped) :])
            nbytes = ended.pairs * self._block_bytes
            results.append(TransferResult(job_id, not ended.failed, nbytes, ended.copy_s))
        return results

    def cancel(self, job_ids: Collection[int]) -> None:
        """Return when nothing of these jobs is copied any more, nor will be: what came is kept."""
        self._streams.cancel([load.stream for job_id, load in self.open.items() if job_id in job_ids])

    def drain(self) -> None:
        """Cancel all that is open."""
        self.cancel(self.open)

    def stop(self) -> bool:
        """Cancel all, for good; False if a copy hangs, so that this takes longer than some seconds. May be called
        twice."""
        return self._streams.close()
