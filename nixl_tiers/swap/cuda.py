"""The swap where engine blocks are GPU memory.

What it promises about order. A store reads blocks that were just computed, and a load overwrites blocks that earlier
compute may still read: both begin behind everything that the compute stream had been given when they were asked for.
The other way round nothing is said to the compute stream, whose next step must not wait for the bus: who owns the
blocks gives them away, or reads them, only after `Transfer.wait`, or orders a stream behind it with `Transfer.hold`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import ExitStack

from numpy.typing import ArrayLike

from nixl_tiers.swap import kernels as images
from nixl_tiers.swap.autotune import MOST_BLOCKS, choose
from nixl_tiers.swap.device_tables import DeviceTables
from nixl_tiers.swap.driver import CudaError, Device, Driver, open_driver
from nixl_tiers.swap.kernels import Kernels
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.stream import Choice, CopyStream, Events, Transfer


class CudaSwap:
    """Copies blocks of one group between GPU memory and this rank's cell of the region's rows, without waiting.

    Stores have a low-priority lane and loads a high-priority one, each in the order of the calls; between the two there
    is no order. Any thread may call. `close` before the region is unmapped.
    """

    def __init__(
        self,
        plan: CopyPlan,
        device: int = 0,
        compute_stream: Callable[[], int] | None = None,
        *,
        driver: Driver | None = None,
        choice: Choice | None = None,
    ) -> None:
        """`device`: the GPU's ordinal. `compute_stream`: the engine's current stream; None asks torch. `choice`: which
        way a transfer takes; None measures (calibrate.choose). Raises NoDriver, CudaError."""
        self.plan = plan
        self._compute_stream = compute_stream or _torch_stream(device)
        self._closing = threading.Lock()
        with ExitStack() as undo:
            self._device = Device(driver or open_driver(), device)
            undo.callback(self._device.close)
            self.kernels: Kernels | None = images.load(self._device)
            if self.kernels:
                undo.callback(self._unload, self.kernels)
            self._pinned = PinnedRegion(self._device, plan)
            undo.callback(self._pinned.release)
            self._tables = DeviceTables(self._device, plan)
            undo.callback(self._tables.close)
            events = Events(self._device)
            undo.callback(events.close)
            parts = (self._device, self._tables, self._pinned, self.kernels, events)
            self._out = CopyStream(*parts, to_host=True)
            undo.callback(self._out.close)
            self._in = CopyStream(*parts, to_host=False)
            undo.callback(self._in.close)
            self._choice: Choice = choice or choose(self._device, plan, self._pinned, self.kernels)
            self._prepare()
            self._undo = undo.pop_all()

    def _prepare(self) -> None:
        """Make the ways that will be taken now: to allocate memory later would hold up the engine."""
        with self._device.current():
            for to_host, lane in ((True, self._out), (False, self._in)):
                for group in range(len(self.plan.groups)):
                    for blocks in (1, MOST_BLOCKS):
                        lane.path(self._choice(to_host, group, blocks), group)

    @property
    def pinned(self) -> bool:
        """Whether the region is page-locked; if not, copies are correct and slow."""
        return self._pinned.complete

    def store(self, group: int, blocks: ArrayLike, places: ArrayLike) -> Transfer:
        """Engine -> region: blocks[i] to places[i]; what the group does not cover of a sub-block becomes zero.

        ValueError where one is out of range, before a byte has moved. CudaError where the copy could not be started, or
        not all of it; nothing of it is under way then, and the places hold anything."""
        return self._start(self._out, group, blocks, places, to_host=True)

    def load(self, group: int, blocks: ArrayLike, places: ArrayLike) -> Transfer:
        """Region -> engine: places[i] to blocks[i]. Errors as for store."""
        return self._start(self._in, group, blocks, places, to_host=False)

    def _start(self, lane: CopyStream, group: int, blocks: ArrayLike, places: ArrayLike, *, to_host: bool) -> Transfer:
        pairs = self.plan.pairs(group, blocks, places)
        return lane.start(self._choice(to_host, group, len(pairs)), group, pairs, self._compute_stream())

    def close(self) -> None:
        """Wait for everything under way, unlock the region's pages and free the rest. May be called twice."""
        with self._closing:
            self._undo.close()

    def _unload(self, kernels: Kernels) -> None:
        with contextlib.suppress(CudaError), self._device.current() as driver:
            driver.unload_module(kernels.module)


def _torch_stream(device: int) -> Callable[[], int]:
    import torch

    return lambda: int(torch.cuda.current_stream(device).cuda_stream)
