"""The `vllm.general_plugins` entry point: makes `"spec_name": "NixlTiersSpec"` known without a spec_module_path."""

from __future__ import annotations

import contextlib

SPEC_NAME = "NixlTiersSpec"


def register() -> None:
    """Tell vLLM where the spec is; does nothing the second time. vLLM calls this in each of its processes."""
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    with contextlib.suppress(ValueError):  # it says so about a name that it knows already
        OffloadingSpecFactory.register_spec(SPEC_NAME, "nixl_tiers.vllm.spec", SPEC_NAME)
