"""What a listing of a prefix costs an S3 tier's mover: time, processor time and the interpreter lock.

    python -m bench.s3_listing [--rows 200000] [--rounds 3] [--json FILE]

A server in a process of its own lists `--rows` objects with keys of 36 bytes, from memory. In this process run, one
after the other: the first listing of a tier, those of an engine that gets the lease again, without changes, and
sweeps of the janitor. Each through boto3, as movers do it. Figures, medians over the rounds:

- `seconds`: of one listing, and microseconds an object; with a real server its answers' time comes on top;
- `cpu`: processor time of this process, microseconds an object;
- `longest call`: of a function written in C, in processor time: no other thread runs Python code meanwhile, unless that
  function releases the interpreter lock (reading from a socket does, parsing XML does not). From a round of its own,
  since it is slowed down by the measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from bench.mover_memory import CAPACITY, NAMESPACE, ROW_BYTES, keys
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.janitor import Janitor, JanitorIntervals
from nixl_tiers.tiers.s3.listing import FullListing, Listing
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.quota import PrefixQuota
from nixl_tiers.tiers.s3.usage import UploadQuota

PAGE_ROWS = 1000
NAMES = RowNames("kv")
OBJECT = (
    "<Contents><Key>{}</Key><LastModified>2026-11-22T12:00:00.000Z</LastModified>"
    '<ETag>"0123456789abcdef0123456789abcdef"</ETag><Size>{}</Size><StorageClass>STANDARD</StorageClass></Contents>'
)
INTERVALS = JanitorIntervals(renew_s=3600.0, usage_timeout_s=3600.0)


def serve(rows: int, port: Connection) -> None:
    """Be the server, until the process is killed."""
    names = sorted(NAMES.name(NAMESPACE, key) for key in keys(rows))
    small: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 20

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

        def do_HEAD(self) -> None:
            self._answer(200, b"")

        def do_PUT(self) -> None:
            small[urlsplit(self.path).path] = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(200, b"")

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            if "list-type" not in query:
                found = small.get(url.path)
                return self._answer(404 if found is None else 200, found or b"<Error><Code>NoSuchKey</Code></Error>")
            after = query.get("start-after", query.get("continuation-token", [""]))[0]
            at = bisect_right(names, after) if query["prefix"][0] <= after or not after else 0
            some = names[at : at + PAGE_ROWS] if names[0].startswith(query["prefix"][0]) else []
            more = bool(some) and some[-1] != names[-1]
            token = f"<NextContinuationToken>{some[-1]}</NextContinuationToken>" if more else ""
            body = "".join(OBJECT.format(name, ROW_BYTES) for name in some)
            return self._answer(
                200,
                f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{body}"
                "</ListBucketResult>".encode(),
            )

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"0"')
            self.send_header("Last-Modified", self.date_time_string())
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_port)
    server.serve_forever()


def measured(rows: int, work: Callable[[], None]) -> dict[str, float]:
    began_s, cpu_s = time.monotonic(), time.process_time()
    work()
    took_s, used_s = time.monotonic() - began_s, time.process_time() - cpu_s
    return {"seconds": took_s, "us_an_object": took_s / rows * 1e6, "cpu_us_an_object": used_s / rows * 1e6}


def longest_calls(work: Callable[[], None]) -> list[tuple[float, str]]:
    """(milliseconds, name) of the functions written in C that took longest in one call, longest first."""
    found: dict[str, float] = {}
    running: list[float] = []  # when each began; those that call Python code count as none, as that can be interrupted

    def profile(_: object, event: str, called: Any) -> None:
        if event == "c_call":
            running.append(time.thread_time())
        elif event == "call":
            running[:] = [float("inf")] * len(running)
        elif event in {"c_return", "c_exception"} and running:
            took_s = time.thread_time() - running.pop()
            found[called.__qualname__] = max(found.get(called.__qualname__, 0.0), took_s)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(((took_s * 1e3, name) for name, took_s in found.items()), reverse=True)[:5]


def listed(listing: Listing, client: Any) -> int:
    """What the control thread and the loop do; how many entries there were."""
    while not listing.done.is_set():
        listing.step(client, "kv-bench")
    return sum(len(batch) for batch in listing.entries(lambda: 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: int = options.rows
    ours, theirs = get_context("spawn").Pipe()
    server = get_context("spawn").Process(target=serve, args=(rows, theirs), daemon=True)
    server.start()
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
    endpoint = f"http://127.0.0.1:{ours.recv()}"
    control = S3Control(S3Config(type="s3", bucket="kv-bench", prefix="kv", endpoint=endpoint, capacity=CAPACITY))
    control.connect(30.0)
    gc.collect()
    gc.freeze()  # as a mover does
    served = (NAMESPACE, ROW_BYTES)
    found: dict[str, list[dict[str, float]]] = {"first listing": [], "re-listing": [], "janitor's sweep": []}
    longest: dict[str, list[tuple[float, str]]] = {}
    for number in range(options.rounds + 1):
        quota = PrefixQuota(NAMES, ROW_BYTES, CAPACITY)
        quota.serve(NAMESPACE, 0.0)

        def first(quota: PrefixQuota = quota) -> None:
            listing = FullListing(quota, NAMES, served, max_age_s=None, deleter=None)
            assert listed(listing, control.connection.client) == rows

        def again(quota: PrefixQuota = quota) -> None:
            listing = FullListing(quota, NAMES, served, max_age_s=None, deleter=None, differences_only=True)
            assert listed(listing, control.connection.client) == 0

        uploads = UploadQuota("bench", CAPACITY, ROW_BYTES)
        janitor = Janitor(
            lambda: control.connection.client,
            "kv-bench",
            "kv",
            quota=uploads,
            intervals=INTERVALS,
            denials=Denials("bench"),
        )
        janitor._lease.state._held, janitor._renew_at = (1, float("inf")), time.monotonic() + 3600.0

        def sweep(janitor: Janitor = janitor) -> None:
            janitor._sweep()
            assert janitor._rows == rows

        for name, work in (("first listing", first), ("re-listing", again), ("janitor's sweep", sweep)):
            if number:
                found[name].append(measured(rows, work))
            else:
                longest[name] = longest_calls(work)
    control.close()
    server.kill()
    figures = {
        name: {each: statistics.median(run[each] for run in runs) for each in runs[0]} for name, runs in found.items()
    }
    if options.json is not None:
        machine = {"rows": rows, "machine": platform.machine(), "python": platform.python_version()}
        options.json.write_text(json.dumps({**machine, **figures, "longest_calls_ms": longest}, indent=1))
    print(f"{rows:,} objects, {options.rounds} rounds, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'':18}{'seconds':>9}{'us/object':>11}{'cpu us/object':>15}   longest calls, ms")
    for name, each in figures.items():
        calls = ", ".join(f"{called} {took_ms:.1f}" for took_ms, called in longest[name][:3])
        print(
            f"{name:18}{each['seconds']:9.2f}{each['us_an_object']:11.1f}{each['cpu_us_an_object']:15.1f}   {calls}",
            flush=True,
        )


if __name__ == "__main__":
    main()
