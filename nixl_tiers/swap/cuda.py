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
from nixl_tiers.swap.driver import CudaError, Device, Driver, open_driver
from nixl_tiers.swap.kernels import Kernels
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.plan import CopyPlan
from nixl_tiers.swap.self_check import choose
from nixl_tiers.swap.step import Pairs
from nixl_tiers.swap.stream import CopyStream, Events, Transfer
from nixl_tiers.swap.submit import DeviceTables


class CudaSwap:
    """Copies blocks of one group between GPU memory and this rank's cell of the region's rows, without waiting: a call
    takes some 30 us whatever it moves.

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
        strategies: tuple[str, ...] | None = None,
        rows: int | None = None,
    ) -> None:
        """`device`: the GPU's ordinal. `compute_stream`: vLLM's current stream; None asks torch. `strategies`: of
        each group; None chooses and checks them (self_check.choose). `rows`: so many, from the first, are page-locked
        now, by default all; `lock` does others. Raises NoDriver, CudaError, NotBuilt."""
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
            self._pinned.lock_first(plan.rows if rows is None else rows)
            self._tables = DeviceTables(self._device, plan)
            undo.callback(self._tables.close)
            events = Events(self._device)
            undo.callback(events.close)
            parts = (self._device, self._tables, self._pinned, self.kernels, events)
            self._strategies = strategies or choose(self._device, plan, self._pinned, self.kernels, rows or plan.rows)
            staged = "staged" in self._strategies
            self._stores = CopyStream(*parts, staged=staged, to_host=True)
            undo.callback(self._stores.close)
            self._loads = CopyStream(*parts, staged=staged, to_host=False)
            undo.callback(self._loads.close)
            self._undo = undo.pop_all()

    @property
    def pinned(self) -> bool:
        """Whether the rows are page-locked; if not, copies are correct and slow."""
        return self._pinned.complete

    def lock(self, begin: int, end: int) -> bool:
        """Page-lock rows `begin` to `end`, of which none is used yet; whether they are."""
        return self._pinned.lock(begin, end)

    def store(self, group: int, blocks: ArrayLike, places: ArrayLike) -> Transfer:
        """GPU -> region: blocks[i] to places[i]; what the group does not cover of a sub-block becomes zero.

        ValueError where one is out of range, before a byte has moved. CudaError, from here or from the transfer, where
        the copy could not be started, or not all of it; nothing of it is in flight then, and the places hold
        anything."""
        return self.copy(group, Pairs.of(self.plan.pairs(group, blocks, places)), to_host=True)

    def load(self, group: int, blocks: ArrayLike, places: ArrayLike) -> Transfer:
        """Region -> GPU: places[i] to blocks[i]. Errors as for store."""
        return self.copy(group, Pairs.of(self.plan.pairs(group, blocks, places)), to_host=False)

    def copy(self, group: int, pairs: Pairs, *, to_host: bool) -> Transfer:
        """As store or load, of pairs that are checked."""
        stream = self._stores if to_host else self._loads
        return stream.start(self._strategies[group], group, pairs, self._compute_stream())

    def mark_loads(self) -> None:
        """Loads from now on, until `unmark_loads`, begin behind what vLLM's stream has to do now, and not behind what
        it is given until they are submitted. Raises CudaError."""
        self._loads.mark(self._compute_stream())

    def unmark_loads(self) -> None:
        """Loads begin behind what vLLM's stream has to do when they are submitted."""
        self._loads.unmark()

    def drain(self) -> None:
        """Return when nothing is queued or in flight: vLLM's memory may be unmapped."""
        self._stores.drain()
        self._loads.drain()

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
