"""Which copy strategy a transfer takes: measured once for a GPU, driver, link and geometry, and cached on disk.

Figures of other machines do not carry over: the best strategy depends on the link, the host's memory, the size of a
layer's page and the number of blocks. So every strategy copies the same blocks between the real region and scratch
memory on the GPU, its bytes are checked, and it is timed; the region's rows are restored at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.swap.device_tables import DeviceTables
from nixl_tiers.swap.driver import CudaError, Device
from nixl_tiers.swap.kernels import Kernels, cache_folder, source_digest, write_whole
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.plan import CopyPlan, Memory, Segment
from nixl_tiers.swap.strategies import NAMES
from nixl_tiers.swap.stream import Choice, CopyStream, Events

log = logging.getLogger(__name__)

ENVIRONMENT: Final = "NIXL_TIERS_SWAP"  # auto, measure (ignore the cached measurement), or one of strategies.NAMES
SAMPLE_BYTES: Final = 32 << 20
MIN_BLOCKS: Final = 16
MAX_BLOCKS: Final = 1024
ROUNDS: Final = 5
COPY_ENGINE_BYTES: Final = 128 << 10  # pages of this size: others saw the copy engine alone fill a PCIe 5 link
_VERSION: Final = 1
_OLD_NAMES: Final = {"engine": "copy_engine"}
# What a strategy costs besides time: multiprocessors that compute cannot use meanwhile.
_PENALTY: Final = {"copy_engine": 1.0, "staged": 1.02, "ring2": 1.04, "ring4": 1.06, "ring8": 1.10}


class WrongBytes(RuntimeError):
    """A copy strategy delivered other bytes than it was given."""


@dataclass(frozen=True)
class Measured:
    """Strategies by "store" and "load", group and number of blocks: the least cost wins.

    seconds   direction -> group -> blocks -> strategy -> seconds
    """

    seconds: dict[str, list[dict[str, dict[str, float]]]]

    def __call__(self, to_host: bool, group: int, blocks: int) -> str:
        sizes = sorted(self.seconds["store" if to_host else "load"][group].items(), key=lambda item: int(item[0]))
        # Between two measured sizes lies their geometric mean: a transfer takes the strategy of the nearer one.
        index = sum(blocks**2 > int(a) * int(b) for (a, _), (b, _) in pairwise(sizes))
        return best(sizes[index][1])


def best(seconds: dict[str, float]) -> str:
    """The strategy that costs least: time, and a little for the multiprocessors it takes."""
    return min(seconds, key=lambda name: seconds[name] * _PENALTY[name])


@dataclass(frozen=True)
class Fixed:
    """One strategy for each group, whatever the transfer."""

    names: tuple[str, ...]

    def __call__(self, to_host: bool, group: int, blocks: int) -> str:
        return self.names[group]


def guess(plan: CopyPlan, kernels: Kernels | None) -> Fixed:
    """By the size of pages alone, where nothing can be measured."""
    pages = [min((segment.nbytes for segment in group.segments), default=COPY_ENGINE_BYTES) for group in plan.groups]
    return Fixed(tuple("staged" if kernels and nbytes < COPY_ENGINE_BYTES else "copy_engine" for nbytes in pages))


def choose(
    device: Device, plan: CopyPlan, pinned: PinnedRegion, kernels: Kernels | None, folder: Path | None = None
) -> Choice:
    """The strategy that the environment sets, else as measured before, else measured now and cached in `folder`.

    Raises ValueError if the environment names no strategy; WrongBytes if even the copy engine delivers wrong bytes.
    """
    wanted = os.environ.get(ENVIRONMENT, "auto")
    wanted = _OLD_NAMES.get(wanted, wanted)
    if wanted in NAMES:
        return Fixed((wanted,) * len(plan.groups))
    if wanted not in {"auto", "measure"}:
        raise ValueError(f"{ENVIRONMENT} is {wanted!r}; it can be auto, measure, {', '.join(NAMES)}")
    if not pinned.complete:
        return guess(plan, kernels)
    about = identity(device, plan, kernels)
    folder = folder or cache_folder()
    cached = folder and folder / f"choice-{_digest(about)}.json"
    measured = read(cached) if cached and wanted != "measure" else None
    if measured is None or not _fits(measured, plan):
        try:
            measured = measure(device, plan, pinned, kernels)
        except CudaError as error:  # most likely the engine has taken all memory but a little
            log.warning("nixl_tiers: the copy strategies could not be measured, and are chosen by size: %s", error)
            return guess(plan, kernels)
        if cached:
            with contextlib.suppress(OSError):
                write_whole(cached, json.dumps({"about": about, "seconds": measured.seconds}, indent=1).encode())
    log.info("nixl_tiers: copy strategies: %s", "; ".join(lines(measured)))
    return measured


def read(cached: Path) -> Measured | None:
    """An earlier measurement, or None if there is none that can be read."""
    try:
        return Measured(json.loads(cached.read_bytes())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _fits(measured: Measured, plan: CopyPlan) -> bool:
    try:
        directions = measured.seconds["store"], measured.seconds["load"]
        return all(len(groups) == len(plan.groups) and all(groups) for groups in directions) and all(
            int(blocks) > 0 and best(seconds) in NAMES
            for groups in directions
            for sizes in groups
            for blocks, seconds in sizes.items()
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return False


def lines(measured: Measured) -> Iterator[str]:
    """The measurement in words: one line for each direction, group and number of blocks."""
    for direction, groups in measured.seconds.items():
        for group, sizes in enumerate(groups):
            for blocks, seconds in sizes.items():
                times = ", ".join(
                    f"{name} {1e6 * seconds[name]:.0f} us" for name in sorted(seconds, key=seconds.__getitem__)
                )
                yield f"{direction}, group {group}, {blocks} blocks: {best(seconds)} ({times})"


def identity(device: Device, plan: CopyPlan, kernels: Kernels | None) -> dict[str, Any]:
    """What a measurement depends on: another GPU, driver, link, kernel or geometry is measured again."""
    driver, geometry = device.driver, plan.geometry
    address = driver.pci_address(device.ordinal)
    return {
        "version": _VERSION,
        "gpu": driver.device_name(device.ordinal),
        "driver": driver.version,
        "link": [_sysfs(address, name) for name in ("max_link_speed", "max_link_width", "numa_node")],
        "kernels": source_digest() if kernels else None,
        "row": [geometry.row_bytes, geometry.sub_block_bytes, geometry.sub_blocks],
        "groups": [
            [[s.nbytes, s.block_stride, s.offset, s.address % 256] for s in group.segments] for group in plan.groups
        ],
    }


def measure(device: Device, plan: CopyPlan, pinned: PinnedRegion, kernels: Kernels | None) -> Measured:
    """Copy blocks of every group between the region and scratch memory, with every strategy, a few
    and many at a time.

    Raises WrongBytes or CudaError if not even the copy engine copies them; others that fail are logged and left out.
    """
    seconds: dict[str, list[dict[str, dict[str, float]]]] = {"store": [], "load": []}
    known: dict[str, int] = {}  # identical groups are measured once
    about = identity(device, plan, kernels)["groups"]
    for group in range(len(plan.groups)):
        same = known.setdefault(json.dumps([segment[:3] for segment in about[group]]), group)
        if same != group:
            for sized in seconds.values():
                sized.append(sized[same])
            continue
        with _Trial(device, plan, pinned, kernels, group) as trial:
            sizes = trial.sizes()
            for sized in seconds.values():
                sized.append({str(blocks): {} for blocks in sizes})
            for name in NAMES:
                try:
                    taken = trial.measure(name, sizes)
                except (CudaError, WrongBytes) as error:
                    if name == "copy_engine":
                        raise
                    log.warning("nixl_tiers: the copy strategy %s is not used: %s", name, error)
                    continue
                for direction, blocks, time_s in taken:
                    seconds[direction][group][str(blocks)][name] = time_s
    return Measured(seconds)


class _Trial:
    """One group's blocks in scratch memory, as far apart as the real ones modulo 256, and copy streams to and
    from the region.

    The content of the sample's places is saved at the beginning and restored at the end.
    """

    def __init__(
        self, device: Device, plan: CopyPlan, pinned: PinnedRegion, kernels: Kernels | None, group: int
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._rng = np.random.default_rng(0)
        places = plan.rows * plan.geometry.sub_blocks
        block_bytes = max(1, plan.groups[group].block_bytes)
        self._blocks = max(1, min(places, MAX_BLOCKS, max(MIN_BLOCKS, SAMPLE_BYTES // block_bytes)))
        with ExitStack() as undo:
            self._plan, self._scratch, self._nbytes = self._scratch_plan(plan, group, undo)
            self._pairs = self._plan.pairs(0, self._rng.permutation(self._blocks), self._sample_places(places))
            self._region = np.asarray(Memory(plan.region_address, (plan.rows * plan.geometry.row_bytes,), (1,)))
            self._cells = self._plan.place_offsets(self._pairs[:, 1])
            self._saved = self._cells_now()
            self._random_scratch = self._rng.integers(0, 256, self._nbytes, dtype=np.uint8)
            self._random_rows = self._rng.integers(0, 256, self._saved.shape, dtype=np.uint8)
            undo.callback(self._restore)
            tables = DeviceTables(device, self._plan)
            undo.callback(tables.close)
            self._events = Events(device)
            undo.callback(self._events.close)
            self._streams = {}
            for to_host in (True, False):
                stream = CopyStream(device, tables, pinned, kernels, self._events, to_host=to_host)
                undo.callback(stream.close)
                self._streams[to_host] = stream
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def sizes(self) -> list[int]:
        """Numbers of blocks to measure with."""
        return sorted({min(MIN_BLOCKS, self._blocks), self._blocks})

    def measure(self, name: str, sizes: list[int]) -> list[tuple[str, int, float]]:
        """(direction, blocks, seconds) of one strategy, its bytes checked first; none if the copy engine replaces it.

        The seconds are the best of a few rounds.
        """
        taken = []
        for to_host, direction in ((True, "store"), (False, "load")):
            stream = self._streams[to_host]
            with self._device.current():
                if name != "copy_engine" and stream.strategy(name, 0) is stream.strategy("copy_engine", 0):
                    continue
            self._check(name, to_host=to_host)
            for blocks in sizes:
                rounds = [stream.start(name, 0, self._pairs[:blocks], 0).elapsed_s() for _ in range(ROUNDS)]
                taken.append((direction, blocks, min(rounds)))
        return taken

    def _check(self, name: str, *, to_host: bool) -> None:
        """Copy all blocks and compare all bytes of both sides. Raises WrongBytes."""
        scratch, rows = self._random_scratch.copy(), self._random_rows.copy()
        for cell, row in zip(self._cells.tolist(), rows, strict=True):
            self._region[cell : cell + len(row)] = row
        with self._device.current() as driver:
            driver.upload(self._scratch, scratch)
        pairs = self._pairs
        self._streams[to_host].start(name, 0, pairs, 0).wait()
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

    def _sample_places(self, places: int) -> NDArray[np.int64]:
        """Whole rows in random order, each from its beginning, as chunks are stored and loaded."""
        sub_blocks = self._plan.geometry.sub_blocks
        rows = self._rng.permutation(places // sub_blocks)[: -(-self._blocks // sub_blocks)]
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
        return CopyPlan([segments], plan.geometry, plan.cell, plan.region_address, plan.rows), address, nbytes

    def _free(self, address: int) -> None:
        with contextlib.suppress(CudaError), self._device.current() as driver:
            driver.free(address)


def _pages(scratch: NDArray[np.uint8], segment: Segment, base: int, blocks: int) -> NDArray[np.uint8]:
    first = segment.address - base
    view: NDArray[np.uint8] = np.lib.stride_tricks.as_strided(
        scratch[first:], (blocks, segment.nbytes), (segment.block_stride, 1)
    )
    return view


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _sysfs(pci_address: str, name: str) -> str:
    with contextlib.suppress(OSError):
        return (Path("/sys/bus/pci/devices") / pci_address / name).read_text().strip()
    return ""
