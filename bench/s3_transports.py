"""What moves objects for the S3 tier at least cost: NIXL's standard client, its CRT client, obstore and boto3.

    python -m bench.s3_transports [--server memory|weed] [--tls] [--rows 262144,2097152,8388608] [--megabytes 256]
        [--at-once 32] [--rounds 5] [--sides nixl crt obstore boto3] [--json FILE]

Each side moves the same rows between one region and a server on this machine, `at-once` at a time: NIXL's agents as the
tier has them (24 transfers each), its CRT client with `throughput_target_gbps` 100, obstore and boto3 with so many
threads. Nobody seals or verifies, and NIXL lands a row where it belongs, while obstore's and boto3's are copied there.
CPU is that of this process in seconds a GB, which hardly depends on what else runs; MB/s does. Medians of rounds in
turns. `--tls`: a SeaweedFS with a certificate of its own. obstore is no dependency: `pip install obstore`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from unittest import mock

from bench.memory_s3 import memory_server
from bench.rounds import DIRECTIONS, Side, Spread, rates, take_turns
from bench.s3_tier import Boto, filled
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.nixl_agent import Agent, Registration, Transfer, TransferState
from nixl_tiers.tiers.s3.client import Credentials
from nixl_tiers.tiers.s3.data import LANE_TRANSFERS, _parameters
from tests.support.certificates import self_signed
from tests.support.servers import seaweedfs_server

SIDES: Final = ("nixl", "crt", "obstore", "boto3")
HERE: Final = [name for name in SIDES if name != "obstore" or importlib.util.find_spec(name)]
POLL_S: Final = 0.0005
REGION: Final = "us-east-1"


def name_of(side: str, row: int) -> str:
    return f"transports/{side}/{row:08d}"


class Nixl(Side):
    """`crt`: loads by one agent with NIXL's CRT client, which has connections of its own number. Its stores are the
    standard client's: it writes in parts, each with a request of its own, whatever an object's size."""

    def __init__(self, place: S3Config, region: HostRegion, at_once: int, *, crt: bool) -> None:
        key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        parameters = _parameters(place, Credentials(key, secret, ""), REGION, place.endpoint)
        self._name = "crt" if crt else "nixl"
        self._writers = [Agent.obj(parameters) for _ in range(-(-at_once // LANE_TRANSFERS))]
        self._readers = self._writers
        if crt:
            self._readers = [Agent.obj(parameters | {"crtMinLimit": "1", "throughput_target_gbps": "100"})]
        for agent in {*self._writers, *self._readers}:
            agent.register_region(region)
        self._region, self._at_once = region, at_once

    def store(self) -> None:
        self._move("write", self._writers)

    def load(self) -> None:
        self._move("read", self._readers)

    def _move(self, what: str, agents: list[Agent]) -> None:
        row_bytes = self._region.geometry.row_bytes
        waiting = list(range(self._region.rows))[::-1]
        running: list[tuple[Agent, Registration, Transfer]] = []
        while waiting or running:
            while waiting and len(running) < self._at_once:
                row = waiting.pop()
                agent = agents[row % len(agents)]
                registration = agent.register_objects([name_of(self._name, row)], row_bytes)
                spans = [(self._region.address + row * row_bytes, row_bytes, 0, registration.devices[0])]
                running.append((agent, registration, getattr(agent, what)(spans)))
            time.sleep(POLL_S)
            states = [transfer.state() for _, _, transfer in running]
            for (agent, registration, transfer), state in zip(running, states, strict=True):
                if state is TransferState.FAILED:
                    raise SystemExit(f"{self._name}: a transfer failed")
                if state is TransferState.DONE:
                    transfer.release()
                    agent.deregister(registration)
            running = [each for each, state in zip(running, states, strict=True) if state is TransferState.PENDING]


class Obstore(Side):
    """One call a row."""

    def __init__(self, place: S3Config, region: HostRegion, at_once: int) -> None:
        from obstore.store import S3Store

        self._rows = region.rows_view
        self._pool = ThreadPoolExecutor(at_once)
        client = {"allow_http": True, "allow_invalid_certificates": True}
        self._store = S3Store(
            place.bucket,
            endpoint=place.endpoint,
            region=REGION,
            virtual_hosted_style_request=False,
            client_options=client,  # type: ignore[arg-type]
        )

    def store(self) -> None:
        list(self._pool.map(self._put, range(len(self._rows))))

    def load(self) -> None:
        list(self._pool.map(self._get, range(len(self._rows))))

    def close(self) -> None:
        self._pool.shutdown()

    def _put(self, row: int) -> None:
        self._store.put(name_of("obstore", row), memoryview(self._rows[row]), use_multipart=False)

    def _get(self, row: int) -> None:
        memoryview(self._rows[row])[:] = memoryview(self._store.get(name_of("obstore", row)).bytes())


def make_side(name: str, place: S3Config, region: HostRegion, at_once: int) -> Side:
    if name in {"nixl", "crt"}:
        return Nixl(place, region, at_once, crt=name == "crt")
    return (Obstore if name == "obstore" else Boto)(place, region, at_once)


@contextlib.contextmanager
def server(kind: str, *, tls: bool) -> Iterator[S3Config]:
    """Where to store; the environment has its credentials."""
    with contextlib.ExitStack() as stack:
        certificate = self_signed(Path(stack.enter_context(tempfile.TemporaryDirectory()))) if tls else None
        weed = seaweedfs_server(certificate=certificate) if tls or kind == "weed" else None
        started: Any = stack.enter_context(weed or memory_server())
        stack.enter_context(mock.patch.dict(os.environ, started.env))
        ca = {"ca_file": certificate[0]} if certificate else {}
        if certificate:
            stack.enter_context(mock.patch.dict(os.environ, {"AWS_CA_BUNDLE": str(certificate[0])}))
        yield S3Config(
            type="s3", bucket=started.make_bucket("transports"), endpoint=started.endpoint, capacity=1 << 40, **ca
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("memory", "weed"), default="memory")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--rows", default="262144,2097152,8388608", help="bytes of an object")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=HERE)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    print("| row | | side | MB/s (quartiles) | CPU s/GB |\n| ---: | --- | --- | ---: | ---: |")
    with server(options.server, tls=options.tls) as place:
        for row_bytes in map(int, options.rows.split(",")):
            geometry = Geometry(1, row_bytes)
            count = max(4, (options.megabytes << 20) // row_bytes)
            with filled(geometry, count) as region, contextlib.ExitStack() as stack:
                sides = {name: make_side(name, place, region, options.at_once) for name in options.sides}
                for side in sides.values():
                    stack.callback(side.close)
                turns = take_turns(sides, options.rounds)
            nbytes = count * geometry.row_bytes
            for what in DIRECTIONS:
                for name, taken in turns[what].items():
                    if (what, name) == ("store", "crt"):
                        continue
                    spread = Spread(*(value * 1e3 for value in rates(taken, nbytes)))
                    cpu = Spread.of([turn.cpu_s / nbytes * 1e9 for turn in taken]).median
                    speed = f"{spread.median:.0f} ({spread.low:.0f} to {spread.high:.0f})"
                    print(f"| {row_bytes >> 10} KiB | {what} | {name} | {speed} | {cpu:.2f} |", flush=True)
                    found.append(
                        {"row_bytes": row_bytes, "what": what, "side": name, "mb_s": spread, "cpu_s_a_gb": cpu}
                    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
