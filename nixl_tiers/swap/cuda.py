"""The swap where vLLM's blocks are GPU memory.

Order: a store reads blocks that were just computed, and a load overwrites blocks that earlier compute may still read;
both begin behind all work that the compute stream had when they were submitted. The compute stream never waits for a
transfer: the owner of the blocks frees or reads them only after `Transfer.wait`, or orders a stream behind the transfer
with `Transfer.hold`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import ExitStack

from numpy.typing import ArrayLike

from nixl_tiers.swap import kernels as images
from nixl_tiers.swap.autotune import MAX_BLOCKS, choose
from nixl_tiers.swap.device_tables import DeviceTables
from nixl_tiers.swap.driver import CudaError, Device, Driver, open_driver
from nixl_tiers.swap.kernels import Kernels
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.stream import Choice, CopyStream, Events, Transfer


class CudaSwap:
    """Copies blocks of one group between GPU memory and this rank's cell of the region's rows, without waiting.

    Stores have a low-priority stream and loads a high-priority one, each in the order of the calls; between the two
    there is no order. Any thread may call. `close` before the region is unmapped.
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
        """`device`: the GPU's ordinal. `compute_stream`: vLLM's current stream; None asks torch. `choice`: which
        strategy a transfer takes; None measures (autotune.choose). Raises NoDriver, CudaError."""
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
            self._stores = CopyStream(*parts, to_host=True)
            undo.callback(self._stores.close)
            self._loads = CopyStream(*parts, to_host=False)
            undo.callback(self._loads.close)
            self._choice: Choice = choice or choose(self._device, plan, self._pinned, self.kernels)
            self._prepare()
            self._undo = undo.pop_all()

    def _prepare(self) -> None:
        """Create the strategies that will be used now: to allocate memory later would delay a step."""
        with self._device.current():
            for to_host, stream in ((True, self._stores), (False, self._loads)):
                for group in range(len(self.plan.groups)):
                    for blocks in (1, MAX_BLOCKS):
                        stream.strategy(self._choice(to_host, group, blocks), group)

    @property
    def pinned(self) -> bool:
        """Whether the region is page-locked; if not, copies are correct and slow."""
        return self._pinned.complete

    def store(self, group: int, blocks: ArrayLike, places: ArrayLike) -> Transfer:
        """GPU -> region: blocks[i] to places[i]; what the group does not cover of a sub-block becomes zero.

        ValueError where one is out of range, before a byte has moved. CudaError where the copy could not be started, or
        not all of it; nothing of it is in flight then, and the places hold anything."""
        return self._start(self._stores, group, blocks, places, to_host=True)

    def load(self, group: int, blocks: ArrayLike, places: ArrayLike) -> Transfer:
        """Region -> GPU: places[i] to blocks[i]. Errors as for store."""
        return self._start(self._loads, group, blocks, places, to_host=False)

    def _start(
        self, stream: CopyStream, group: int, blocks: ArrayLike, places: ArrayLike, *, to_host: bool
    ) -> Transfer:
        pairs = self.plan.pairs(group, blocks, places)
        return stream.start(self._choice(to_host, group, len(pairs)), group, pairs, self._compute_stream())

    def close(self) -> None:
        """Wait for everything in flight, unlock the region's pages and free the rest. May be called twice."""
        with self._closing:
            self._undo.close()

    def _unload(self, kernels: Kernels) -> None:
        with contextlib.suppress(CudaError), self._device.current() as driver:
            driver.unload_module(kernels.module)


def _torch_stream(device: int) -> Callable[[], int]:
    import torch

    return lambda: int(torch.cuda.current_stream(device).cuda_stream)
