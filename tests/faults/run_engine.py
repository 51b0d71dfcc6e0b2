"""A real engine in a process of its own, whose one storage tier is struck while a request waits for it.

    python run_engine.py MODEL PORT BUCKET FAULT        PORT: of an S3 server; FAULT: "black hole" or "kill"

Prints one line of JSON: what the engine said cold, while struck, and afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from nixl_tiers.testing import vllm_cpu
from nixl_tiers.testing.proxy import FaultProxy, Kind, Trouble
from nixl_tiers.testing.waiting import until
from tests.vllm.run_engine import generate

PROMPT = [(7 * i * i + 3 * i) % 500 + 1 for i in range(1100)]


def main(model: Path, port: int, bucket: str, fault: str) -> dict[str, Any]:
    with FaultProxy(port) as proxy:
        s3 = {"type": "s3", "bucket": bucket, "prefix": fault.replace(" ", "-"), "endpoint": proxy.endpoint}
        tiers = [{"type": "cpu", "capacity": "16MiB"}, {**s3, "capacity": "256MiB"}]
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "NixlTiersSpec",
                "spec_module_path": "nixl_tiers.vllm.spec",
                "tiers": tiers,
                "wait_s": 3.0,
            },
        }
        llm = vllm_cpu.in_process_llm(model, transfer, dtype="float32", skip_tokenizer_init=True, max_model_len=2048)
        core = llm.llm_engine.engine_core.engine_core
        store = core.scheduler.connector.connector_scheduler.manager._store
        try:
            cold = ask(llm)
            assert store.flush(60)
            assert store.stats()["s3"]["rows"] > 0
            forget(llm, store)
            proxy.disturb(Trouble(Kind.TRICKLE, methods=frozenset({"GET"}), bytes_per_s=5000))
            striker = threading.Thread(target=strike, args=(store, proxy, fault))
            striker.start()
            struck = ask(llm)
            striker.join()
            proxy.clear()
            until(lambda: comes_back(llm, store), "the tier to heal", 120)
            forget(llm, store)
            healed = ask(llm)
            return {"cold": cold, "struck": struck, "healed": healed, "stats": store.stats()}
        finally:
            llm.llm_engine.engine_core.shutdown()


def ask(llm: Any) -> dict[str, Any]:
    began = time.monotonic()
    (answer,) = generate(llm, [PROMPT], 8)
    return {**answer, "seconds": time.monotonic() - began}


def strike(store: Any, proxy: FaultProxy, fault: str) -> None:
    """In the middle of the promotion that the request waits for."""
    until(lambda: proxy.struck[Kind.TRICKLE], "a row to be under way", 120)
    if fault == "kill":
        os.kill(store.engine.mover_pids[0], signal.SIGKILL)
    else:
        proxy.disturb(Trouble(Kind.BLACK_HOLE))


def forget(llm: Any, store: Any) -> None:
    """Leave the prompt's chunks nowhere but in the storage tier."""
    assert llm.reset_prefix_cache()
    engine = store.engine

    def emptied() -> bool:
        plan = engine.prepare_store([b"filler-%d-0000" % n for n in range(engine.region.rows)], "filler")
        engine.region.mark(np.array(plan.rows), 0, plan.ticket, False)
        engine.complete_store(plan.keys)
        engine.finish_request("filler")
        return len(plan.rows) == engine.region.rows

    until(emptied, "every host row to be free", 120)


def comes_back(llm: Any, store: Any) -> bool:
    forget(llm, store)
    ask(llm)
    assert store.flush(60)
    forget(llm, store)
    before = store.stats()["s3"]["hits"]
    ask(llm)
    hits: float = store.stats()["s3"]["hits"]
    return hits > before


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])))
