"""One native thread that submits transfers (csrc/swap_submit.c), so that the engine's step thread only queues them.

A Python thread will not do: it would wait for the interpreter's lock between any two parts of a transfer.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base import native
from nixl_tiers.swap.driver import CudaError, Device, Driver
from nixl_tiers.swap.kernels import CAPACITIES
from nixl_tiers.swap.plan import CopyPlan, GroupPlan
from nixl_tiers.swap.step import Pairs

SLOTS: Final = 3  # of the staging buffer; as many parts of transfers are on the GPU's streams at most
COPY_ENGINE, STAGED = range(2)
_QUEUED, _FAILED = 0, 2

_P, _U64, _U32, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
_DRIVER_CALLS: Final = (
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuMemcpyAsync",
    "cuLaunchKernel",
)


class _Rows(ctypes.Structure):
    _fields_ = tuple((name, _U64) for name in ("region", "row_bytes", "cell_offset", "sub_block_bytes", "sub_blocks"))


class _Group(ctypes.Structure):
    _fields_ = (
        ("segments", _P), ("gaps", _P), ("n_segments", _U64), ("n_gaps", _U64),
        ("parts", _U64), ("first_part", _U64), ("n_parts", _U32), ("n_tiles", _U32),
    )  # fmt: skip


class _Setup(ctypes.Structure):
    _fields_ = (
        ("driver", _P * (len(_DRIVER_CALLS) + 1)), ("context", _P), ("work", _P), ("copies", _P), ("tail", _P),
        ("free", _P * SLOTS), ("full", _P * SLOTS), ("rows", _Rows), ("groups", _P),
        ("staging", _U64), ("slot_pairs", _U64), ("zeros", _U64),
        ("stage", _P * len(CAPACITIES)), ("capacities", _U32 * len(CAPACITIES)),
        ("stage_blocks", _U32), ("to_host", _U32),
    )  # fmt: skip


class _Request(ctypes.Structure):
    _fields_ = (
        ("next", _P), ("pairs", _P), ("n_pairs", _U64), ("computed", _P), ("begin", _P), ("end", _P),
        ("group", _U32), ("strategy", _U32), ("state", _INT), ("code", _INT),
        ("call", ctypes.c_char_p),
    )  # fmt: skip


@cache
def _library() -> ctypes.CDLL:
    return _open(native.SWAP_SUBMIT)


def _open(library: native.Library) -> ctypes.CDLL:
    found = native.opened(library)
    found.nixl_tiers_submit_sizes.restype = ctypes.c_size_t
    for which, structure in enumerate((_Setup, _Request, _Group)):
        assert found.nixl_tiers_submit_sizes(which) == ctypes.sizeof(structure), structure.__name__
    found.nixl_tiers_submit_open.restype = _P
    found.nixl_tiers_submit_open.argtypes = [_P]
    found.nixl_tiers_submit_record.argtypes = [_P, _P, _P, ctypes.POINTER(ctypes.c_char_p)]
    found.nixl_tiers_submit_put.argtypes = [_P, _P]
    found.nixl_tiers_submit_put.restype = None
    found.nixl_tiers_submit_ended.argtypes = [_P, _P]
    found.nixl_tiers_submit_ended.restype = ctypes.c_double
    found.nixl_tiers_submit_wait.argtypes = [_P, _P]
    found.nixl_tiers_submit_state.argtypes = [_P]
    found.nixl_tiers_submit_drain.argtypes = [_P]
    found.nixl_tiers_submit_close.argtypes = [_P]
    found.nixl_tiers_submit_drain.restype = None
    found.nixl_tiers_submit_close.restype = None
    return found


class Request:
    """A transfer that the thread submits, or has submitted."""

    def __init__(
        self,
        pairs: Pairs,
        group: int,
        strategy: int,
        events: tuple[int, int, int],
    ) -> None:
        """`events`: one behind the compute to wait for; to record when it begins, and when it has ended."""
        self._pairs = pairs
        computed, begin, end = events
        self.raw = _Request(
            pairs=pairs.address,
            n_pairs=pairs.number,
            computed=computed,
            begin=begin,
            end=end,
            group=group,
            strategy=strategy,
        )


class Submitter:
    """The thread of one direction. `close` it before what it works with is freed."""

    def __init__(
        self,
        tables: DeviceTables,
        driver: Driver,
        context: int,
        *,
        streams: tuple[int, int],
        tail: int,
        slots: tuple[Sequence[int], Sequence[int]],
        staging: int,
        slot_pairs: int,
        stage: Sequence[int],
        stage_blocks: int,
        batch: bool,
        to_host: bool,
    ) -> None:
        """`streams`: of kernels and of copies. `slots`: the events `free` and `full` of each. `staging`: SLOTS times
        `slot_pairs` sub-blocks. `stage`: the kernel, by capacity. `batch`: whether copies
        may go in batches. Raises NotBuilt, OSError."""
        self._library = _library()
        plan = tables.plan
        self._arrays: list[NDArray[np.uint64]] = []
        groups = (_Group * len(plan.groups))(*map(self._group, plan.groups, tables.groups))
        calls = [driver.address(name) for name in _DRIVER_CALLS] + [driver.batch_address() if batch else None]
        setup = _Setup(
            driver=(_P * len(calls))(*calls),
            context=context,
            work=streams[0],
            copies=streams[1],
            tail=tail,
            free=(_P * SLOTS)(*slots[0]),
            full=(_P * SLOTS)(*slots[1]),
            rows=_Rows(*plan.row_layout),
            groups=ctypes.addressof(groups),
            staging=staging,
            slot_pairs=slot_pairs,
            zeros=tables.zeros,
            stage=(_P * len(CAPACITIES))(*stage),
            capacities=(_U32 * len(CAPACITIES))(*CAPACITIES),
            stage_blocks=stage_blocks,
            to_host=to_host,
        )
        self._keep = groups
        self._driver = driver
        self._thread = self._library.nixl_tiers_submit_open(ctypes.byref(setup))
        if not self._thread:
            raise OSError("no thread could be started to submit copies to the GPU")

    def _group(self, group: GroupPlan, table: GroupTable) -> _Group:
        segments, gaps = group.segment_table(), group.gap_table()
        self._arrays += [segments, gaps]
        return _Group(
            segments.ctypes.data,
            gaps.ctypes.data,
            len(segments),
            len(gaps),
            table.parts,
            table.first_part,
            table.n_parts,
            table.n_tiles,
        )

    def record(self, event: int, compute_stream: int) -> None:
        """Record an event behind what `compute_stream` has to do so far. Waits for nothing. CudaError, or RuntimeError
        after `close`."""
        if not self._thread:
            raise RuntimeError("this swap is closed")
        call = ctypes.c_char_p()
        code = self._library.nixl_tiers_submit_record(self._thread, event, compute_stream, ctypes.byref(call))
        if code:
            raise self._driver.error((call.value or b"").decode(), code)

    def put(self, request: Request) -> None:
        """Queue a request behind its event; it must be kept until it is not queued any more. Waits for nothing.
        RuntimeError after `close`."""
        if not self._thread:
            raise RuntimeError("this swap is closed")
        self._library.nixl_tiers_submit_put(self._thread, ctypes.byref(request.raw))

    def ended_s(self, request: Request) -> float | None:
        """How long it took on the GPU, once all of it has arrived; None until then. Waits for nothing. Raises CudaError
        if it never will arrive. After `close` nothing is known of it any more: 0."""
        if not self._thread:
            return 0.0
        milliseconds: float = self._library.nixl_tiers_submit_ended(self._thread, ctypes.byref(request.raw))
        if milliseconds == -2:
            raw: Any = request.raw
            raise self._driver.error(raw.call.decode(), raw.code)
        return None if milliseconds < 0 else milliseconds / 1e3

    def queued(self, request: Request) -> bool:
        """Whether the thread has still to submit some of it."""
        return bool(self._library.nixl_tiers_submit_state(ctypes.byref(request.raw)) == _QUEUED)

    def wait(self, request: Request) -> None:
        """Return when it is submitted, which can be long before its end. Raises CudaError if that failed; nothing of it
        is in flight then. After `close` nothing is waited for."""
        if self.queued(request):
            self._library.nixl_tiers_submit_wait(self._thread, ctypes.byref(request.raw))
        raw: Any = request.raw
        if raw.state == _FAILED:
            raise self._driver.error(raw.call.decode(), raw.code)

    def drain(self) -> None:
        """Return when everything that was queued is submitted; at once after `close`."""
        if self._thread:
            self._library.nixl_tiers_submit_drain(self._thread)

    def close(self) -> None:
        """End the thread after what is queued. May be called twice; no other call may run meanwhile."""
        if self._thread:
            self._library.nixl_tiers_submit_close(self._thread)
            self._thread = None


TILE_BYTES: Final = 2048  # SWAP_TILE of swap.h


def parts_of(group: GroupPlan) -> NDArray[np.uint64]:
    """(n, 4) rows of swap_segment: segments and gaps (address 0) by offset, covering a sub-block exactly."""
    parts = [segment[:4] for segment in group.segments]
    parts += [(0, 0, gap.nbytes, gap.offset) for gap in group.gaps]
    return np.array(sorted(parts, key=lambda part: part[3]), dtype=np.uint64).reshape(-1, 4)


def first_parts(parts: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """(tiles,) the first part that reaches into each tile of a sub-block."""
    ends = parts[:, 2] + parts[:, 3]
    begins = np.arange(0, int(ends[-1]), TILE_BYTES, dtype=np.uint64)
    return np.searchsorted(ends, begins, side="right").astype(np.uint32)


@dataclass(frozen=True)
class GroupTable:
    """One group's addresses on the GPU."""

    parts: int
    first_part: int
    n_parts: int
    n_tiles: int


class DeviceTables:
    """The tables of every group, and as many zero bytes as the largest gap has. `close` frees them."""

    def __init__(self, device: Device, plan: CopyPlan) -> None:
        self.plan = plan
        self._device = device
        self._allocations: list[int] = []
        try:
            self.groups = [self._upload_group(group) for group in plan.groups]
            gaps = [gap.nbytes for group in plan.groups for gap in group.gaps]
            self.zeros = self._upload(np.zeros(max(gaps), np.uint8)) if gaps else 0
        except CudaError:
            self.close()
            raise

    def _upload_group(self, group: GroupPlan) -> GroupTable:
        parts = parts_of(group)
        first = first_parts(parts)
        return GroupTable(self._upload(parts), self._upload(first), len(parts), len(first))

    def _upload(self, data: NDArray[np.generic]) -> int:
        with self._device.current() as driver:
            address = driver.allocate(data.nbytes)
            self._allocations.append(address)
            driver.upload(address, data)
        return address

    def close(self) -> None:
        """Free the GPU's memory. May be called twice."""
        with contextlib.suppress(CudaError), self._device.current() as driver:
            while self._allocations:
                with contextlib.suppress(CudaError):
                    driver.free(self._allocations.pop())
