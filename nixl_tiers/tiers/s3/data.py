"""The data connection of the S3 tier: a NIXL agent over one bucket, made for one set of credentials.

Each object has a NIXL handle of its own. Downloads land in private staging rows. One that takes too long is abandoned:
its staging row is free again when the transfer has really ended. An upload reads the region, so it is never abandoned.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.chunk import Geometry
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registration, Transfer, TransferState
from nixl_tiers.tiers.s3.credentials import Credentials
from nixl_tiers.tiers.s3.tls import trusted_certificates

MAX_UPLOADS: Final = 16
MAX_DOWNLOADS: Final = 16
STAGING_BYTES: Final = 256 << 20  # at most, but never fewer than MIN_STAGING_ROWS
MIN_STAGING_ROWS: Final = 4
DOWNLOAD_S: Final = 15.0  # and the time that its bytes take at SLOWEST_BYTES_PER_S
SLOWEST_BYTES_PER_S: Final = 4e6
ERROR_PAGE_BYTES: Final = 1024


@dataclass(eq=False)
class ObjectTransfer:
    """One object on its way up or down. See S3Data.release."""

    registration: Registration | None = None
    transfer: Transfer | None = None
    staging: int = -1  # downloads: the number of the staging row
    deadline_s: float = float("inf")

    @property
    def state(self) -> TransferState:
        return self.transfer.state() if self.transfer is not None else TransferState.FAILED

    def over(self) -> bool:
        """Whether it has ended, or should be abandoned."""
        return self.state is not TransferState.PENDING or time.monotonic() >= self.deadline_s


class S3Data:
    """What NIXL does for one S3 tier. For the tier's own thread; nothing here waits for the server."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion) -> None:
        """Without an agent until `connect`."""
        self.credentials: Credentials | None = None
        """Those that the agent was made for; None: there is no agent."""
        self._aws_region = ""
        self._agent: Agent | None = None
        self._registrations: list[Registration] = []
        self._config = config
        self._geometry = geometry
        self._region = region
        self._row_bytes = geometry.row_bytes
        rows = max(MIN_STAGING_ROWS, min(MAX_DOWNLOADS, STAGING_BYTES // self._row_bytes))
        self._memory = mmap.mmap(-1, rows * self._row_bytes)
        self._staging = np.frombuffer(self._memory, np.uint8).reshape(rows, self._row_bytes)
        self.free_staging = list(range(rows))
        self._running = 0
        self._abandoned: list[ObjectTransfer] = []

    @property
    def busy(self) -> bool:
        """Whether NIXL has anything in hand, wanted or not."""
        return bool(self._running or self._abandoned)

    def connect(self, credentials: Credentials, aws_region: str) -> None:
        """Work with these credentials, in this region, from now on. Nothing may run. Raises TierDown, TierRefused."""
        if self._agent is not None and (self.credentials, self._aws_region) == (credentials, aws_region):
            return
        if self._abandoned:
            raise TierDown(f's3 bucket "{self._config.bucket}": a download that was given up has not ended yet')
        self.close()
        try:
            agent = Agent.obj(_parameters(self._config, credentials, aws_region, MAX_UPLOADS + MAX_DOWNLOADS))
            self._registrations = [agent.register_region(self._region)]
            self._registrations.append(agent.register_dram(self._staging.ctypes.data, self._staging.nbytes))
        except AgentError as error:
            raise TierRefused(f"type: {error}") from None
        self._agent, self.credentials, self._aws_region = agent, credentials, aws_region

    def upload(self, row: int, name: str) -> ObjectTransfer:
        """Start writing this region row to the object `name`."""
        return self._start(ObjectTransfer(), name, self._region.address + row * self._row_bytes)

    def download(self, name: str) -> ObjectTransfer:
        """Start reading the object `name` into a staging row; there must be a free one."""
        deadline_s = time.monotonic() + DOWNLOAD_S + self._row_bytes / SLOWEST_BYTES_PER_S
        download = ObjectTransfer(staging=self.free_staging.pop(), deadline_s=deadline_s)
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
        self._running -= 1
        self._abandoned.append(transfer)
        self.reap()

    def reap(self) -> None:
        """Give back what abandoned downloads hold that have ended by now."""
        self._abandoned = [transfer for transfer in self._abandoned if not self._released(transfer)]

    def close(self) -> None:
        """Release the agent. While anything runs on it, it is left to the end of the process."""
        if self._agent is not None and not self.busy:
            for registration in self._registrations:
                self._agent.deregister(registration)
        self._agent = self.credentials = None

    def _start(self, transfer: ObjectTransfer, name: str, address: int) -> ObjectTransfer:
        assert self._agent is not None
        self._running += 1
        try:
            transfer.registration = self._agent.register_objects([name], self._row_bytes)
        except AgentError:
            return transfer  # which has failed, without a NIXL transfer
        spans = [(address, self._row_bytes, 0, transfer.registration.devices[0])]
        transfer.transfer = self._agent.read(spans) if transfer.staging >= 0 else self._agent.write(spans)
        return transfer

    def _released(self, transfer: ObjectTransfer) -> bool:
        if transfer.state is TransferState.PENDING:
            return False
        if transfer.transfer is not None:
            transfer.transfer.release()
        if transfer.registration is not None and self._agent is not None:
            self._agent.deregister(transfer.registration)
        if transfer.staging >= 0:
            self.free_staging.append(transfer.staging)
        return True


def _parameters(config: S3Config, credentials: Credentials, aws_region: str, threads: int) -> dict[str, str]:
    """What NIXL's object backend is created with. Holds secrets: never to be shown."""
    parameters = {
        "bucket": config.bucket,
        "region": aws_region,
        "access_key": credentials.access_key,
        "secret_key": credentials.secret_key,
        # Private servers expect path-style addresses; AWS wants the bucket in the host name, where that is possible.
        "use_virtual_addressing": "true" if config.endpoint is None and "." not in config.bucket else "false",
        "req_checksum": "required",
        "resp_checksum": "required",
        "num_threads": str(threads),
    }
    if credentials.session_token:
        parameters["session_token"] = credentials.session_token
    if config.endpoint is not None:
        parameters["endpoint_override"] = config.endpoint
        parameters["scheme"] = config.endpoint.partition(":")[0]
    if (certificates := trusted_certificates(config)) is not None:
        parameters["ca_bundle"] = certificates
    return parameters
