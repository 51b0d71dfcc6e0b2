"""Transfers: the moves of an object tier that are under way, each an object with a NIXL handle of its own.

Downloads land in private staging rows. One that takes too long is given up: nobody waits for it, and its staging row
waits for the transfer's real end. An upload reads the region, so it cannot be given up.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.chunk import Geometry
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move, TierDown, TierRefused
from nixl_tiers.tiers.moves import Batch
from nixl_tiers.tiers.nixl_agent import AgentError, Registration, Transfer, TransferState
from nixl_tiers.tiers.s3.credentials import Credentials
from nixl_tiers.tiers.s3.plane import Plane

MAX_UPLOADS: Final = 16
MAX_DOWNLOADS: Final = 16
STAGING_BYTES: Final = 256 << 20  # at most, but never fewer than MIN_STAGING_ROWS
MIN_STAGING_ROWS: Final = 4
DOWNLOAD_S: Final = 15.0  # and the time that its bytes take at SLOWEST_BYTES_PER_S
SLOWEST_BYTES_PER_S: Final = 4e6
ERROR_PAGE_BYTES: Final = 1024


class Direction(Enum):
    UPLOAD = "upload"
    DOWNLOAD = "download"


@dataclass(eq=False)
class Task:
    """One move of a batch, waiting or under way."""

    batch: Batch
    index: int
    move: Move
    direction: Direction
    tries: int = 0
    registration: Registration | None = None
    transfer: Transfer | None = None
    staging: int = -1
    give_up_at: float = float("inf")


class S3Data:
    """What runs on a plane, which is made anew for new credentials."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion) -> None:
        self.plane: Plane | None = None
        self.running: list[Task] = []
        self.given_up: list[Task] = []
        self._config = config
        self._geometry = geometry
        self._region = region
        self._row_bytes = geometry.row_bytes
        rows = max(MIN_STAGING_ROWS, min(MAX_DOWNLOADS, STAGING_BYTES // self._row_bytes))
        self._memory = mmap.mmap(-1, rows * self._row_bytes)
        self._staging = np.frombuffer(self._memory, np.uint8).reshape(rows, self._row_bytes)
        self.free_staging = list(range(rows))

    @property
    def busy(self) -> bool:
        """Whether NIXL has anything in hand, wanted or not."""
        return bool(self.running or self.given_up)

    @property
    def uploads(self) -> int:
        """How many uploads run."""
        return sum(task.direction is Direction.UPLOAD for task in self.running)

    def renew(self, credentials: Credentials, aws_region: str) -> None:
        """Work with these credentials, in this region, from now on. Raises TierDown, TierRefused."""
        if self.plane is not None and (self.plane.credentials, self.plane.aws_region) == (credentials, aws_region):
            return
        if self.given_up:
            raise TierDown(f's3 bucket "{self._config.bucket}": a download that was given up has not ended yet')
        if self.plane is not None:
            self.plane.close()
            self.plane = None
        try:
            threads = MAX_UPLOADS + MAX_DOWNLOADS
            self.plane = Plane(
                self._config, credentials, self._region, self._staging, aws_region=aws_region, threads=threads
            )
        except AgentError as error:
            raise TierRefused(f"type: {error}") from None

    def upload(self, task: Task, name: str) -> None:
        """Start writing the region row of `task` to the object `name`."""
        self._start(task, name, self._region.address + task.move.row * self._row_bytes)

    def download(self, task: Task, name: str) -> None:
        """Start reading the object `name` into a staging row; there must be a free one."""
        task.staging = self.free_staging.pop()
        row = self.staged(task)
        # Neither an old error page nor an old seal may speak for what comes now.
        row[:ERROR_PAGE_BYTES] = 0
        row[-self._geometry.seal_bytes :] = 0
        task.tries += 1
        task.give_up_at = time.monotonic() + DOWNLOAD_S + self._row_bytes / SLOWEST_BYTES_PER_S
        self._start(task, name, row.ctypes.data)

    def staged(self, task: Task) -> NDArray[np.uint8]:
        """What a download has brought, as far as it has come."""
        row: NDArray[np.uint8] = self._staging[task.staging]
        return row

    def ended(self) -> Iterator[tuple[Task, TransferState]]:
        """The tasks that are over, each with its staging row until the next one is asked for; PENDING: given up."""
        running, self.running = self.running, []
        for task in running:
            state = task.transfer.state() if task.transfer is not None else TransferState.FAILED
            if state is not TransferState.PENDING:
                yield task, state
                self._let_go(task)
            elif time.monotonic() < task.give_up_at:
                self.running.append(task)
            else:
                self.given_up.append(task)
                yield task, state
        self.given_up = [task for task in self.given_up if not self._let_go(task)]

    def close(self) -> None:
        """Leave the plane. While anything runs on it, it is left to the end of the process."""
        if self.plane is not None and not self.busy:
            self.plane.close()
        self.plane = None

    def _start(self, task: Task, name: str, address: int) -> None:
        assert self.plane is not None
        agent = self.plane.agent
        self.running.append(task)
        try:
            task.registration = agent.register_objects([name], self._row_bytes)
        except AgentError:
            return  # without a transfer, the next poll ends it as failed
        spans = [(address, self._row_bytes, 0, task.registration.devices[0])]
        task.transfer = agent.write(spans) if task.direction is Direction.UPLOAD else agent.read(spans)

    def _let_go(self, task: Task) -> bool:
        """Give back handle, name and staging row. False while the transfer runs."""
        if task.transfer is not None:
            if task.transfer.state() is TransferState.PENDING:
                return False
            task.transfer.release()
            task.transfer = None
        if task.registration is not None and self.plane is not None:
            self.plane.agent.deregister(task.registration)
            task.registration = None
        if task.staging >= 0:
            self.free_staging.append(task.staging)
            task.staging = -1
        return True
