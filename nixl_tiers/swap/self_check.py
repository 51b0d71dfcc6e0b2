"""Which copy strategy a KV group takes, and whether that strategy moves the right bytes on this machine.

Before the first transfer the strategy copies blocks between the real region and scratch memory on the GPU, both ways,
and every byte is compared. The region's rows are restored at the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from contextlib import ExitStack
from copy import copy
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.swap.driver import CudaError, Device
from nixl_tiers.swap.kernels import Kernels
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.plan import CopyPlan, Memory, Segment
from nixl_tiers.swap.step import Pairs
from nixl_tiers.swap.strategies import BLACKWELL, NAMES
from nixl_tiers.swap.stream import CopyStream, Events
from nixl_tiers.swap.submit import DeviceTables

log = logging.getLogger(__name__)

ENVIRONMENT: Final = "NIXL_TIERS_SWAP"  # auto, or one of strategies.NAMES
SAMPLE_BYTES: Final = 32 << 20
MIN_BLOCKS: Final = 16
MAX_BLOCKS: Final = 1024
COPY_ENGINE_BYTES: Final = 512 << 10  # from pages of this size on, the copy engine alone is as fast (bench/gpu_swap.py)


class WrongBytes(RuntimeError):
    """A copy strategy delivered other bytes than it was given."""


def choose(device: Device, plan: CopyPlan, pinned: PinnedRegion, kernels: Kernels | None, rows: int) -> tuple[str, ...]:
    """The strategy of each group: what the environment sets, else by GPU and page size; checked with some of the first
    `rows`.

    Raises ValueError if the environment names no strategy; WrongBytes if even the copy engine delivers wrong bytes.
    """
    wanted = os.environ.get(ENVIRONMENT, "auto")
    if wanted not in {"auto", *NAMES}:
        raise ValueError(f"{ENVIRONMENT} is {wanted!r}; it can be auto, {', '.join(NAMES)}")
    tried = copy(plan)
    tried.rows = rows
    by_default = _default(device, plan, kernels)
    names = by_default if wanted == "auto" else (wanted,) * len(by_default)
    checked: dict[tuple[object, ...], str] = {}  # identical groups once
    found = []
    for group, name in enumerate(names):
        layout = tuple((s.nbytes, s.block_stride, s.offset, s.address % 256) for s in plan.groups[group].segments)
        if layout not in checked:
            checked[layout] = _checked(device, tried, pinned, kernels, group=group, name=name)
        found.append(checked[layout])
    return tuple(found)


def _default(device: Device, plan: CopyPlan, kernels: Kernels | None) -> tuple[str, ...]:
    pages = [min((segment.nbytes for segment in group.segments), default=COPY_ENGINE_BYTES) for group in plan.groups]
    # There the copy engine would get a call per layer and block: see may_batch.
    most = COPY_ENGINE_BYTES if device.capability < BLACKWELL else sys.maxsize
    return tuple("staged" if kernels and nbytes < most else "copy_engine" for nbytes in pages)


def _checked(
    device: Device, plan: CopyPlan, pinned: PinnedRegion, kernels: Kernels | None, *, group: int, name: str
) -> str:
    """`name`, or the copy engine where that one is not to be had or delivers wrong bytes."""
    rows = np.arange(plan.rows)
    if not len(rows[plan.share.writes(rows)]):  # fewer rows than ranks that share a cell: none is this rank's to try
        return "copy_engine"
    try:
        with _Trial(device, plan, pinned, kernels, group) as trial:
            for to_host in (True, False):
                if not trial.streams[to_host].supports(name):
                    return "copy_engine"
                trial.check(name, to_host=to_host)
    except WrongBytes as error:
        if name == "copy_engine":
            raise
        log.warning("nixl_tiers: the copy strategy %s is not used: %s", name, error)
        return _checked(device, plan, pinned, kernels, group=group, name="copy_engine")
    except CudaError as error:  # most likely the engine has taken all memory but a little
        log.warning(
            "nixl_tiers: the copy strategy %s could not be checked, the copy engine replaces it: %s", name, error
        )
        return "copy_engine"
    return name


class _Trial:
    """One group's blocks in scratch memory, as far apart as the real ones modulo 256, and copy streams to and
    from the region.

    The content of the sample's places is saved at the beginning and restored at the end.
    """

    def __init__(
        self, device: Device, plan: CopyPlan, pinned: PinnedRegion, kernels: Kernels | None, group: int
    ) -> None:
        self._device = device
        self._rng = np.random.default_rng(0)
        rows = np.arange(plan.rows)
        rows = rows[plan.share.writes(rows)]  # other ranks may be trying theirs
        block_bytes = max(1, plan.groups[group].block_bytes)
        places = len(rows) * plan.geometry.sub_blocks
        self._blocks = max(1, min(places, MAX_BLOCKS, max(MIN_BLOCKS, SAMPLE_BYTES // block_bytes)))
        with ExitStack() as undo:
            self._plan, self._scratch, self._nbytes = self._scratch_plan(plan, group, undo)
            self._pairs = self._plan.pairs(0, self._rng.permutation(self._blocks), self._sample_places(rows))
            self._region = np.asarray(Memory(plan.region_address, (plan.rows * plan.geometry.row_bytes,), (1,)))
            self._cells = self._plan.place_offsets(self._pairs[:, 1])
            self._saved = self._cells_now()
            self._random_scratch = self._rng.integers(0, 256, self._nbytes, dtype=np.uint8)
            self._random_rows = self._rng.integers(0, 256, self._saved.shape, dtype=np.uint8)
            undo.callback(self._restore)
            tables = DeviceTables(device, self._plan)
            undo.callback(tables.close)
            events = Events(device)
            undo.callback(events.close)
            self.streams = {}
            for to_host in (True, False):
                stream = CopyStream(device, tables, pinned, kernels, events, staged=True, to_host=to_host)
                undo.callback(stream.close)
                self.streams[to_host] = stream
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def check(self, name: str, *, to_host: bool) -> None:
        """Copy all blocks and compare all bytes of both sides. Raises WrongBytes."""
        scratch, rows = self._random_scratch.copy(), self._random_rows.copy()
        for cell, row in zip(self._cells.tolist(), rows, strict=True):
            self._region[cell : cell + len(row)] = row
        with self._device.current() as driver:
            driver.upload(self._scratch, scratch)
        pairs = self._pairs
        self.streams[to_host].start(name, 0, Pairs.of(pairs), 0).wait()
        for segment in self._plan.groups[0].segments:
            pages = _pages(scratch, segment, self._scratch, self._blocks)
            part = slice(segment.offset, segment.offset + segment.nbytes)
            if to_host:
                rows[:, part] = pages[pairs[:, 0]]
            else:
                pages[pairs[:, 0]] = rows[:, part]
        if to_host:
            for gap in self._plan.groups[0].gaps:
                rows[:, gap.offset : gap.offset + gap.nbytes] = 0
        found = np.empty_like(scratch)
        with self._device.current() as driver:
            driver.download(self._scratch, found)
        if not (np.array_equal(found, scratch) and np.array_equal(self._cells_now(), rows)):
            direction = "stores" if to_host else "loads"
            raise WrongBytes(f"{direction} of {self._blocks} blocks by {name} moved wrong bytes")

    def _cells_now(self) -> NDArray[np.uint8]:
        size = self._plan.geometry.sub_block_bytes
        return np.stack([self._region[cell : cell + size] for cell in self._cells.tolist()])

    def _restore(self) -> None:
        for cell, row in zip(self._cells.tolist(), self._saved, strict=True):
            self._region[cell : cell + len(row)] = row

    def _sample_places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Whole rows in random order, each from its beginning, as chunks are stored and loaded."""
        sub_blocks = self._plan.geometry.sub_blocks
        rows = self._rng.permutation(rows)[: -(-self._blocks // sub_blocks)]
        ordered: NDArray[np.int64] = (rows[:, None] * sub_blocks + np.arange(sub_blocks)).reshape(-1)
        return ordered[: self._blocks]

    def _scratch_plan(self, plan: CopyPlan, group: int, undo: ExitStack) -> tuple[CopyPlan, int, int]:
        segments, end = [], 0
        for real in plan.groups[group].segments:
            padding = real.block_stride - real.nbytes
            stride = real.nbytes + (padding if padding < 256 else 256 + padding % 256)
            first = end + (real.address - end) % 256
            segments.append(Segment(first, stride, real.nbytes, real.offset, self._blocks))
            end = first + self._blocks * stride
        with self._device.current() as driver:
            nbytes = max(end, 1)
            address = driver.allocate(nbytes)
        undo.callback(self._free, address)
        segments = [segment._replace(address=segment.address + address) for segment in segments]
        return CopyPlan([segments], plan.geometry, plan.share, plan.region_address, plan.rows), address, nbytes

    def _free(self, address: int) -> None:
        with contextlib.suppress(CudaError), self._device.current() as driver:
            driver.free(address)


def _pages(scratch: NDArray[np.uint8], segment: Segment, base: int, blocks: int) -> NDArray[np.uint8]:
    first = segment.address - base
    view: NDArray[np.uint8] = np.lib.stride_tricks.as_strided(
        scratch[first:], (blocks, segment.nbytes), (segment.block_stride, 1)
    )
    return view
