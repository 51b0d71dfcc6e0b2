"""What the tests of the S3 tier share: a driver of one tier, and an S3 server that hesitates."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
import numpy as np

from nixl_tiers.base.chunk import Geometry, Outcome, object_name
from nixl_tiers.base.times import Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import Move, TierDown, TierRefused
from nixl_tiers.tiers.s3.takeover import Terms
from nixl_tiers.tiers.s3.tier import S3Tier
from tests.support.times import KEEPS_ITS_RECORD

TIMEOUT_S = 120.0
TIMES = msgspec.structs.replace(KEEPS_ITS_RECORD, s3_quick_s=120.0, s3_check_s=120.0, s3_upload_check_s=120.0)
"""On any machine existence checks get their answers, for which uploads wait, and what is left is sent at the close."""
but = partial(msgspec.structs.replace, TIMES)
FAST = Terms(renew_s=0.1, stale_s=2.0, confirm_s=0.02, sweep_s=0.1)
SOON = Terms(confirm_s=0.02)  # the first write is soon followed by the second
NAMESPACE = bytes(range(16))
OTHER_NAMESPACE = bytes(range(16, 32))


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

    kind: ClassVar[type[S3Tier]] = S3Tier

    def __init__(self, geometry: Geometry, rows: int, *, engine: str = "", times: Times = TIMES, **config: Any) -> None:
        """`engine`: the ID of the engine that the tier works for; a new one unless given."""
        fields = {"type": "s3", "capacity": 64_000 * geometry.row_bytes} | config
        self.geometry = geometry
        self.region = HostRegion.create(geometry, rows)
        self.config = S3Config(**fields)
        self.tier = self.kind(self.config, geometry, self.region, times)
        if engine:
            self.tier.identify(engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        wait_until(lambda: not self.tier.busy or (not self.tier.poll() and not self.tier.busy), 20.0)
        self.tier.close()
        self.region.close()

    def open(self, namespace: bytes = NAMESPACE, epoch: int = 0) -> int:
        """Open, with retries as a mover does: on a busy machine the server may answer late. Returns the slots."""
        slots: list[int] = []
        assert wait_until(lambda: self._try_open(namespace, epoch, slots))
        return slots[0]

    def open_ready(self) -> None:
        """Open, and wait until rows may be stored."""
        self.open()
        assert wait_until(lambda: self.tier._rows.upload_quota.ready)

    def try_open(self) -> None:
        """Open or raise, once."""
        self.tier.open(NAMESPACE, 0)

    def fails_to_open(self, kind: type[Exception], pattern: str) -> Exception:
        """The error of this kind whose text matches. On a busy machine there may be timeouts before it."""
        errors: list[Exception] = []

        def fails() -> bool:
            try:
                self.try_open()
            except (TierDown, TierRefused) as error:
                errors.append(error)
                return isinstance(error, kind) and re.search(pattern, str(error)) is not None
            return False

        assert wait_until(fails), errors
        return errors[-1]

    def _try_open(self, namespace: bytes, epoch: int, slots: list[int]) -> bool:
        try:
            slots.append(self.tier.open(namespace, epoch))
        except TierDown:
            return False
        return True

    def finish(self, *batch_ids: int) -> list[list[Outcome]]:
        ended: dict[int, list[Outcome]] = {}

        def poll() -> bool:
            for done in self.tier.poll():
                ended[done.batch_id] = list(done.outcomes)
            return set(batch_ids) <= set(ended)

        assert wait_until(poll), "a batch does not end"
        return [ended[batch_id] for batch_id in batch_ids]

    def name(self, number: int, namespace: bytes = NAMESPACE) -> str:
        """The name of the object that holds key `number`."""
        return f"{self.config.prefix}/{namespace.hex()}/{object_name(key_of(number))}"

    def row(self, number: int) -> np.ndarray:
        view: np.ndarray = self.region.rows_view[number % self.region.rows]
        return view

    def moves(self, numbers: Sequence[int], seal: bool = False) -> list[Move]:
        return [Move(number % self.region.rows, number, key_of(number), number, seal) for number in numbers]

    def store_sealed(self, number: int, sealed_at: int) -> Outcome:
        """Store a row that was sealed before, at this Unix time."""
        self.row(number)[:] = payload(number, self.geometry)
        Sealer(self.geometry, NAMESPACE, 0).seal(self.row(number), key_of(number), sealed_at=sealed_at)
        (outcomes,) = self.finish(self.tier.store(self.moves([number])))
        return outcomes[0]

    def begin_store(self, numbers: Sequence[int]) -> int:
        for number in numbers:
            self.row(number)[:] = payload(number, self.geometry)
        return self.tier.store(self.moves(numbers, seal=True))

    def store(self, numbers: Sequence[int]) -> list[Outcome]:
        return self.finish(self.begin_store(numbers))[0]

    def load(self, numbers: Sequence[int]) -> list[Outcome]:
        """Load into rows with other content. An OK row must be right; one whose object was corrupt may hold anything,
        any other must be unchanged."""
        for number in numbers:
            self.row(number)[:] = number % 251
        (outcomes,) = self.finish(self.tier.load(self.moves(numbers)))
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


@dataclass
class Request:
    method: str
    name: str
    access_key: str
    region: str = field(default="", compare=False)


DRIP_S = 0.25  # NIXL's AWS library gives up a download of which there was nothing for 3 s, and begins anew
LONG_AGO = "2024-01-01T00:00:00.000Z"


@dataclass
class FaultyS3:
    """As much of S3 as the tier uses, in memory; `hold` stops downloads half-way."""

    objects: dict[str, bytes] = field(default_factory=dict)
    region: str = ""  # the bucket's, as reported in headers
    modified: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None  # while it is not set, GET sends a byte every DRIP_S
    requests: list[Request] = field(default_factory=list)
    concurrent: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    state = FaultyS3()

    class Handler(_Handler):
        s3 = state

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # connections that may wait to be accepted; by default 5, more are reset

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.port = server.server_port
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
        body = self._body()
        url = urlsplit(self.path)
        if url.query == "versioning":
            return self._answer(200, b"<VersioningConfiguration/>")  # such requests are not recorded
        name = unquote(url.path.lstrip("/").partition("/")[2])
        credential = re.search(r"Credential=([^/]+)/[^/]+/([^/]+)/", self.headers.get("Authorization", ""))
        access_key, region = credential.groups() if credential else ("", "")
        request = Request(self.command, name, access_key, region)
        with self.s3.lock:
            self.s3.requests.append(request)
            self.s3.concurrent += 1
        try:
            getattr(self, f"_{self.command.lower()}")(name, body, parse_qs(url.query, keep_blank_values=True))
        finally:
            with self.s3.lock:
                self.s3.concurrent -= 1
        return None

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, body: bytes = b"", etag: str = "", modified: str = "") -> None:
        """`modified`: as in a listing."""
        self.send_response(status)
        if modified:
            self.send_header("Last-Modified", formatdate(datetime.fromisoformat(modified).timestamp(), usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        if self.s3.region:
            self.send_header("x-amz-bucket-region", self.s3.region)
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, name: str, body: bytes, query: dict[str, list[str]]) -> None:
        found = self.s3.objects.get(name) if name else b""
        modified = self.s3.modified.get(name, LONG_AGO) if name else ""
        self._answer(404 if found is None else 200, found or b"", modified=modified if found is not None else "")

    def _put(self, name: str, body: bytes, query: dict[str, list[str]]) -> None:
        with self.s3.lock:
            if not self._condition_holds(self.s3.objects.get(name)):
                return self._answer(412, b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>")
            self.s3.objects[name] = body
            self.s3.modified[name] = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return self._answer(200, etag=self._etag(body))

    def _condition_holds(self, found: bytes | None) -> bool:
        expected = self.headers.get("If-Match", "")
        return (not expected or (found is not None and self._etag(found) == expected)) and not (
            "If-None-Match" in self.headers and found is not None
        )

    def _etag(self, body: bytes) -> str:
        return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'

    def _get(self, name: str, body: bytes, query: dict[str, list[str]]) -> None:
        if "list-type" in query:
            return self._list(query)
        found = self.s3.objects.get(name)
        if found is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
        if self.s3.hold is None:
            return self._answer(200, found, self._etag(found), self.s3.modified.get(name, LONG_AGO))
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        sent = 0
        for sent in range(1, min(len(found), int(TIMEOUT_S / DRIP_S))):
            self.wfile.write(found[sent - 1 : sent])
            self.wfile.flush()
            if self.s3.hold.wait(DRIP_S):
                break
        self.wfile.write(found[sent:])
        return None

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, after = query["prefix"][0], query.get("start-after", [""])[0]
        with self.s3.lock:
            names = sorted(name for name in self.s3.objects if name.startswith(prefix) and name > after)
            rows = "".join(
                f"<Contents><Key>{name}</Key><LastModified>{self.s3.modified.get(name, LONG_AGO)}</LastModified>"
                f"<ETag>{self._etag(self.s3.objects[name])}</ETag><Size>{len(self.s3.objects[name])}</Size></Contents>"
                for name in names[:1000]
            )
        more = "true" if len(names) > 1000 else "false"
        self._answer(200, f"<ListBucketResult><IsTruncated>{more}</IsTruncated>{rows}</ListBucketResult>".encode())

    def _delete(self, name: str, body: bytes, query: dict[str, list[str]]) -> None:
        with self.s3.lock:
            self.s3.objects.pop(name, None)
        self._answer(204)

    def _post(self, name: str, body: bytes, query: dict[str, list[str]]) -> None:
        with self.s3.lock:
            for each in re.findall(rb"<Key>([^<]+)</Key>", body):
                self.s3.objects.pop(each.decode(), None)
        self._answer(200, b"<DeleteResult></DeleteResult>")
