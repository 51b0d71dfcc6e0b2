from __future__ import annotations

import socket
import threading

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult

from nixl_tiers.base.chunk import Namespace
from nixl_tiers.config import schema as tiers_config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.manager import NixlTiersManager
from tests.vllm.test_manager import GEOMETRY, ROWS, context_of, keys_of


def test_reset_and_shutdown_do_not_wait_for_an_unresponsive_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scheduler's thread may wait for is counted in what it asks for, not in time that happens to pass."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tiers-test-access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tiers-test-not-a-secret")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as black_hole:
        endpoint = f"http://127.0.0.1:{black_hole.getsockname()[1]}"
        s3 = {"type": "s3", "bucket": "bucket", "endpoint": endpoint, "capacity": "1GiB"}
        config = tiers_config.load({"tiers": [{"type": "cpu", "capacity": ROWS * GEOMETRY.row_bytes}, s3]})
        region = HostRegion.create(GEOMETRY, ROWS)
        coordinator = Coordinator.open(config, Namespace.of({"test": 1}), region, timeout_s=0.0)
        manager = NixlTiersManager(coordinator, config, (0,), None)
        waits: list[float | None] = []
        me, join, wait = threading.get_ident(), threading.Thread.join, threading.Condition.wait

        def joins(self: threading.Thread, timeout: float | None = None) -> None:
            if threading.get_ident() == me:
                waits.append(timeout)
            join(self, timeout)

        def waits_for(self: threading.Condition, timeout: float | None = None) -> bool:
            if threading.get_ident() == me:
                waits.append(timeout)
            return wait(self, timeout)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "join", joins)
            patch.setattr(threading.Condition, "wait", waits_for)
            (key,) = keys_of(1)
            context = context_of("r", key)
            manager.on_new_request(context)
            for _ in range(3):
                manager.reset_cache()
                manager.on_reset_flushed()
                assert manager.lookup(key, context) is LookupResult.MISS
            assert waits == [], "a reset must not wait"
            manager.shutdown()
        assert waits, "shutdown gives movers a moment"
        assert None not in waits
        assert sum(filter(None, waits)) <= 0.5
