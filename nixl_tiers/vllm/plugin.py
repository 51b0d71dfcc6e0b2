"""The `vllm.general_plugins` entry point: makes our names known to vLLM without spec_module_path and
kv_connector_module_path."""

from __future__ import annotations

import contextlib
from typing import Final

SPEC: Final = "NixlTiersSpec"
CONNECTOR: Final = "NixlTiersConnector"


def register() -> None:
    """Tell vLLM where they are; does nothing the second time. vLLM calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    # Each says so about a name that it knows already. Nothing of ours is imported before it is asked for.
    with contextlib.suppress(ValueError):
        OffloadingSpecFactory.register_spec(SPEC, "nixl_tiers.vllm.spec", SPEC)
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, "nixl_tiers.vllm.connector", CONNECTOR)
