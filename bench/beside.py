"""What a cascade of stores costs those that are waited for: a promotion, and a hit in host memory, quiet and beside it.

    python -m bench.beside [--tier file|s3] [--path DIR] [--chunk 1048576] [--megabytes 96] [--rounds 9]
        [--trees DIR,DIR] [--spin N] [--json FILE]

Each round puts new chunks, which are queued for the tier, and at once times a `get` of a third as many others: of
chunks that only the tier has (promotion), and of chunks that the host has (hit). Quiet: the same after a `flush`.

With `s3` a hit is asked for when 16 uploads have ended, and is also timed beside the same upload by another client
(boto3 on 16 threads with nice 10, as our uploads have) at the same moment. That takes out what the server costs, which
shares the cores: what is ours is hit beside our cascade / hit beside the other client's.

`--trees`: other checkouts to compare, whose code runs in processes of their own, in turns. `--spin`: so many processes
that keep a core busy meanwhile, as vLLM's threads do. `s3`: a SeaweedFS on this machine, which shares its cores.
`--json` is written after each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

import nixl_tiers
from bench.machine import machine
from bench.rounds import Spread

THREADS = 16
NICE = 10  # nixl_tiers/tiers/nixl_agent.py
HOST = 16  # the host holds so many times what is asked for
CASCADE = 3  # what is put beside it is so many times as much


class Side:
    """One store, and its rounds."""

    def __init__(self, tier: dict[str, Any], chunk: int, nbytes: int) -> None:
        count = max(4, nbytes // chunk)
        self._other = OtherClient(tier, chunk, CASCADE * count) if tier["type"] == "s3" else None
        cpu = {"type": "cpu", "capacity": HOST * count * (chunk + 8192)}
        self._store = nixl_tiers.open({"on_reset": "keep", "wait_s": 60, "tiers": [cpu, tier]}, chunk, "beside")
        self._chunks = np.random.default_rng(0).integers(0, 256, (CASCADE * count, chunk), np.uint8)
        self._out = np.zeros_like(self._chunks[:count])
        self._puts = 0
        self._stored = 0.0
        while not all(numbers["up"] and not numbers["listing"] for numbers in self._store.stats().values()):
            time.sleep(0.05)
        self._old = self._put()[:count]
        self._store.flush()

    def round(self) -> dict[str, float]:
        """Seconds of each case, and of the flush after the promotion, which ends the cascade."""
        took = {}
        for how in ("quiet", "beside"):
            self._store.reset()  # only the tier has the chunks that are asked for
            self._put()
            if how == "quiet":
                self._store.flush()
            took[f"promotion, {how}"] = self._get(self._old)
            began = time.perf_counter()
            self._store.flush()
            took[f"flush after it, {how}"] = time.perf_counter() - began
            self._stored = self._count_stored()
            self._put()
            if how == "quiet":
                self._store.flush()
            elif self._other is not None:
                self._wait_for_uploads()
            took[f"hit, {how}"] = self._get(self._old)
            self._store.flush()
        if self._other is not None:
            self._put()
            self._store.flush()
            self._other.begin()
            took["hit, other client"] = self._get(self._old)
            self._other.end()
        return took

    def close(self) -> None:
        self._store.close()
        if self._other is not None:
            self._other.close()

    def _count_stored(self) -> float:
        return sum(numbers["stored"] for name, numbers in self._store.stats().items() if name != "cpu")

    def _wait_for_uploads(self) -> None:
        while self._count_stored() < self._stored + THREADS:
            time.sleep(0.001)

    def _put(self) -> list[bytes]:
        self._puts += 1
        keys = [b"%d-%d" % (self._puts, number) for number in range(len(self._chunks))]
        assert self._store.put(keys, self._chunks) == len(keys)
        return keys

    def _get(self, keys: list[bytes]) -> float:
        began = time.perf_counter()
        if not all(self._store.get(keys, self._out)):
            raise SystemExit(f"a chunk is a miss: {self._store.stats()}")
        return time.perf_counter() - began


class OtherClient:
    """A process that uploads as many bytes to the same bucket when it is told to."""

    def __init__(self, tier: dict[str, Any], chunk: int, count: int) -> None:
        upload = json.dumps({"endpoint": tier["endpoint"], "bucket": tier["bucket"], "chunk": chunk, "count": count})
        command = [sys.executable, str(Path(__file__).absolute()), "--upload", upload]
        self._process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
        self._expect("ready")

    def begin(self) -> None:
        """Returns when THREADS uploads have ended."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._expect("begun")

    def end(self) -> None:
        self._expect("done")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{word}\n", "the other client failed"


def upload(endpoint: str, bucket: str, chunk: int, count: int) -> None:
    """The other client: uploads everything for each line of its standard input."""
    import boto3
    from botocore.config import Config

    os.nice(NICE)
    config = Config(max_pool_connections=THREADS, request_checksum_calculation="when_required")
    client = boto3.client("s3", endpoint_url=endpoint, config=config)
    body = np.random.default_rng(1).integers(0, 256, chunk, np.uint8).tobytes()
    pool = ThreadPoolExecutor(THREADS)

    def put(number: int) -> None:
        client.put_object(Bucket=bucket, Key=f"other/{number}", Body=body)

    list(pool.map(put, range(THREADS)))  # connects
    print("ready", flush=True)
    for _ in sys.stdin:
        for number, one in enumerate(as_completed([pool.submit(put, number) for number in range(count)]), 1):
            one.result()
            if number == THREADS:
                print("begun", flush=True)
        print("done", flush=True)


def serve(arguments: argparse.Namespace) -> None:
    """One side, in a process of its own: a round for each line of its standard input."""
    side = Side(json.loads(arguments.serve), arguments.chunk, arguments.megabytes << 20)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(side.round()), flush=True)
    side.close()


def tier_of(kind: str, folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    if kind == "file":
        return {"type": "file", "path": str(folder), "capacity": 8 << 30, "min_free": 0}
    from tests.support.servers import seaweedfs_server

    server = stack.enter_context(seaweedfs_server())
    os.environ |= server.env
    return {"type": "s3", "endpoint": server.endpoint, "bucket": server.make_bucket("beside"), "capacity": 8 << 30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("file", "s3"), default="file")
    parser.add_argument("--path", type=Path, help="a directory on the disk to measure (default: a temporary one)")
    parser.add_argument("--chunk", type=int, default=1 << 20, help="bytes")
    parser.add_argument("--megabytes", type=int, default=96, help="put, and asked for, in each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trees", default=str(Path(__file__).parents[1]), help="checkouts, comma-separated")
    parser.add_argument("--spin", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--upload", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    if arguments.upload:
        upload(**json.loads(arguments.upload))
        return
    trees = arguments.trees.split(",")
    found: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
    with contextlib.ExitStack() as stack:
        for _ in range(arguments.spin):
            spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(spinner.kill)
        sides = {}
        for tree in trees:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.path)))
            tier = tier_of(arguments.tier, folder, stack)
            python = Path(tree) / ".venv/bin/python"
            command = [str(python), str(Path(__file__).absolute()), "--serve", json.dumps(tier)]
            command += ["--chunk", str(arguments.chunk), "--megabytes", str(arguments.megabytes)]
            side = subprocess.Popen(
                command, cwd=tree, env=os.environ | {"PYTHONPATH": tree}, stdin=-1, stdout=-1, text=True
            )
            stack.callback(side.kill)
            sides[tree] = side
            assert side.stdout is not None
            assert side.stdout.readline() == "ready\n", f"{tree} failed"
        for number in range(arguments.rounds + 1):
            for tree in trees if number % 2 else reversed(trees):
                stdin, stdout = sides[tree].stdin, sides[tree].stdout
                assert stdin is not None
                assert stdout is not None
                stdin.write("\n")
                stdin.flush()
                took = json.loads(stdout.readline())
                if number:
                    found[tree].append(took)
            if arguments.json:
                arguments.json.write_text(json.dumps({"machine": machine(), "rounds": found}, indent=2))
    for tree, rounds in found.items():
        print(tree)
        for case in rounds[0]:
            times = sorted(1000 * took[case] for took in rounds)
            print(f"  {case:>24}: {statistics.median(times):7.1f} ms ({times[len(times) // 4]:.1f} to {times[-1]:.1f})")
        for other in ("quiet", "other client"):
            if f"hit, {other}" in rounds[0]:
                ratios = Spread.of([took["hit, beside"] / took[f"hit, {other}"] for took in rounds])
                print(f"  hit, beside / {other}: {ratios.median:.2f} ({ratios.low:.2f} to {ratios.high:.2f})")


if __name__ == "__main__":
    main()
