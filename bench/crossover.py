"""Load or recompute: time to first token by prompt length and by the speed of S3. Real vLLM on a CPU.

    python -m bench.crossover [--quick] [--speeds 20,100,0] [--lengths 500,1500,3500,7000] [--rounds 7] [--out DIR]

An S3 server (moto) behind a proxy whose speed is limited, over all connections together, to so many MB/s (0: not at
all). A prompt's chunks lie on S3 (`s3`), or half of them in host memory and the rest on S3 (`mix`). Arms, which take
turns, request by request:

- `off`: an engine without tiers; `again`: the same once more. What they differ by is the noise (A/A);
- `always`: an engine that is told that computing is very slow, so that it loads all it can;
- `compute`: the engine of `ours`, but the request asks for `load: none`;
- `ours`: the engine measures what computing costs, and chooses.

Before a measured request vLLM's own prefix cache and the engine's host memory are emptied (`on_reset: keep`), and for
`mix` the first half is computed again, without a load. The last table is of 8 requests at once at one speed: seconds to
the last of their first tokens.

Ours should be at most 1.1 times the better of `always` and `compute` everywhere, and 1.05 times `off`. Writes
crossover.json and crossover.png. `--quick` takes about 5 minutes on two quiet cores; with all it takes an hour or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.engine_process import EngineProcess, answer_requests, claim_stdout
from bench.first_token_engine import FirstTokenEngine
from bench.machine import machine
from nixl_tiers.testing import vllm_cpu

PLACES: Final = ("s3", "mix")
ARMS: Final = ("off", "always", "compute", "ours", "again")
ENGINE_OF: Final = {"off": "off", "again": "off", "always": "always", "compute": "ours", "ours": "ours"}
CROWD: Final = 8
PIECE: Final = 64 << 10
READY_S: Final = 300.0
NO_LOAD: Final = {"nixl_tiers": {"load": "none"}}


class LimitedProxy:
    """Relays TCP to a port of this host; what comes back is limited to `bytes_per_s` for all connections together."""

    def __init__(self, port: int) -> None:
        self.bytes_per_s = 0.0  # 0: not limited
        self.port = 0
        self._to = port
        self._free_s = 0.0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        responses, requests = await asyncio.open_connection("127.0.0.1", self._to)
        ways = (self._relay(reader, requests, limited=False), self._relay(responses, writer, limited=True))
        await asyncio.gather(*ways, return_exceptions=True)

    async def _relay(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, limited: bool) -> None:
        try:
            while piece := await source.read(PIECE):
                if limited and self.bytes_per_s:
                    self._free_s = max(self._free_s, time.monotonic()) + len(piece) / self.bytes_per_s
                    await asyncio.sleep(self._free_s - time.monotonic())
                to.write(piece)
                await to.drain()
        finally:
            to.close()


class Engine(FirstTokenEngine):
    """In the child."""

    VERBS = ("ask", "forget")

    def __init__(self, plan: dict[str, Any]) -> None:
        extra = {"prefill_tokens_per_s": plan["prefill"], "on_reset": "keep", "wait_s": 120.0, "probe_s": 0}
        transfer = vllm_cpu.recomputing_transfer(plan["tiers"], **extra) if plan["tiers"] else None
        super().__init__(transfer, 8192, READY_S)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache and host memory; storage keeps what it has."""
        assert self.llm.reset_prefix_cache(reset_connector=self.store is not None)
        if self.store is not None:
            assert self.store.wait_ready(READY_S)


class Bench:
    def __init__(self, engines: dict[str, EngineProcess], proxy: LimitedProxy) -> None:
        self._engines = engines
        self._proxy = proxy

    def store(self, prompts: list[list[int]]) -> None:
        self._proxy.bytes_per_s = 0.0
        for name, engine in self._engines.items():
            for prompt in prompts:
                engine.call(["ask", [prompt]])
            print(f"{name}: {len(prompts)} prompts stored", flush=True)

    def ask(self, arm: str, prompts: list[list[int]], place: str, speed: float) -> list[float]:
        """The seconds to the first tokens, at this speed (MB/s)."""
        engine = self._engines[ENGINE_OF[arm]]
        self._proxy.bytes_per_s = 0.0
        engine.call(["forget"])
        if place == "mix":
            for prompt in prompts:
                engine.call(["ask", [prompt[: len(prompt) // 2]], NO_LOAD if ENGINE_OF[arm] != "off" else None])
        self._proxy.bytes_per_s = speed * 1e6
        seconds: list[float] = engine.call(["ask", prompts, NO_LOAD if arm == "compute" else None])
        return seconds

    def compare(self, speeds: list[float], prompts: dict[int, list[list[int]]], rounds: int) -> list[dict[str, Any]]:
        points = []
        for speed in speeds:
            for _ in range(2):  # the tiers' speed is learned anew
                for arm in ("always", "ours"):
                    self.ask(arm, prompts[min(prompts)][:1], "s3", speed)
            for tokens, documents in prompts.items():
                for place in PLACES:
                    taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
                    for turn in range(rounds):
                        for arm in ARMS if turn % 2 else ARMS[::-1]:
                            taken[arm] += self.ask(arm, documents[:1], place, speed)
                    points.append(point({"speed": speed, "tokens": tokens, "place": place}, taken))
        return points

    def crowd(self, speed: float, documents: list[list[int]], rounds: int) -> dict[str, Any]:
        """The same of several requests at once: by arm, the seconds to the last of their first tokens."""
        taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for turn in range(rounds):
            for arm in ARMS if turn % 2 else ARMS[::-1]:
                taken[arm].append(max(self.ask(arm, documents, "s3", speed)))
        where = {"speed": speed, "tokens": len(documents[0]), "place": f"s3, {len(documents)} at once"}
        return point(where, taken)


def point(where: dict[str, Any], taken: dict[str, list[float]]) -> dict[str, Any]:
    middle = {arm: median(values) for arm, values in taken.items()}
    found = {
        **where,
        "seconds": middle,
        "to_better": middle["ours"] / min(middle["always"], middle["compute"]),
        "to_off": middle["ours"] / middle["off"],
        "noise": middle["again"] / middle["off"],
        "all": taken,
    }
    print(
        f"{where['speed'] or 'unlimited':>9} MB/s {where['tokens']:>5} tokens {where['place']:>16}: "
        + " ".join(f"{arm} {middle[arm]:.2f}" for arm in ARMS)
        + f"; ours to the better {found['to_better']:.2f}, to off {found['to_off']:.2f}, A/A {found['noise']:.2f}",
        flush=True,
    )
    return found


def plot(points: list[dict[str, Any]], to: Path) -> None:
    """A panel for each speed and place: seconds to the first token by the prompt's length."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    speeds = list(dict.fromkeys(each["speed"] for each in points))
    figure, panels = plt.subplots(
        len(PLACES), len(speeds), figsize=(3.2 * len(speeds), 6), layout="constrained", sharex=True, squeeze=False
    )
    for row, place in zip(panels, PLACES, strict=True):
        for axes, speed in zip(row, speeds, strict=True):
            here = [each for each in points if (each["speed"], each["place"]) == (speed, place)]
            for arm in ("always", "compute", "ours"):
                lengths = [each["tokens"] for each in here]
                axes.plot(lengths, [each["seconds"][arm] for each in here], marker="o", label=arm)
            axes.set_title(f"{place}, {f'{speed:g} MB/s' if speed else 'not limited'}")
            axes.set_yscale("log")
    panels[0][0].legend()
    figure.supxlabel("tokens of the prompt")
    figure.supylabel("seconds to the first token")
    figure.savefig(to, dpi=120)


def document(seed: str, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 40000) for _ in range(tokens)]


def run(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from nixl_tiers.testing.servers import moto_server

    prompts = {tokens: [document(f"{tokens}", tokens)] for tokens in given.lengths}
    crowd = [document(f"crowd {number}", given.lengths[0]) for number in range(CROWD)]
    with moto_server() as server:
        os.environ.update(server.env)
        proxy = LimitedProxy(server.port)
        bucket = server.make_bucket("crossover")
        engines: dict[str, EngineProcess] = {}
        try:
            for name, prefill in (("off", None), ("always", 1), ("ours", None)):
                endpoint = f"http://127.0.0.1:{proxy.port}"
                s3 = {"type": "s3", "bucket": bucket, "prefix": name, "endpoint": endpoint, "capacity": "8GiB"}
                tiers = [] if name == "off" else [{"type": "cpu", "capacity": "1GiB"}, s3]
                plan = json.dumps({"tiers": tiers, "prefill": prefill})
                engines[name] = EngineProcess("bench.crossover", "engine", plan, log=scratch / f"{name}.log")
            for engine in engines.values():
                engine.answer()
            bench = Bench(engines, proxy)
            bench.store([*(each for documents in prompts.values() for each in documents), *crowd])
            points = bench.compare(given.speeds, prompts, given.rounds)
            at_once = bench.crowd(given.crowd_speed, crowd, given.rounds)
        finally:
            for engine in engines.values():
                engine.close()
    return {"points": points, "at_once": at_once, "rounds": given.rounds, "machine": machine()}


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few points, 3 rounds")
    parser.add_argument("--speeds", type=numbers, default=[20, 100, 0], help="MB/s; 0: not limited")
    parser.add_argument("--lengths", type=numbers, default=[500, 1500, 3500, 7000], help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--crowd-speed", type=int, default=20, help="MB/s, of the requests at once")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    given = parser.parse_args()
    if given.quick:
        given.speeds, given.lengths, given.rounds = [20, 100, 0], [500, 1500], 3
    given.out = given.out.resolve()  # a tier wants an absolute path
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.out) as scratch:
        found = run(given, Path(scratch))
    (given.out / "crossover.json").write_text(json.dumps(found, indent=1))
    plot(found["points"], given.out / "crossover.png")
    print(f"written: {given.out / 'crossover.json'}, {given.out / 'crossover.png'}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        stream = claim_stdout()
        child = Engine(json.loads(sys.argv[2]))
        answer_requests(stream, "ready", child.carry_out)
    else:
        sys.exit(main())
