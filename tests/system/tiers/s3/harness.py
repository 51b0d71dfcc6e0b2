"""What the tests of the S3 tier share: a driver of one tier, and an S3 server that hesitates."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import numpy as np

from nixl_tiers.base.chunk import Geometry, Outcome, object_name
from nixl_tiers.base.times import Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move, TierDown, TierRefused
from nixl_tiers.tiers.s3.takeover import Terms
from nixl_tiers.tiers.s3.tier import S3Tier
from tests.support.times import KEEPS_ITS_RECORD
from tests.tiers.s3.stepped import Bucket

TIMEOUT_S = 120.0
TIMES = msgspec.structs.replace(KEEPS_ITS_RECORD, s3_quick_s=120.0, s3_check_s=120.0, s3_upload_check_s=120.0)
"""On any machine existence checks get their answers, for which uploads wait, and what is left is sent at the close."""
but = partial(msgspec.structs.replace, TIMES)
FAST = Terms(renew_s=0.1, stale_s=2.0, confirm_s=0.02, sweep_s=0.1)
SOON = Terms(confirm_s=0.02)  # the first write is soon followed by the second
NAMESPACE = bytes(range(16))


def key_of(number: int) -> bytes:
    return b"key-%08d" % number


def payload(number: int, geometry: Geometry) -> np.ndarray:
    words = np.arange(geometry.row_bytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)
    return words.view(np.uint8)


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class TierDriver:
    """An S3Tier and its region, used as a mover's loop does. Key n uses region row n, modulo the rows."""

    def __init__(self, geometry: Geometry, rows: int, *, engine: str = "", times: Times = TIMES, **config: Any) -> None:
        """`engine`: the ID of the engine that the tier works for; a new one unless given."""
        self.geometry = geometry
        self.region = HostRegion.create(geometry, rows)
        self.config = S3Config(**{"type": "s3", "capacity": 64_000 * geometry.row_bytes} | config)
        self.tier = S3Tier(self.config, geometry, self.region, times)
        if engine:
            self.tier.identify(engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        wait_until(lambda: not self.tier.busy or (not self.tier.poll() and not self.tier.busy), 20.0)
        self.tier.close()
        self.region.close()

    def open(self) -> None:
        """With retries as a mover does: on a busy machine the server may answer late."""

        def opens() -> bool:
            try:
                self.try_open()
            except TierDown:
                return False
            return True

        assert wait_until(opens)

    def try_open(self) -> None:
        self.tier.open(NAMESPACE, 0)

    def fails_to_open(self, pattern: str) -> None:
        """Because the tier is down, in words that match. On a busy machine there may be timeouts before it."""
        errors: list[Exception] = []

        def fails() -> bool:
            try:
                self.try_open()
            except (TierDown, TierRefused) as error:
                errors.append(error)
                return isinstance(error, TierDown) and re.search(pattern, str(error)) is not None
            return False

        assert wait_until(fails), errors

    def finish(self, batch_id: int) -> list[Outcome]:
        ended: dict[int, list[Outcome]] = {}

        def poll() -> bool:
            ended.update({done.batch_id: list(done.outcomes) for done in self.tier.poll()})
            return batch_id in ended

        assert wait_until(poll), "a batch does not end"
        return ended[batch_id]

    def name(self, number: int) -> str:
        """The name of the object that holds key `number`."""
        return f"{self.config.prefix}/{NAMESPACE.hex()}/{object_name(key_of(number))}"

    def row(self, number: int) -> np.ndarray:
        view: np.ndarray = self.region.rows_view[number % self.region.rows]
        return view

    def moves(self, numbers: Sequence[int], seal: bool = False) -> list[Move]:
        return [Move(number % self.region.rows, number, key_of(number), number, seal) for number in numbers]

    def store(self, numbers: Sequence[int]) -> list[Outcome]:
        for number in numbers:
            self.row(number)[:] = payload(number, self.geometry)
        return self.finish(self.tier.store(self.moves(numbers, seal=True)))

    def load(self, numbers: Sequence[int]) -> list[Outcome]:
        """Load into rows with other content. An OK row must be right; one whose object was corrupt may hold anything,
        any other must be unchanged."""
        for number in numbers:
            self.row(number)[:] = number % 251
        outcomes = self.finish(self.tier.load(self.moves(numbers)))
        for number, outcome in zip(numbers, outcomes, strict=True):
            if outcome is Outcome.OK:
                assert self.holds(number), f"wrong bytes for key {number}"
            elif outcome is not Outcome.CORRUPT:
                assert (self.row(number) == number % 251).all(), f"{outcome!r}, but the row of key {number} has changed"
        return outcomes

    def holds(self, number: int) -> bool:
        row, wanted, size = self.row(number), payload(number, self.geometry), self.geometry.cell_payload
        starts = range(0, self.geometry.cells * self.geometry.cell_bytes, self.geometry.cell_bytes)
        return all(np.array_equal(row[at : at + size], wanted[at : at + size]) for at in starts)

    def settled(self, rows: int) -> bool:
        """Wait until the tier holds exactly `rows` rows; False after a timeout."""
        return wait_until(lambda: self.tier.used_bytes == rows * self.geometry.row_bytes)


DRIP_S = 0.25  # NIXL's AWS library gives up a download of which there was nothing for 3 s, and begins anew


class _Now:
    now = property(lambda _: time.time())


class FaultyS3(Bucket):
    """The bucket in memory behind a port; `hold` stops downloads half-way."""

    def __init__(self) -> None:
        super().__init__(_Now())  # type: ignore[arg-type]
        self.endpoint = ""
        self.region = ""  # the bucket's, as reported in headers
        self.signed: list[tuple[str, ...]] = []  # method, access key and region of each request
        self.hold: threading.Event | None = None  # while it is not set, GET sends a byte every DRIP_S
        self.concurrent = 0
        self.lock = threading.Lock()


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    state = FaultyS3()

    class Handler(_Handler):
        s3 = state

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # connections that may wait to be accepted; by default 5, more are reset

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        if state.hold is not None:
            state.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    s3: FaultyS3
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _serve(self) -> None:
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        signed = re.search(r"Credential=([^/]+)/[^/]+/([^/]+)/", self.headers.get("Authorization", ""))
        asked = SimpleNamespace(method=self.command, url=self.path, headers=self.headers, body=body)
        with self.s3.lock:
            self.s3.signed.append((self.command, *(signed.groups() if signed else ())))
            self.s3.concurrent += 1
            answer = self.s3.answer(asked)
        self.send_response_only(answer.status_code)
        if self.s3.region:
            answer.headers["x-amz-bucket-region"] = self.s3.region
        answer.headers.setdefault("Content-Length", str(len(answer.content)))
        for each in answer.headers.items():
            self.send_header(*each)
        self.end_headers()
        sent = 0
        if self.s3.hold is not None and self.command == "GET":
            for sent in range(1, min(len(answer.content), int(TIMEOUT_S / DRIP_S))):
                self.wfile.write(answer.content[sent - 1 : sent])
                self.wfile.flush()
                if self.s3.hold.wait(DRIP_S):
                    break
        self.wfile.write(answer.content[sent:])
        with self.s3.lock:
            self.s3.concurrent -= 1

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve  # noqa: N815
