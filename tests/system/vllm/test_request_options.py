"""What a request may ask of the tiers in its kv_transfer_params, as it arrives in vLLM's own connector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")


from tests.support.file_tier import files_tier
from tests.support.servers import MotoServer, S3Server
from tests.support.vllm_scheduler import BLOCK
from tests.vllm.test_request_options import Rig, hashes_of


@pytest.fixture
def objects(
    moto: MotoServer,
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
    s3_credentials: Callable[[S3Server], None],
) -> tuple[dict[str, Any], Callable[[], list[str]]]:
    """An s3 tier, and the listing of its rows by name."""
    s3_credentials(moto)
    bucket = s3_bucket(moto)

    def listing() -> list[str]:
        pages = moto.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=s3_prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    tier = {"type": "s3", "bucket": bucket, "prefix": s3_prefix, "endpoint": moto.endpoint, "capacity": "16MiB"}
    return tier, listing


def test_what_a_request_keeps_from_storage_is_on_no_medium(
    tmp_path: Path, objects: tuple[dict[str, Any], Callable[[], list[str]]]
) -> None:
    tier, listing = objects
    rig = Rig(files_tier(tmp_path / "kv", "16MiB"), tier)

    def stored(hashes: list[bytes]) -> list[int]:
        """How many of the prompt's chunks are on each medium, once every write has ended."""
        assert rig.coordinator.flush(300)
        files = [str(path) for path in (tmp_path / "kv").rglob("*") if path.is_file()]
        return [sum(each.hex() in name for each in hashes for name in names) for names in (files, listing())]

    try:
        usual, host, none, both = (hashes_of(4, prompt) for prompt in range(1, 5))
        assert rig.coordinator.wait_ready(300)
        rig.run("usual", usual)
        rig.run("host", host, {"nixl_tiers": {"store": "host"}})
        rig.run("none", none, {"nixl_tiers": {"store": "none"}})
        rig.run("both", both[:2])
        rig.run("both, deeper", both, {"nixl_tiers": {"store": "host"}})
        assert stored(usual) == [4, 4]
        assert stored(host) == [0, 0]
        assert stored(none) == [0, 0]
        assert stored(both) == [2, 2], "what another request stored stays, and what this one adds does not"
        # Whoever may use it all and hits it in host memory would have stored it, had it not been there.
        assert rig.run("no more", host, {"nixl_tiers": {"store": "none"}}) == 4 * BLOCK
        assert stored(host) == [0, 0]
        assert rig.run("lifted", host[:3]) == 3 * BLOCK
        assert stored(host) == [3, 3]
    finally:
        rig.manager.shutdown()
