"""A real engine in a process of its own, whose one storage tier is struck again and again while a request waits for it.

    python run_engine.py MODEL PORT BUCKET FAULT...        PORT: of an S3 server; FAULT: one of STRIKES

Prints one line of JSON: what the engine said cold, and for each fault while struck and when the tier had healed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nixl_tiers.store import TieredStore
from nixl_tiers.testing import vllm_cpu
from tests.support.proxy import FaultProxy, Kind, Trouble
from tests.support.waiting import until, until_up
from tests.vllm.run_engine import generate

PROMPT = [(7 * i * i + 3 * i) % 500 + 1 for i in range(1100)]
WHOLE = 1024  # tokens of it that are in whole blocks
HEAL_S = 240.0

STRIKES: dict[str, Callable[[Any, FaultProxy], None]] = {
    "black hole": lambda store, proxy: proxy.disturb(Trouble(Kind.BLACK_HOLE)),
    "refused": lambda store, proxy: proxy.disturb(Trouble(Kind.REFUSE)),
    "SIGKILL": lambda store, proxy: os.kill(store.coordinator.mover_pids[0], signal.SIGKILL),
    "SIGSTOP": lambda store, proxy: os.kill(store.coordinator.mover_pids[0], signal.SIGSTOP),
}


def main(model: Path, port: int, bucket: str, faults: Sequence[str]) -> dict[str, Any]:
    with FaultProxy(port) as proxy:
        s3 = {"type": "s3", "bucket": bucket, "prefix": "struck", "endpoint": proxy.endpoint}
        tiers = [{"type": "cpu", "capacity": "16MiB"}, {**s3, "capacity": "256MiB"}]
        transfer = vllm_cpu.kv_transfer(tiers, wait_s=3.0)
        llm = vllm_cpu.in_process_llm(model, transfer, dtype="float32", skip_tokenizer_init=True, max_model_len=2048)
        core = llm.llm_engine.engine_core.engine_core
        store = TieredStore(core.scheduler.connector.connector_scheduler.manager._coordinator)
        try:
            until_up(store)
            cold = ask(llm)
            assert store.flush(300)
            assert store.stats()["s3"]["rows"] > 0
            struck = {fault: strike(llm, store, proxy, fault) for fault in faults}
            return {"cold": cold, "struck": struck, "stats": store.stats()}
        finally:
            llm.llm_engine.engine_core.shutdown()


def strike(llm: Any, store: Any, proxy: FaultProxy, fault: str) -> dict[str, Any]:
    """In the middle of the promotion that a request waits for."""
    forget(llm, store)
    before = proxy.struck[Kind.TRICKLE]
    proxy.disturb(Trouble(Kind.TRICKLE, methods=frozenset({"GET"}), bytes_per_s=5000))

    def hit() -> None:
        until(lambda: proxy.struck[Kind.TRICKLE] > before, "a row to be under way", 120)
        STRIKES[fault](store, proxy)

    striker = threading.Thread(target=hit)
    striker.start()
    during = ask(llm)
    striker.join()
    proxy.clear()
    began = time.monotonic()
    after: list[dict[str, Any]] = []

    def healed() -> bool:
        """Whether all of the prompt comes from storage; each request has the rows tried that it could not have."""
        assert store.flush(60)
        forget(llm, store)
        after[:] = [ask(llm)]
        return bool(after[0]["cached"] == WHOLE)

    until(healed, f"the tier to heal of {fault}", HEAL_S)
    return {"during": during, "after": after[0], "healed_s": time.monotonic() - began}


def ask(llm: Any) -> dict[str, Any]:
    began = time.monotonic()
    (answer,) = generate(llm, [PROMPT], 8)
    return {**answer, "seconds": time.monotonic() - began}


def forget(llm: Any, store: Any) -> None:
    """Leave the prompt's chunks nowhere but in the storage tier."""
    assert llm.reset_prefix_cache()
    coordinator = store.coordinator

    def emptied() -> bool:
        plan = coordinator.prepare_store([b"filler-%d-0000" % n for n in range(coordinator.region.rows)], "filler")
        coordinator.region.mark(np.array(plan.rows), 0, plan.store_seq, False)
        coordinator.complete_store(plan.keys)
        coordinator.finish_request("filler")
        return len(plan.rows) == coordinator.region.rows

    until(emptied, "every host row to be free", 120)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])))
