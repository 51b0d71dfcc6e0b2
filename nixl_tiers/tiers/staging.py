"""Where a row's bytes lie while a file tier moves them: in the host region itself, or staged in a private buffer.

O_DIRECT pins every page of its target, and a region of scattered 4 KiB pages costs a disk request more segments than it
may have. A private buffer has huge pages nearly everywhere (MADV_HUGEPAGE). So rows are read into it at full speed, and
verified and copied into the region in one pass; on the way down they are sealed and copied in one pass.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import mmap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal, Self

import numpy as np

from nixl_tiers.base.zeroed import zeroed
from nixl_tiers.config.file import FileConfig
from nixl_tiers.memory.pages import HUGE_PAGE_BYTES, advice, mostly_huge, populate
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import Move, TierDown, seal_row
from nixl_tiers.tiers.move_queue import Steps
from nixl_tiers.tiers.nixl_agent import AgentError, Registrar, Registration

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

BUFFER_BYTES: Final = 40 << 20  # in each direction, where a tier asks for no more: what is moved, and one unit beside
LEAST_ROWS: Final = 2


class DirectRows:
    """The rows of one unit, which are moved straight between the region and the medium. A context manager: at its end
    no transfer of them runs."""

    staged: ClassVar[bool] = False

    def __init__(self, region: HostRegion) -> None:
        self._region = region

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    @property
    def stage(self) -> tuple[int, int]:
        """Address and number of rows of the buffer that they lie in, while they are staged; else zeroes."""
        return 0, 0

    @property
    def places(self) -> Sequence[int]:
        """Of the moves, in order, in that buffer."""
        return ()

    def address(self, move: Move) -> int:
        """Where the medium reads or writes this row."""
        return self._region.address + move.row * self._region.geometry.row_bytes

    def prepare(self, sealer: Sealer, move: Move, now_s: float) -> None:
        """Before a store: seal the region's row if that is asked for. `now_s`: Unix seconds."""
        if move.seal:
            seal_row(sealer, self._region, move, now_s)

    def loaded(self, move: Move) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
        """After a load: the row where the medium put it, and the region's row, if that is another."""
        return self._region.rows_view[move.row], None


class StagedRows(DirectRows):
    """The rows of one unit, each in a place of the buffer until the unit ends."""

    staged = True

    def __init__(self, region: HostRegion, buffer: Buffer, moves: Collection[Move]) -> None:
        """The buffer has `room` for them."""
        super().__init__(region)
        self._buffer = buffer
        self._taken = buffer.take(len(moves))
        self._places = dict(zip(moves, self._taken, strict=True))

    def __exit__(self, *_: object) -> None:
        self._buffer.give_back(self._taken)

    @property
    def stage(self) -> tuple[int, int]:
        return self._buffer.address, len(self._buffer.rows)

    @property
    def places(self) -> Sequence[int]:
        return self._taken

    def address(self, move: Move) -> int:
        return self._buffer.address + self._places[move] * self._region.geometry.row_bytes

    def prepare(self, sealer: Sealer, move: Move, now_s: float) -> None:
        place = self._buffer.rows[self._places[move]]
        if move.seal:
            seal_row(sealer, self._region, move, now_s, copy=place)
        else:
            place[:] = self._region.rows_view[move.row]

    def loaded(self, move: Move) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
        return self._buffer.rows[self._places[move]], self._region.rows_view[move.row]


class Buffer:
    """Room for rows of one direction in private huge pages. Lowest places first: what is never needed is never touched,
    and rows that lie one after the other in both places share a request."""

    def __init__(self, agent: Registrar, row_bytes: int, nbytes: int) -> None:
        """Raises AgentError, OSError."""
        count = max(-(-nbytes // row_bytes), LEAST_ROWS)
        size = count * row_bytes
        self._map = zeroed(size + HUGE_PAGE_BYTES)
        # A core file must not hold prompts; and before Linux 5.19 a fork while the disk writes here could leave a page
        # to the child.
        for flag in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(flag)
        whole = np.frombuffer(self._map, np.uint8)
        first = -int(whole.ctypes.data) % HUGE_PAGE_BYTES
        self.rows: NDArray[np.uint8] = whole[first : first + size].reshape(count, row_bytes)
        self.address = int(self.rows.ctypes.data)
        self._free = list(range(count))
        self._agent = agent
        self._memory: Registration | None = agent.register_dram(self.address, size)

    def populate(self) -> None:
        """Allocate its pages, so that the first rows need not wait until the kernel has zeroed them."""
        populate(self._map, 0, len(self._map))

    def room(self, rows: int) -> bool:
        return len(self._free) >= rows

    def take(self, rows: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(rows)]

    def give_back(self, places: Sequence[int]) -> None:
        for place in places:
            heapq.heappush(self._free, place)

    def close(self) -> None:
        if self._memory is not None:
            self._agent.deregister(self._memory)
            self._memory = None


class Direction:
    """The loads or the stores of a tier, with their buffer: they are staged where the region has small pages."""

    def __init__(
        self,
        name: Literal["loads", "stores"],
        config: FileConfig,
        region: HostRegion,
        agent: Registrar,
        buffer_bytes: int,
    ) -> None:
        """`region` and `agent` stay the caller's."""
        self._name = name
        self._buffer_bytes = buffer_bytes
        # cuFile moves only what is registered with it, and a region may have terabytes.
        self._always = config.backend == "gds_mt"
        self._region = region
        self._agent = agent
        self._buffer: Buffer | None = None
        self._advice = advice()

    def open(self) -> None:
        """The tier is being opened. Raises TierDown if rows can go no other way, and there is no buffer."""
        if self._buffer is not None:
            return
        try:
            self._buffer = Buffer(self._agent, self._region.geometry.row_bytes, self._buffer_bytes)
        except (AgentError, OSError) as error:
            if self._always:
                raise TierDown(f"no buffer for staging: {error}") from error
            logger.warning("no buffer for staging, %s are direct: %s", self._name, error)
            return
        if self._name == "loads" and self.staged:  # requests wait for these
            self._buffer.populate()

    @property
    def staged(self) -> bool:
        """Whether rows are staged now. Until the region is prefaulted, only where the kernel gives it no huge pages."""
        region = self._region
        if self._buffer is None or self._always:
            return self._buffer is not None
        if region.huge_bytes is None:
            return bool(self._advice) and not region.hugetlb
        return not mostly_huge(region.nbytes, region.huge_bytes)

    def cap(self, rows: int) -> int:
        """At most so many, of which none has to wait for room."""
        return min(rows, len(self._buffer.rows)) if self.staged and self._buffer else rows

    def rows(self, moves: Collection[Move]) -> Steps[DirectRows]:
        """Where the rows of a unit lie while they are moved; waits for room in the buffer."""
        buffer = self._buffer
        if buffer is None:
            return DirectRows(self._region)

        def may_start() -> bool:
            return not self.staged or buffer.room(len(moves))

        if not may_start():
            yield may_start
        return StagedRows(self._region, buffer, moves) if self.staged else DirectRows(self._region)

    def close(self) -> None:
        """Nothing is in flight."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class Staging:
    """Both directions of one tier. Belongs to the mover's loop."""

    def __init__(
        self, config: FileConfig, region: HostRegion, agent: Registrar, *, loads_bytes: int | None = None
    ) -> None:
        """`loads_bytes`: of the buffer of loads."""
        self.loads = Direction("loads", config, region, agent, loads_bytes or BUFFER_BYTES)
        self.stores = Direction("stores", config, region, agent, BUFFER_BYTES)

    def open(self) -> None:
        self.loads.open()
        self.stores.open()

    @property
    def staged(self) -> tuple[bool, bool]:
        """Whether loads and stores are staged."""
        return self.loads.staged, self.stores.staged

    def close(self) -> None:
        """Nothing is in flight."""
        self.loads.close()
        self.stores.close()
