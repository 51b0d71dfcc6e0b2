"""The region's rows page-locked, so that a GPU's copy engine and its threads may touch them without the CPU's help."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from nixl_tiers.base.chunk import PIECE_BYTES, pieces_of
from nixl_tiers.swap.driver import ALREADY_REGISTERED, CudaError, Device, Driver
from nixl_tiers.swap.plan import CopyPlan

log = logging.getLogger(__name__)


class PinnedRegion:
    """The plan's rows, page-locked piece by piece, in order.

    complete   whether all rows that may be used are page-locked, by this or by other code before: those that `lock` was
               asked for, up to the first that it could not
    """

    def __init__(self, device: Device, plan: CopyPlan) -> None:
        self.complete = False
        self._device = device
        self._plan = plan
        self._ours: list[int] = []
        self._guard = threading.Lock()
        self._released = False

    def lock_first(self, rows: int) -> None:
        """Page-lock the first `rows`, or none of them."""
        pieces = pieces_of(rows, self._plan.geometry.row_bytes, PIECE_BYTES)
        if not all(self.lock(*piece) for piece in pieces):
            self.release()

    def lock(self, begin: int, end: int) -> bool:
        """Page-lock rows `begin` to `end`; whether they are. A failure is logged, and nothing behind it is tried."""
        row_bytes = self._plan.geometry.row_bytes
        address, nbytes = self._plan.region_address + begin * row_bytes, (end - begin) * row_bytes
        with self._guard, contextlib.ExitStack() as stack:
            if self._released or (begin and not self.complete):
                return False
            try:
                driver = stack.enter_context(self._device.current())
                try:
                    driver.register(address, nbytes)
                    self._ours.append(address)
                except CudaError as error:
                    # Part of it is enough for that answer; a copy of a row that is locked in part would fail.
                    if error.code != ALREADY_REGISTERED or not _locked(driver, address, nbytes, row_bytes):
                        raise
            except CudaError as error:
                log.warning("nixl_tiers: %s", _advice(error, begin, end, self._plan))
                return False
            self.complete = True
            return True

    def release(self) -> None:
        """Unlock what was locked here. May be called twice."""
        with self._guard:
            self._released, self.complete = True, False
            with contextlib.suppress(CudaError), self._device.current() as driver:
                while self._ours:
                    with contextlib.suppress(CudaError):
                        driver.unregister(self._ours.pop())


def _locked(driver: Driver, address: int, nbytes: int, row_bytes: int) -> bool:
    """Whether each row's first and last byte are page-locked."""
    rows = range(address, address + nbytes, row_bytes)
    return all(driver.page_locked(row) and driver.page_locked(row + row_bytes - 1) for row in rows)


def _advice(error: CudaError, begin: int, end: int, plan: CopyPlan) -> str:
    # `ulimit -l` is not the reason: the driver takes its pages from the kernel itself, which does not ask for it.
    at, size, total = (rows * plan.geometry.row_bytes / 2**30 for rows in (begin, end - begin, plan.rows))
    effect = (
        f"the cpu tier ends there, with {begin} of {plan.rows} rows"
        if begin
        else "copies to and from the GPU will be slow"
    )
    return (
        f"the host region could not be page-locked ({error}, for {size:.1f} GiB at {at:.1f} of {total:.1f} GiB, Linux "
        f"{os.uname().release}), so that {effect}. Known causes: a memory limit of this process that does not hold the "
        "whole cpu tier; a kernel, from 6.11 on, that locks less at once than the driver asks for"
    )
