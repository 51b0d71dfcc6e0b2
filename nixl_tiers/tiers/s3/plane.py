"""The data plane of an object tier: a NIXL agent over one bucket, made for one set of credentials."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.nixl_agent import Agent
from nixl_tiers.tiers.s3.credentials import Credentials
from nixl_tiers.tiers.s3.tls import trusted_certificates


class Plane:
    """A NIXL agent with the region and the staging rows registered, for one set of credentials."""

    def __init__(
        self,
        config: S3Config,
        credentials: Credentials,
        region: HostRegion,
        staging: NDArray[np.uint8],
        *,
        aws_region: str,
        threads: int,
    ) -> None:
        """`threads`: how many transfers may run side by side. Raises AgentError."""
        self.credentials = credentials
        self.aws_region = aws_region
        self.agent = Agent.obj(_parameters(config, credentials, aws_region, threads))
        self._held = [self.agent.register_region(region)]
        self._held.append(self.agent.register_dram(staging.ctypes.data, staging.nbytes))

    def close(self) -> None:
        """Nothing may be under way."""
        for registration in self._held:
            self.agent.deregister(registration)


def _parameters(config: S3Config, credentials: Credentials, aws_region: str, threads: int) -> dict[str, str]:
    """What NIXL's object backend is created with. Holds secrets: never to be shown."""
    parameters = {
        "bucket": config.bucket,
        "region": aws_region,
        "access_key": credentials.access_key,
        "secret_key": credentials.secret_key,
        # Private servers speak path-style addresses; AWS wants the bucket in the host name, where it can stand there.
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
