"""A vLLM engine in a process of its own: a fault is injected into its storage tier while a request waits for it.

    python run_engine.py MODEL PORT BUCKET FAULT...        PORT: of an S3 server; FAULT: one of FAULTS

Prints one line of JSON: the answer without any cache, and for each fault the answers during it and after recovery.
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

from nixl_tiers.store import TieredStore
from tests.support import vllm_cpu
from tests.support.leaks import reclaim_all_host_rows
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.times import changed
from tests.support.waiting import until, until_up
from tests.system.vllm.run_engine import generate

PROMPT = [(7 * i * i + 3 * i) % 500 + 1 for i in range(1100)]
WHOLE = 1024  # tokens of it in full blocks
HEAL_S = 240.0

FAULTS: dict[str, Callable[[Any, FaultProxy], None]] = {
    "black hole": lambda store, proxy: proxy.inject(ProxyFault(FaultKind.BLACK_HOLE)),
    "refused": lambda store, proxy: proxy.inject(ProxyFault(FaultKind.REFUSED)),
    "SIGKILL": lambda store, proxy: os.kill(store.coordinator.mover_pids[0], signal.SIGKILL),
    "SIGSTOP": lambda store, proxy: os.kill(store.coordinator.mover_pids[0], signal.SIGSTOP),
}


def main(model: Path, port: int, bucket: str, faults: Sequence[str]) -> dict[str, Any]:
    with FaultProxy(port) as proxy:
        s3 = {"type": "s3", "bucket": bucket, "prefix": "faults", "endpoint": proxy.endpoint}
        tiers = [{"type": "cpu", "capacity": "16MiB"}, {**s3, "capacity": "256MiB"}]
        transfer = vllm_cpu.kv_transfer(tiers, wait_s=3.0)
        times = changed(set_aside_s=(1.0, 5.0))  # whether the tier has healed is asked of the rows that were under way
        settings = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 2048}
        llm = vllm_cpu.in_process_llm(model, transfer, times=times, **settings)
        core = llm.llm_engine.engine_core.engine_core
        store = TieredStore(core.scheduler.connector.connector_scheduler.manager._coordinator)
        try:
            until_up(store)
            cold = ask(llm)
            assert store.flush(300)
            assert store.stats()["s3"]["rows"] > 0
            answers = {fault: inject(llm, store, proxy, fault) for fault in faults}
            return {"cold": cold, "faults": answers, "stats": store.stats()}
        finally:
            llm.llm_engine.engine_core.shutdown()


def inject(llm: Any, store: Any, proxy: FaultProxy, fault: str) -> dict[str, Any]:
    """Inject a fault during the promotion that a request waits for."""
    evict_above_storage(llm, store)
    before = proxy.injected[FaultKind.THROTTLE]
    proxy.inject(ProxyFault(FaultKind.THROTTLE, methods=frozenset({"GET"}), bytes_per_s=5000))

    def inject_during_promotion() -> None:
        until(lambda: proxy.injected[FaultKind.THROTTLE] > before, "a row to be in flight", 120)
        FAULTS[fault](store, proxy)

    injector = threading.Thread(target=inject_during_promotion)
    injector.start()
    during = ask(llm)
    injector.join()
    proxy.clear()
    began = time.monotonic()
    after: list[dict[str, Any]] = []

    def healed() -> bool:
        """Whether the whole prompt is loaded from storage; each request also retries the rows that failed before."""
        assert store.flush(60)
        evict_above_storage(llm, store)
        after[:] = [ask(llm)]
        return bool(after[0]["cached"] == WHOLE)

    until(healed, f"the tier to heal after {fault}", HEAL_S)
    return {"during": during, "after": after[0], "healed_s": time.monotonic() - began}


def ask(llm: Any) -> dict[str, Any]:
    began = time.monotonic()
    (answer,) = generate(llm, [PROMPT], 8)
    return {**answer, "seconds": time.monotonic() - began}


def evict_above_storage(llm: Any, store: Any) -> None:
    """Evict the prompt's chunks from the GPU and the host, so that only the storage tier has them."""
    assert llm.reset_prefix_cache()
    until(lambda: reclaim_all_host_rows(store), "every host row to be free", 120)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])))
