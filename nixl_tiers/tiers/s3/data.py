"""The data connections of the S3 tier: NIXL agents over one bucket, made for one set of credentials.

Each object has a NIXL handle of its own. Downloads land in private staging rows. One that takes too long is abandoned:
its staging row is free again when the transfer has really ended. An upload reads the region, so it is never abandoned.

An agent has at most 25 connections, which its AWS library's default is and NIXL does not set (1.5.1): a request beyond
that waits inside it. So there is another agent, a *lane*, for every LANE_TRANSFERS transfers that run. Uploads have
lanes of their own, since an agent's threads have one CPU priority: no request waits for an upload.
"""

from __future__ import annotations

import contextlib
import heapq
import mmap
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.base.zeroed import zeroed
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.pages import populate
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import TierRefused
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registration, Transfer, TransferState, at_low_priority
from nixl_tiers.tiers.s3.client import Credentials, trusted_certificates
from nixl_tiers.tiers.s3.concurrency import FIRST, MOST
from nixl_tiers.tiers.s3.connection import S3Connection

LANE_TRANSFERS: Final = 24
STAGING_BYTES: Final = 1 << 30  # at most, but never fewer than MIN_STAGING_ROWS
MIN_STAGING_ROWS: Final = 4
POPULATED_BYTES: Final = 64 << 20  # of the staging rows, before the first download
SPARE_STAGING_ROWS: Final = 4  # which are verified while as many downloads as are allowed run
SLOWEST_BYTES_PER_S: Final = 4e6  # of a download
LATE: Final = 8.0  # times as long as others take
ERROR_PAGE_BYTES: Final = 1024


class _Lane:
    """One agent, and how many of its transfers run."""

    def __init__(
        self, parameters: dict[str, str], region: HostRegion, staging: NDArray[np.uint8], *, uploads: bool
    ) -> None:
        """`uploads`: it has nothing but uploads, at low CPU priority. Raises AgentError."""
        self.uploads = uploads
        self.agent = at_low_priority(lambda: Agent.obj(parameters)) if uploads else Agent.obj(parameters)
        self.running = 0
        self._memory = [
            self.agent.register_region(region),
            self.agent.register_dram(staging.ctypes.data, staging.nbytes),
        ]

    def close(self) -> None:
        """Nothing of it may run."""
        for memory in self._memory:
            self.agent.deregister(memory)


@dataclass(eq=False)
class ObjectTransfer:
    """One object on its way up or down. See S3Data.release."""

    started_s: float  # monotonic
    lane: _Lane
    registration: Registration | None = None
    transfer: Transfer | None = None
    staging: int = -1  # downloads: the number of the staging row
    deadline_s: float = float("inf")
    _over: bool = False

    @property
    def state(self) -> TransferState:
        return self.transfer.state() if self.transfer is not None else TransferState.FAILED

    def over(self) -> bool:
        """Whether it has ended, or should be abandoned, as of the last poll."""
        return self._over

    def poll(self, now: float) -> bool:
        """The same as of now."""
        self._over = self.state is not TransferState.PENDING or now >= self.deadline_s
        return self._over


class S3Data:
    """What NIXL does for one S3 tier. For the tier's own thread; nothing here waits for the server."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion, times: Times = PRODUCTION) -> None:
        """Without an agent until `connect`."""
        self._download_s, self._late_s = times.s3_download_s, times.s3_late_download_s
        self.credentials: Credentials | None = None
        """Those that the agents were made for; None: there is none."""
        self._server: tuple[str, str | None] = ("", None)  # AWS region and endpoint
        self._lanes: list[_Lane] = []
        self._retired: list[_Lane] = []  # with other credentials, on which something runs that was begun before
        self._config = config
        self._geometry = geometry
        self._region = region
        self._row_bytes = geometry.row_bytes
        self._memory = _staging(self._row_bytes)
        self._staging = np.frombuffer(self._memory, np.uint8).reshape(-1, self._row_bytes)
        self.free_staging = list(range(len(self._staging)))
        """A heap: the lowest rows are used first, so that those which are never needed take no memory."""
        self._running: set[ObjectTransfer] = set()  # those that are still wanted
        self._abandoned: list[ObjectTransfer] = []

    @property
    def running(self) -> int:
        """How many transfers run that are still wanted."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether NIXL has anything in hand, wanted or not."""
        return bool(self._running or self._abandoned)

    def poll(self, now: float) -> bool:
        """Ask NIXL for all that runs; returns whether anything is over that is still wanted. This is most of what a
        slow server costs, so nothing else is done here for a transfer that goes on."""
        self.reap()
        over = False
        for transfer in self._running:
            over |= transfer.poll(now)
        return over

    def connect(self, connection: S3Connection) -> None:
        """Work with its present credentials, in its region, at its server from now on. What runs goes on with the old
        ones. Raises TierRefused."""
        credentials, server = connection.credentials, (connection.region.name, connection.endpoint)
        if self._lanes and (self.credentials, self._server) == (credentials, server):
            return
        self._retired += self._lanes
        self._lanes = []
        self.reap()
        self.credentials, self._server = credentials, server
        try:
            self._add_lane(uploads=False)
        except AgentError as error:
            self.credentials = None
            raise TierRefused(f"type: {error}") from None

    def populate_staging(self) -> None:
        """Allocate the staging rows that the first downloads use, so that these need not wait until the kernel has
        zeroed their pages: a sixth of the processor time that a first hit takes here."""
        rows = min(len(self._staging), FIRST + SPARE_STAGING_ROWS)
        populate(self._memory, 0, min(rows * self._row_bytes, POPULATED_BYTES))

    def upload(self, row: int, name: str) -> ObjectTransfer:
        """Start writing this region row to the object `name`."""
        upload = ObjectTransfer(time.monotonic(), self._free_lane(uploads=True))
        return self._start(upload, name, self._region.address + row * self._row_bytes)

    def download(self, name: str, typical_s: float = 0.0) -> ObjectTransfer:
        """Start reading the object `name` into a staging row; there must be a free one. `typical_s`: how long others
        took lately; 0.0: not known."""
        now = time.monotonic()
        download = ObjectTransfer(now, self._free_lane(uploads=False), staging=heapq.heappop(self.free_staging))
        longest_s = self._download_s + self._row_bytes / SLOWEST_BYTES_PER_S
        if typical_s:
            longest_s = min(longest_s, max(self._late_s, LATE * typical_s))
        download.deadline_s = now + longest_s
        row = self.staged(download)
        # Neither an old error page nor an old seal may be taken for what comes now.
        row[:ERROR_PAGE_BYTES] = 0
        row[-self._geometry.seal_bytes :] = 0
        return self._start(download, name, row.ctypes.data)

    def staged(self, download: ObjectTransfer) -> NDArray[np.uint8]:
        """What a download has brought, as far as it has come."""
        row: NDArray[np.uint8] = self._staging[download.staging]
        return row

    def release(self, transfer: ObjectTransfer) -> None:
        """Give back its handle, name and staging row; while it is pending, abandon it."""
        self._running.remove(transfer)
        self._abandoned.append(transfer)
        self.reap()

    def reap(self) -> None:
        """Give back what abandoned downloads hold that have ended by now, and lanes that were retired."""
        if self._abandoned:
            self._abandoned = [transfer for transfer in self._abandoned if not self._released(transfer)]
        if self._retired:
            for lane in self._retired:
                if not lane.running:
                    lane.close()
            self._retired = [lane for lane in self._retired if lane.running]

    def close(self) -> None:
        """Release the agents. While anything runs, they are left to the end of the process."""
        if not self.busy:
            for lane in self._lanes:
                lane.close()
        self._lanes, self._retired = [], []
        self.credentials = None

    def _free_lane(self, *, uploads: bool) -> _Lane:
        """The first lane of this direction with a free connection; without one and without the means for another, the
        least busy."""
        lanes = (lane for lane in self._lanes if lane.uploads is uploads)
        free = next((lane for lane in lanes if lane.running < LANE_TRANSFERS), None)
        if free is None:
            with contextlib.suppress(AgentError):
                return self._add_lane(uploads=uploads)
            free = min(self._lanes, key=lambda lane: (lane.uploads is not uploads, lane.running))
        return free

    def _add_lane(self, *, uploads: bool) -> _Lane:
        """Takes 3 ms."""
        assert self.credentials is not None
        parameters = _parameters(self._config, self.credentials, *self._server)
        lane = _Lane(parameters, self._region, self._staging, uploads=uploads)
        self._lanes.append(lane)
        return lane

    def _start(self, transfer: ObjectTransfer, name: str, address: int) -> ObjectTransfer:
        agent = transfer.lane.agent
        self._running.add(transfer)
        transfer.lane.running += 1
        try:
            transfer.registration = agent.register_objects([name], self._row_bytes)
        except AgentError:
            return transfer  # which has failed, without a NIXL transfer
        spans = [(address, self._row_bytes, 0, transfer.registration.devices[0])]
        transfer.transfer = agent.read(spans) if transfer.staging >= 0 else agent.write(spans)
        return transfer

    def _released(self, transfer: ObjectTransfer) -> bool:
        if transfer.state is TransferState.PENDING:
            return False
        if transfer.transfer is not None:
            transfer.transfer.release()
        if transfer.registration is not None:
            transfer.lane.agent.deregister(transfer.registration)
        transfer.lane.running -= 1
        if transfer.staging >= 0:
            heapq.heappush(self.free_staging, transfer.staging)
        return True


def _staging(row_bytes: int) -> mmap.mmap:
    """Rows for the downloads that may run at once, in private memory."""
    rows = max(MIN_STAGING_ROWS, min(MOST + SPARE_STAGING_ROWS, STAGING_BYTES // row_bytes))
    memory = zeroed(rows * row_bytes)
    # A core file must not hold prompts. Huge pages make the first use of a row cheaper.
    for flag in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(flag)
    return memory


def _parameters(config: S3Config, credentials: Credentials, aws_region: str, endpoint: str | None) -> dict[str, str]:
    """What NIXL's object backend is created with. Holds secrets: never to be shown."""
    parameters = {
        "bucket": config.bucket,
        "region": aws_region,
        "access_key": credentials.access_key,
        "secret_key": credentials.secret_key,
        # Private servers expect path-style addresses; AWS wants the bucket in the host name, where that is possible.
        "use_virtual_addressing": "true" if endpoint is None and "." not in config.bucket else "false",
        "req_checksum": "required",
        "resp_checksum": "required",
        "num_threads": str(LANE_TRANSFERS),
    }
    if credentials.session_token:
        parameters["session_token"] = credentials.session_token
    if endpoint is not None:
        parameters["endpoint_override"] = endpoint
        parameters["scheme"] = endpoint.partition(":")[0]
    if (certificates := trusted_certificates(config)) is not None:
        parameters["ca_bundle"] = certificates
    return parameters
