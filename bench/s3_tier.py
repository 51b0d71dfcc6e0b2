"""How fast the S3 tier moves rows, compared with boto3 with 16 threads on the same objects: MB/s, medians, interleaved.

    python -m bench.s3_tier [--server weed|memory | --endpoint URL --bucket B] [--chunks 65536,262144,2949120,8388608]
                                [--megabytes 128] [--rounds 7] [--delay-ms 0] [--no-first] [--json FILE]

Without an endpoint: a SeaweedFS of its own on this machine, which then shares the cores with both sides, or a server
that does next to nothing (bench/memory_s3.py). Rows hold random bytes: a SeaweedFS compresses what looks like text, of
one side and not of the other. The tier seals every row that it stores, lands downloads in staging rows, verifies and
copies them; boto3 does none of that. CPU is that of the client's process and that of the server, in seconds a GB. Only
ratios within one run are meaningful; a ratio is the median of those of the rounds. `--delay-ms`: answers arrive this
much later, through a proxy: a distant server. The first loads are those of a new process, with its tier or client made
before. Then, of rows of the first size: how long a restarted engine needs from its start to its first hit and to its
first store, and how many of 200 new prompts a second, each a question whether its first chunk is stored, are answered
within `probe_s`, where as many are open at once as the engine would have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from unittest import mock

import boto3
import numpy as np
from botocore.config import Config

from bench.memory_s3 import memory_server
from bench.rounds import DIRECTIONS, Side, rates, ratio, rotations, take_turns
from bench.slow_path import slow_path
from nixl_tiers.base.chunk import Geometry, Outcome, object_name
from nixl_tiers.base.policies import DEFAULT_PROBE_S
from nixl_tiers.config.schema import S3Config
from nixl_tiers.core.existence import _TierChecks
from nixl_tiers.core.types import Limits
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.s3 import stored
from nixl_tiers.tiers.s3.tier import S3Tier
from tests.support.servers import moto_server, seaweedfs_server

SIDES = ("tier", "boto3")
THREADS = 16
PROMPTS_A_S, PROMPTS_S = 200, 5.0
POLL_S = 0.0003
NAMESPACE = bytes(range(16))


def key_of(row: int) -> bytes:
    return b"row-%08d" % row


class Tier(Side):
    """All rows in one batch, polled as a mover does."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion) -> None:
        self._rows = region.rows
        self._tier = S3Tier(config, geometry, region)
        self._tier.open(NAMESPACE, 0)

    def store(self) -> None:
        self._finish(self._tier.store([Move(row, row, key_of(row), 0, True) for row in range(self._rows)]))

    def store_one(self, key: bytes) -> None:
        self._finish(self._tier.store([Move(0, 0, key, 0, True)]))

    def load(self) -> None:
        self._finish(self._tier.load([Move(row, row, key_of(row)) for row in range(self._rows)]))

    def close(self) -> None:
        self._tier.close()

    def ask(self, keys: list[bytes]) -> int:
        """How many of these are there."""
        self._tier.check_existence(0, keys, True)
        while not self._tier.existence_answers():
            time.sleep(POLL_S)
        return len(self._tier.found())

    def new_prompts(self, seconds: float) -> tuple[float, float]:
        """PROMPTS_A_S unknown keys a second: the share that is answered in time, and the median of those, in seconds.
        What finds no room is lost."""
        checks = _TierChecks(mock.Mock(), Limits(check_timeout_s=DEFAULT_PROBE_S))
        sent_s, took_s, lost = dict[int, float](), list[float](), 0
        began_s, number = time.monotonic(), 0
        while (now := time.monotonic()) < began_s + seconds or sent_s:
            while number < PROMPTS_A_S * min(seconds, now - began_s):
                number += 1
                if len(sent_s) >= checks.most:
                    lost += 1
                    continue
                sent_s[number] = now
                self._tier.check_existence(number, [b"new-%08d" % number], True)
            for answer in self._tier.existence_answers():
                took_s.append(now - sent_s.pop(answer.check_id))
                checks.took(took_s[-1])
            time.sleep(POLL_S)
        in_time = [each for each in took_s if each <= DEFAULT_PROBE_S]
        return len(in_time) / number, statistics.median(took_s)

    def _finish(self, batch_id: int) -> None:
        while True:
            for done in self._tier.poll():
                assert done.batch_id == batch_id
                if not set(done.outcomes) <= {
                    Outcome.OK,
                    Outcome.FOUND,
                }:  # a fast failure must not pass for a fast server
                    raise SystemExit(f"the tier failed: {done.outcomes}")
                return
            time.sleep(max(POLL_S, self._tier.poll_s))


class Boto(Side):
    """The same objects with put_object and get_object on threads, one call a row."""

    def __init__(self, config: S3Config, region: HostRegion, threads: int = THREADS) -> None:
        self._config = config
        self._rows = region.rows_view
        self._pool = ThreadPoolExecutor(threads)
        self._client = boto3.client(
            "s3",
            endpoint_url=config.endpoint,
            region_name=config.region or "us-east-1",
            config=Config(
                max_pool_connections=threads,
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def store(self) -> None:
        list(self._pool.map(self._put, range(len(self._rows))))

    def load(self) -> None:
        list(self._pool.map(self._get, range(len(self._rows))))

    def close(self) -> None:
        for row in range(len(self._rows)):
            self._client.delete_object(Bucket=self._config.bucket, Key=self._name(row))

    def _name(self, row: int) -> str:
        return f"{self._config.prefix}/{NAMESPACE.hex()}/{object_name(key_of(row))}"

    def _put(self, row: int) -> None:
        self._client.put_object(Bucket=self._config.bucket, Key=self._name(row), Body=self._rows[row].tobytes())

    def _get(self, row: int) -> None:
        body = self._client.get_object(Bucket=self._config.bucket, Key=self._name(row))["Body"]
        view, at = memoryview(self._rows[row]), 0
        while at < len(view):
            count = body.readinto(view[at:])
            if not count:
                raise SystemExit(f"boto3 got {at} bytes of {len(view)}")
            at += count


def make(who: str, config: S3Config, geometry: Geometry, region: HostRegion) -> Tier | Boto:
    if who == "tier":
        return Tier(config, geometry, region)
    return Boto(config.model_copy(update={"prefix": "bench-boto3"}), region)


def bench(
    config: S3Config, payload_bytes: int, total_bytes: int, rounds: int, *, server: int | None, first: bool
) -> dict[str, Any]:
    """What one chunk size takes. `server`: its process ID, if it is on this machine. `first`: whether to measure the
    first loads too."""
    geometry = Geometry(1, payload_bytes)
    rows = max(2 * THREADS, total_bytes // geometry.row_bytes)
    answer: dict[str, Any] = {"payload_bytes": payload_bytes, "rows": rows}
    gigabytes = rows * payload_bytes / 1e9
    with filled(geometry, rows) as region, contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {who: make(who, config, geometry, region) for who in SIDES}
        for side in sides.values():
            stack.callback(side.close)
        taken = take_turns(sides, rounds, server=server)
        firsts = first_loads(config, payload_bytes, rows, rounds) if first else {}
    for what in DIRECTIONS:
        for name, turns in taken[what].items():
            cpu_s = statistics.median(turn.cpu_s for turn in turns)
            answer[f"{name}_{what}_mb_s"] = round(rates(turns, rows * payload_bytes).median * 1e3, 1)
            answer[f"{name}_{what}_cpu_s_a_gb"] = round(cpu_s / gigabytes, 2)
            server_cpu_s = statistics.median(turn.server_cpu_s for turn in turns)
            answer[f"{name}_{what}_server_cpu_s_a_gb"] = round(server_cpu_s / gigabytes, 2)
        answer[f"{what}_ratio"] = round(ratio(taken[what]["tier"], taken[what]["boto3"]), 2)
    for name, times in firsts.items():
        seconds = (statistics.median(each) for each in zip(*times, strict=True))
        answer[f"{name}_first_load_s"], answer[f"{name}_second_load_s"] = (round(each, 4) for each in seconds)
    return answer


def filled(geometry: Geometry, rows: int) -> HostRegion:
    region = HostRegion.create(geometry, rows)
    noise = np.random.default_rng(0).integers(0, 256, geometry.row_bytes, np.uint8)
    for number, row in enumerate(region.rows_view):
        np.add(noise, np.uint8(number & 0xFF), out=row)
    return region


def first_loads(config: S3Config, payload_bytes: int, rows: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Of both sides, each time in a new process, in turns."""
    taken: dict[str, list[tuple[float, float]]] = {who: [] for who in SIDES}
    for _, who in rotations(SIDES, rounds):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            taken[who].append(pool.apply(first_load, (who, config, payload_bytes, rows)))
    return taken


def first_load(who: str, config: S3Config, payload_bytes: int, rows: int) -> tuple[float, float]:
    """Seconds of the first and of the second load in this process."""
    geometry = Geometry(1, payload_bytes)
    with filled(geometry, rows) as region:
        side = make(who, config, geometry, region)
        times = [time.perf_counter()]
        for _ in range(2):
            side.load()
            times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]


def restarts(config: S3Config, payload_bytes: int, rounds: int) -> dict[str, Any]:
    """What a restarted engine needs: seconds to its first hit, of 16 rows, and to its first store; and new prompts."""
    geometry = Geometry(1, payload_bytes)
    hits, stores = list[float](), list[float]()
    with filled(geometry, THREADS) as region:
        keys = [key_of(row) for row in range(THREADS)]
        side = Tier(config, geometry, region)
        side.store()
        for _ in range(rounds):
            side.close()
            began_s = time.perf_counter()
            side = Tier(config, geometry, region)
            if side.ask(keys) != THREADS:
                raise SystemExit("a restarted engine does not find its rows")
            side.load()
            hits.append(time.perf_counter() - began_s)
            side.store_one(b"restart-%d" % len(hits))
            stores.append(time.perf_counter() - began_s)
        share, median_s = side.new_prompts(PROMPTS_S)
        side.close()
    return {
        "restart_first_hit_s": round(statistics.median(hits), 4),
        "restart_first_store_s": round(statistics.median(stores), 4),
        "new_prompts_a_s": PROMPTS_A_S,
        "new_prompts_in_time": round(share, 4),
        "new_prompts_answer_s": round(median_s, 4),
    }


def line(result: dict[str, Any]) -> str:
    """One line of the table, for one chunk size."""
    text = f"{result['payload_bytes']:>9} {result['rows']:>5}"
    for what in DIRECTIONS:
        tier, boto = (result[f"{who}_{what}_mb_s"] for who in SIDES)
        cpu, server = (
            "/".join(f"{result[f'{who}_{what}_{of}cpu_s_a_gb']:.2f}" for who in SIDES) for of in ("", "server_")
        )
        text += f" | {tier:6.0f} {boto:6.0f} {result[f'{what}_ratio']:5.2f}x {cpu:>11} {server:>11}"
    if "tier_first_load_s" not in result:
        return text
    first = (f"{result[f'{who}_first_load_s']:.3f}/{result[f'{who}_second_load_s']:.3f}" for who in SIDES)
    return f"{text} | {', '.join(first)}"


class Place(NamedTuple):
    endpoint: str
    bucket: str
    server: int | None  # its process ID, if it is on this machine


class Server(Protocol):
    """What a bench uses of an S3 server that it starts."""

    @property
    def endpoint(self) -> str: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def pid(self) -> int | None: ...
    def make_bucket(self, name: str) -> str: ...


SERVERS: Final[Mapping[str, Callable[[], AbstractContextManager[Server]]]] = {
    "weed": seaweedfs_server,
    "moto": moto_server,
    "memory": memory_server,
}


@contextlib.contextmanager
def place(endpoint: str | None, bucket: str, server: str = "weed") -> Iterator[Place]:
    """Where to store; without an endpoint this server is started, and the environment has its credentials."""
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "2")
    if endpoint:
        yield Place(endpoint, bucket, None)
        return
    with SERVERS[server]() as started, mock.patch.dict(os.environ, started.env):
        yield Place(started.endpoint, started.make_bucket(bucket), started.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=list(SERVERS), default="weed", help="the S3 server to start here")
    parser.add_argument("--endpoint", help="an S3 server instead; credentials come from the AWS chain")
    parser.add_argument("--bucket", default="kv-bench", help="its bucket; objects go below bench-* and are removed")
    parser.add_argument("--chunks", default="65536,262144,2949120,8388608", help="payload sizes in bytes")
    parser.add_argument("--megabytes", type=int, default=128, help="how much each call transfers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="how much later answers arrive")
    parser.add_argument("--no-first", action="store_true", help="leave out the first loads of new processes")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

    found = []
    moved = "MB/s  boto3  ratio    CPU s/GB   server's"
    print(f"    chunk  rows |  {moved} |  {moved} | first/second load, s: tier, boto3")
    with contextlib.ExitStack() as stack:
        endpoint, bucket, server = stack.enter_context(place(arguments.endpoint, arguments.bucket, arguments.server))
        if arguments.delay_ms:
            endpoint = stack.enter_context(slow_path(endpoint, arguments.delay_ms / 1000))
        for size in map(int, arguments.chunks.split(",")):
            config = S3Config(type="s3", bucket=bucket, prefix="bench", endpoint=endpoint, capacity=1 << 40)
            result = bench(
                config,
                size,
                arguments.megabytes << 20,
                arguments.rounds,
                server=server,
                first=not arguments.no_first,
            )
            found.append(result)
            print(line(result), flush=True)
        size = int(arguments.chunks.split(",")[0])
        config = S3Config(type="s3", bucket=bucket, prefix="bench-restart", endpoint=endpoint, capacity=1 << 40)
        found.append(restarts(config, size, arguments.rounds))
        print(found[-1], flush=True)
        for prefix in ("bench", "bench-restart"):
            there = S3Config(type="s3", bucket=bucket, prefix=prefix, endpoint=endpoint, capacity=1 << 40)
            for namespace in stored.find(there, None):
                namespace.delete(lambda _: None)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
