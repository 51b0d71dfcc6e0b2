"""Promotion at arrival, with vLLM's own connector: what is read of a request in the queue, and what comes up for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.core import locate

pytest.importorskip("vllm")

from tests.support.file_tier import file_tier
from tests.support.vllm_scheduler import BLOCK, keys_of
from tests.support.waiting import until
from tests.vllm.test_arrivals import Connector
from tests.vllm.test_request_options import STEP, Rig, hashes_of


def test_rows_come_up_while_their_request_waits_for_its_turn(tmp_path: Path) -> None:
    rig = Rig(file_tier(tmp_path / "kv", "64MiB"), rows=8)
    try:
        assert rig.coordinator.wait_ready(300)
        prompts = [hashes_of(4, number) for number in range(4)]
        for number, prompt in enumerate(prompts):
            rig.run(f"first {number}", prompt)
            assert rig.coordinator.flush(300)
        keys = keys_of(prompts[0])
        assert locate(rig.coordinator, keys) == ["file"] * 4
        request = Connector(rig.scheduler).arrives("again", prompts[0])
        rig.manager.on_schedule_end(STEP)  # which has not reached it
        until(lambda: locate(rig.coordinator, keys) == ["cpu"] * 4, "the promotions")
        assert rig.scheduler.matched(request) == 4 * BLOCK, "at its first look-up"
        assert rig.coordinator.counters()["cpu"]["unused"] == 0
    finally:
        rig.manager.shutdown()
