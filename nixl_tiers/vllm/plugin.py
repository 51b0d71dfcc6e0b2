"""The `vllm.general_plugins` entry point: registers our classes, so that vLLM needs neither spec_module_path nor
kv_connector_module_path."""

from __future__ import annotations

import contextlib
from typing import Final

SPEC: Final = "NixlTiersSpec"
CONNECTOR: Final = "NixlTiersConnector"


def register() -> None:
    """Register spec and connector; a second call does nothing. vLLM calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    # ValueError: the name is registered already. Our modules are imported on first use.
    with contextlib.suppress(ValueError):
        OffloadingSpecFactory.register_spec(SPEC, "nixl_tiers.vllm.spec", SPEC)
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, "nixl_tiers.vllm.connector", CONNECTOR)
