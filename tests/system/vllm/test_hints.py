"""What a request may ask for the time after it, in vLLM's kv_hints or in its kv_transfer_params."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.core import locate

pytest.importorskip("vllm")


from tests.support.file_tier import file_tier
from tests.support.waiting import until
from tests.vllm.test_hints import fill, outcomes
from tests.vllm.test_request_options import Rig, hashes_of


def test_chunks_come_up_for_the_next_turn(tmp_path: Path) -> None:
    rig = Rig(file_tier(tmp_path / "kv", "16MiB"), rows=16)
    try:
        assert rig.coordinator.wait_ready(300)
        turn = hashes_of(4, 1)
        rig.run("turn", turn)
        assert rig.coordinator.flush(300)
        fill(rig)
        assert locate(rig.coordinator, rig.keys("turn")) == ["file"] * 4
        rig.run("agent", turn, {"nixl_tiers": {"load": "host", "store": "none", "prefetch_s": 0}})
        until(lambda: locate(rig.coordinator, rig.keys("turn")) == ["cpu"] * 4, "the promotion")
        assert outcomes(rig.manager.get_stats()) == {"accepted": 1}
    finally:
        rig.manager.shutdown()
