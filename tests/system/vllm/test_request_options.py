"""What a request may ask of the tiers in its kv_transfer_params, as it arrives in vLLM's own connector."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")


from tests.support.file_tier import files_tier
from tests.support.vllm_scheduler import BLOCK
from tests.vllm.test_request_options import Rig, hashes_of


def test_what_a_request_keeps_from_storage_is_on_no_medium(tmp_path: Path) -> None:
    rig = Rig(files_tier(tmp_path / "kv", "16MiB"))

    def stored(hashes: list[bytes]) -> int:
        """How many of the prompt's chunks are on the disk, once every write has ended."""
        assert rig.coordinator.flush(300)
        files = [str(path) for path in (tmp_path / "kv").rglob("*") if path.is_file()]
        return sum(each.hex() in name for each in hashes for name in files)

    try:
        usual, host, none, both = (hashes_of(4, prompt) for prompt in range(1, 5))
        assert rig.coordinator.wait_ready(300)
        rig.run("usual", usual)
        rig.run("host", host, {"nixl_tiers": {"store": "host"}})
        rig.run("none", none, {"nixl_tiers": {"store": "none"}})
        rig.run("both", both[:2])
        rig.run("both, deeper", both, {"nixl_tiers": {"store": "host"}})
        assert stored(usual) == 4
        assert stored(host) == 0
        assert stored(none) == 0
        assert stored(both) == 2, "what another request stored stays, and what this one adds does not"
        # Whoever may use it all and hits it in host memory would have stored it, had it not been there.
        assert rig.run("no more", host, {"nixl_tiers": {"store": "none"}}) == 4 * BLOCK
        assert stored(host) == 0
        assert rig.run("lifted", host[:3]) == 3 * BLOCK
        assert stored(host) == 3
    finally:
        rig.manager.shutdown()
