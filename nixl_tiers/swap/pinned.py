"""The region's rows page-locked, so that a GPU's copy engine and its threads may touch them without the CPU's help."""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from nixl_tiers.swap.driver import ALREADY_REGISTERED, CudaError, Device, Driver
from nixl_tiers.swap.plan import CopyPlan

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 16 << 30  # one registration of 512 GiB or more fails; and seconds pass within a call


class PinnedRegion:
    """The plan's rows, page-locked in chunks that end on row boundaries; all of them, or none.

    complete   whether they are page-locked, by this or by other code before
    """

    def __init__(self, device: Device, plan: CopyPlan, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._ours: list[int] = []
        row_bytes = plan.geometry.row_bytes
        total = plan.rows * row_bytes
        step = max(1, chunk_bytes // row_bytes) * row_bytes
        offset = 0
        with device.current() as driver:
            try:
                for offset in range(0, total, step):
                    address, nbytes = plan.region_address + offset, min(step, total - offset)
                    try:
                        driver.register(address, nbytes)
                        self._ours.append(address)
                    except CudaError as error:
                        # Part of it is enough for that answer; a copy of a row that is locked in part would fail.
                        if error.code != ALREADY_REGISTERED or not _locked(driver, address, nbytes, row_bytes):
                            raise
                self.complete = True
            except CudaError as error:
                log.warning("nixl_tiers: %s", _advice(error, offset, total))
                self.release()

    def release(self) -> None:
        """Unlock what was locked here. May be called twice."""
        self.complete = False
        with contextlib.suppress(CudaError), self._device.current() as driver:
            while self._ours:
                with contextlib.suppress(CudaError):
                    driver.unregister(self._ours.pop())


def _locked(driver: Driver, address: int, nbytes: int, row_bytes: int) -> bool:
    """Whether each row's first and last byte are page-locked."""
    rows = range(address, address + nbytes, row_bytes)
    return all(driver.page_locked(row) and driver.page_locked(row + row_bytes - 1) for row in rows)


def _advice(error: CudaError, offset: int, total: int) -> str:
    # `ulimit -l` is not the reason: the driver takes its pages from the kernel itself, which does not ask for it.
    return (
        f"the host region could not be page-locked ({error}, at {offset / 2**30:.1f} of {total / 2**30:.1f} GiB), so "
        "copies to and from the GPU will be slow: the memory limit of this process must hold the whole cpu tier, or "
        "shrink that tier"
    )
