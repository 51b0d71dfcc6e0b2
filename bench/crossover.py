"""Load or recompute: time to first token by prompt length and by the speed of storage. Real vLLM on a CPU.

    python -m bench.crossover [--quick] [--speeds 20,100,0] [--lengths 500,1500,3500,7000] [--places s3,mix,file]
                              [--rounds 7] [--out DIR]

An S3 server (moto) behind a proxy whose speed is limited, over all connections together, to so many MB/s (0: not at
all), and a file tier that reports its loads as if its disk were that slow. A prompt's chunks lie on S3 (`s3`), in files
(`file`), or half of them in host memory and the rest on S3 (`mix`). Arms, each once a round, in a random order:

- `off`: an engine without tiers; `again`: the same once more. What they differ by is the noise (A/A);
- `always`: an engine that is told that computing is very slow, so that it loads all it can;
- `compute`: the engine of `ours`, but the request asks for `load: none`;
- `ours`: the engine measures what computing costs, and chooses.

Before a measured request vLLM's own prefix cache and the engine's host memory are emptied (`on_reset: keep`), and for
`mix` the first half is computed again, without a load. After a change of speed the tiers get some seconds in which
requests ask for their rows, as in a service (SETTLE_S); the first of these say what a change costs. The last table is
of 8 requests at once at one speed: seconds to the last of their first tokens, requests a second, the 99th percentile.

Ours should be at most 1.1 times the better of `always` and `compute` everywhere, and 1.05 times `off`. Writes
crossover.json, which has for each request of `ours` what was expected and what it took (`Trace` in
bench/crossover_engine.py) and processor seconds for all, and crossover.png. `--quick` takes about 7 minutes on two
quiet cores; with all it takes an hour or more.
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
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.crossover_engine import Engine
from bench.engine_process import EngineProcess, answer_requests, claim_stdout
from bench.machine import machine
from bench.rounds import cpu_seconds

PLACES: Final = ("s3", "mix", "file")
ARMS: Final = ("off", "always", "compute", "ours", "again")
ENGINE_OF: Final = {"off": "off", "again": "off", "always": "always", "compute": "ours", "ours": "ours"}
CROWD: Final = 8
PIECE: Final = 64 << 10
SETTLE_S: Final = 10.0

Answer = dict[str, Any]


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


class Media:
    """The speed of S3 and of the file tiers. `server`: the process ID of the S3 server."""

    def __init__(self, proxy: LimitedProxy, file_speed: Path, server: int) -> None:
        self._proxy, self._file_speed, self._server = proxy, file_speed, server
        self.limit(0)

    def limit(self, megabytes_per_s: float) -> None:
        self._proxy.bytes_per_s = megabytes_per_s * 1e6
        draft = self._file_speed.with_suffix(".new")
        draft.write_text(str(megabytes_per_s))
        draft.rename(self._file_speed)

    def cpu_s(self) -> float:
        """Processor seconds of the server and of the proxy, which an engine's machine does not pay for."""
        return cpu_seconds([self._server])


class Bench:
    def __init__(self, engines: dict[str, EngineProcess], media: Media) -> None:
        self._engines = engines
        self._media = media
        self._order = random.Random(13)

    def store(self, prompts: list[list[int]]) -> None:
        """And one more: vLLM completes the stores of a step in the next one."""
        for name, engine in self._engines.items():
            for prompt in [*prompts, document("last", 200)]:
                engine.call(["ask", [prompt]])
            print(f"{name}: {len(prompts)} prompts stored", flush=True)

    def ask(self, arm: str, prompts: list[list[int]], place: str, speed: float) -> Answer:
        """What `Engine.traced` says of these prompts, asked at once, at this speed (MB/s)."""
        name = ENGINE_OF[arm]
        engine = self._engines[name]
        self._media.limit(0)
        engine.call(["forget"])
        if place == "mix":
            for prompt in prompts:
                engine.call(["ask", [prompt[: len(prompt) // 2]], load_from([]) if name != "off" else None])
        self._media.limit(speed)
        sources = [] if arm == "compute" else ["file" if place == "file" else "s3"]
        others_s = self._media.cpu_s()
        answer: Answer = engine.call(["traced", prompts, load_from(sources) if name != "off" else None])
        return answer | {"storage_cpu_s": round(self._media.cpu_s() - others_s, 3)}

    def rounds(self, prompts: list[list[int]], place: str, speed: float, rounds: int) -> dict[str, list[Answer]]:
        taken: dict[str, list[Answer]] = {arm: [] for arm in ARMS}
        for _ in range(rounds):
            for arm in self._order.sample(ARMS, len(ARMS)):
                taken[arm].append(self.ask(arm, prompts, place, speed))
        return taken

    def settle(self, prompt: list[int], places: Sequence[str], speed: float) -> list[Answer]:
        """The speed has changed: what the first requests of `ours` said."""
        sources = dict.fromkeys("file" if place == "file" else "s3" for place in places)
        answers, until_s = [], time.monotonic() + SETTLE_S * len(sources)
        while time.monotonic() < until_s:
            for place in sources:
                answers.append(self.ask("ours", [prompt], place, speed))
                self.ask("always", [prompt], place, speed)
            time.sleep(0.5)
        return answers

    def compare(
        self, speeds: list[float], prompts: dict[int, list[int]], places: Sequence[str], rounds: int
    ) -> list[dict[str, Any]]:
        points = []
        for speed in speeds:
            changed = self.settle(prompts[min(prompts)], places, speed)
            for tokens, prompt in prompts.items():
                for place in places:
                    taken = self.rounds([prompt], place, speed, rounds)
                    points.append(point({"speed": speed, "tokens": tokens, "place": place}, taken))
            points[-1]["after_the_change"] = changed
        return points

    def crowd(self, speed: float, documents: list[list[int]], rounds: int) -> dict[str, Any]:
        """The same of several requests at once: by arm, the seconds to the last of their first tokens."""
        self.settle(documents[0], ["s3"], speed)
        taken = self.rounds(documents, "s3", speed, rounds)
        found = point({"speed": speed, "tokens": len(documents[0]), "place": f"s3, {len(documents)} at once"}, taken)
        for arm, answers in taken.items():
            seconds = sorted(each for answer in answers for each in answer["seconds"])
            total_s = sum(max(answer["seconds"]) for answer in answers)
            late_s = seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)]
            found.setdefault("requests_per_s", {})[arm] = len(seconds) / total_s
            found.setdefault("p99_s", {})[arm] = late_s
            print(f"{arm:>9}: {len(seconds) / total_s:.2f} requests/s, p99 {late_s:.2f} s", flush=True)
        return found


def load_from(tiers: list[str]) -> dict[str, Any]:
    """kv_transfer_params of a request that loads from these tiers only; from nowhere if there are none."""
    return {"nixl_tiers": {"load": tiers or "none"}}


def point(where: dict[str, Any], taken: dict[str, list[Answer]]) -> dict[str, Any]:
    seconds = {arm: [max(answer["seconds"]) for answer in answers] for arm, answers in taken.items()}
    middle = {arm: median(values) for arm, values in seconds.items()}
    cpu = {
        name: {arm: round(median(answer[name] for answer in answers), 3) for arm, answers in taken.items()}
        for name in ("cpu_s", "movers_cpu_s", "storage_cpu_s")
    }
    found = {
        **where,
        "seconds": middle,
        "to_better": middle["ours"] / min(middle["always"], middle["compute"]),
        "to_off": middle["ours"] / middle["off"],
        "noise": middle["again"] / middle["off"],
        "all": seconds,
        **cpu,
        "ours": taken["ours"],
    }
    print(
        f"{where['speed'] or 'unlimited':>9} MB/s {where['tokens']:>5} tokens {where['place']:>16}: "
        + " ".join(f"{arm} {middle[arm]:.2f}" for arm in ARMS)
        + f"; ours to the better {found['to_better']:.2f}, to off {found['to_off']:.2f}, A/A {found['noise']:.2f}; "
        + expected(taken["ours"][-1]),
        flush=True,
    )
    return found


def expected(answer: Answer) -> str:
    """What was expected of the first request."""
    chosen = next((event for event in answer["events"] if event[1] == "chooses"), None)
    if chosen is None:
        return "nothing to choose"
    what = chosen[4]
    return f"last loads {chosen[2]} of {chosen[3]}: wait {what['wait_s']:.2f}, then compute {what['compute_s'][1]:.2f}"


def plot(points: list[dict[str, Any]], to: Path) -> None:
    """A panel for each speed and place: seconds to the first token by the prompt's length."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    speeds = list(dict.fromkeys(each["speed"] for each in points))
    places = list(dict.fromkeys(each["place"] for each in points))
    size = (3.2 * len(speeds), 3 * len(places))
    figure, panels = plt.subplots(
        len(places), len(speeds), figsize=size, layout="constrained", sharex=True, squeeze=False
    )
    for row, place in zip(panels, places, strict=True):
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
    from tests.support.servers import moto_server

    prompts = {tokens: document(f"{tokens}", tokens) for tokens in given.lengths}
    crowd = [document(f"crowd {number}", given.lengths[0]) for number in range(CROWD)]
    with moto_server() as server:
        os.environ.update(server.env)
        proxy = LimitedProxy(server.port)
        media = Media(proxy, scratch / "speed", server.pid or 0)
        bucket = server.make_bucket("crossover")
        engines: dict[str, EngineProcess] = {}
        try:
            for name, prefill in (("off", None), ("always", 1), ("ours", None)):
                endpoint = f"http://127.0.0.1:{proxy.port}"
                s3 = {"type": "s3", "bucket": bucket, "prefix": name, "endpoint": endpoint, "capacity": "8GiB"}
                file = {"type": "tests.support.slowed_file:SlowedFileConfig", "path": str(scratch / f"{name}-files")}
                file |= {"capacity": "8GiB", "speed": str(scratch / "speed"), "min_free": 0}
                storage = [file, s3] if "file" in given.places else [s3]
                tiers = [] if name == "off" else [{"type": "cpu", "capacity": "1GiB"}, *storage]
                plan = json.dumps({"tiers": tiers, "prefill": prefill})
                engines[name] = EngineProcess("bench.crossover", "engine", plan, log=scratch / f"{name}.log")
            for engine in engines.values():
                engine.answer()
            bench = Bench(engines, media)
            bench.store([*prompts.values(), *crowd])
            points = bench.compare(given.speeds, prompts, given.places, given.rounds)
            at_once = bench.crowd(given.crowd_speed, crowd, given.rounds)
        finally:
            for engine in engines.values():
                engine.close()
    return {"points": points, "at_once": at_once, "rounds": given.rounds, "machine": machine()}


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few points")
    parser.add_argument("--speeds", type=numbers, default=[20, 100, 0], help="MB/s; 0: not limited")
    parser.add_argument("--lengths", type=numbers, default=[500, 1500, 3500, 7000], help="tokens")
    parser.add_argument("--places", type=lambda text: text.split(","), default=list(PLACES), help="of the prompts")
    parser.add_argument("--rounds", type=int, help="7 by default, with --quick 3")
    parser.add_argument("--crowd-speed", type=int, default=20, help="MB/s, of the requests at once")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    given = parser.parse_args()
    if given.quick:
        given.speeds, given.lengths = [20, 100, 0], [500, 1500]
    given.rounds = given.rounds or (3 if given.quick else 7)
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
