"""How fast the S3 tier moves rows, compared with boto3 with 16 threads on the same objects: MB/s, medians, interleaved.

    python -m bench.s3_tier [--endpoint URL --bucket B] [--chunks 65536,262144,2949120,8388608] [--megabytes 128]
                                [--rounds 7] [--json FILE]

Without an endpoint: a SeaweedFS of its own on this machine, which then shares the cores with both sides. The tier
seals every row that it stores, lands downloads in staging rows, verifies and copies them; boto3 does none of that. CPU
is that of the client's process alone, in milliseconds a row. Only ratios within one run are meaningful.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from nixl_tiers.chunk import Geometry, Outcome, object_name
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.testing.servers import seaweedfs_server
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.s3.tier import S3Tier

THREADS = 16
POLL_S = 0.0003
NAMESPACE = bytes(range(16))


def key_of(row: int) -> bytes:
    return b"row-%08d" % row


class Tier:
    """All rows in one batch, polled as a mover does."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion) -> None:
        self._rows = region.rows
        self._tier = S3Tier(config, geometry, region)
        self._tier.open(NAMESPACE, 0)
        for batch in self._tier.list_rows():
            if not batch:
                time.sleep(0.01)

    def store(self) -> None:
        self._finish(self._tier.store([Move(row, row, key_of(row), 0, True) for row in range(self._rows)]))

    def load(self) -> None:
        self._finish(self._tier.load([Move(row, row, key_of(row)) for row in range(self._rows)]))

    def close(self) -> None:
        self._tier.delete([(row, key_of(row)) for row in range(self._rows)])
        self._tier.close()

    def _finish(self, batch_id: int) -> None:
        while True:
            for done in self._tier.poll():
                assert done.batch_id == batch_id
                if set(done.outcomes) != {Outcome.OK}:  # a fast failure must not pass for a fast server
                    raise SystemExit(f"the tier failed: {done.outcomes}")
                return
            time.sleep(POLL_S)


class Boto:
    """The same objects with put_object and get_object on THREADS threads, one call a row."""

    def __init__(self, config: S3Config, region: HostRegion) -> None:
        self._config = config
        self._rows = region.rows_view
        self._pool = ThreadPoolExecutor(THREADS)
        self._client = boto3.client(
            "s3",
            endpoint_url=config.endpoint,
            region_name=config.region or "us-east-1",
            config=Config(
                max_pool_connections=THREADS,
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def store(self) -> None:
        list(self._pool.map(self._put, range(len(self._rows))))

    def load(self) -> None:
        list(self._pool.map(self._get, range(len(self._rows))))

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


def measure(calls: Sequence[Callable[[], None]], rounds: int) -> list[tuple[float, float]]:
    """Median wall and CPU seconds of each call; the calls take turns."""
    taken: list[list[tuple[float, float]]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for times, call in zip(taken, calls, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            if number:  # the first round connects
                times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return [(statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)) for times in taken]


def bench(config: S3Config, payload_bytes: int, total_bytes: int, rounds: int) -> dict[str, Any]:
    geometry = Geometry(1, payload_bytes)
    rows = max(2 * THREADS, total_bytes // geometry.row_bytes)
    with HostRegion.create(geometry, rows) as region:
        for row in range(rows):
            region.rows_view[row] = row * 37 % 251
        tier, boto = Tier(config, geometry, region), Boto(config, region)
        results = measure([tier.store, boto.store], rounds) + measure([tier.load, boto.load], rounds)
        tier.close()
    names = ("tier_store", "boto3_store", "tier_load", "boto3_load")
    answer: dict[str, Any] = {"payload_bytes": payload_bytes, "rows": rows}
    for name, (wall, cpu) in zip(names, results, strict=True):
        answer[f"{name}_mb_s"] = round(rows * payload_bytes / wall / 1e6, 1)
        answer[f"{name}_cpu_ms_a_row"] = round(1000 * cpu / rows, 3)
    return answer


def line(result: dict[str, Any]) -> str:
    """One line of the table, for one chunk size."""
    speeds, loads = "", []
    for what in ("store", "load"):
        tier, boto = (result[f"{who}_{what}_mb_s"] for who in ("tier", "boto3"))
        speeds += f" | {tier:11.0f} {boto:6.0f} {tier / boto:6.2f}x"
        loads.append("/".join(f"{result[f'{who}_{what}_cpu_ms_a_row']:.2f}" for who in ("tier", "boto3")))
    return f"{result['payload_bytes']:>9} {result['rows']:>5}{speeds} |  {', '.join(loads)}"


@contextlib.contextmanager
def place(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if arguments.endpoint:
        yield arguments.endpoint, arguments.bucket
        return
    with seaweedfs_server() as server:
        os.environ.update(server.env)
        yield server.endpoint, server.make_bucket(arguments.bucket)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", help="an S3 server; credentials come from the AWS chain")
    parser.add_argument("--bucket", default="kv-bench", help="its bucket; objects go below bench/ and are removed")
    parser.add_argument("--chunks", default="65536,262144,2949120,8388608", help="payload sizes in bytes")
    parser.add_argument("--megabytes", type=int, default=128, help="how much each call transfers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "2")

    found = []
    print("    chunk  rows |  store MB/s  boto3   ratio |   load MB/s  boto3   ratio |  CPU tier/boto3: store, load")
    with place(arguments) as (endpoint, bucket):
        for size in map(int, arguments.chunks.split(",")):
            config = S3Config(type="s3", bucket=bucket, prefix="bench", endpoint=endpoint, capacity=1 << 40)
            result = bench(config, size, arguments.megabytes << 20, arguments.rounds)
            found.append(result)
            print(line(result), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
