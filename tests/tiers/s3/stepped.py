"""A whole S3 tier on a shared prefix, step by step: its boto3 clients and its NIXL agents talk to a bucket in memory.

Nothing is sent anywhere, no thread runs, and time passes when the test says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from io import BytesIO
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from botocore import endpoint
from botocore.awsrequest import AWSResponse, HeadersDict
from botocore.exceptions import EndpointConnectionError

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import Entry, Move
from nixl_tiers.tiers.nixl_agent import Registration, Span, TransferState
from nixl_tiers.tiers.s3 import budget, connection, control, data, deletes, rows
from nixl_tiers.tiers.s3 import tier as tier_module
from nixl_tiers.tiers.s3.takeover import Terms
from nixl_tiers.tiers.s3.tier import S3Tier
from tests.support.by_hand import HandPool
from tests.support.fake_movers import Clock

NAMESPACE, OTHER_NAMESPACE = bytes(range(16)), bytes(range(16, 32))
GEOMETRY = Geometry(cells=1, cell_payload=4096)
ROW = GEOMETRY.row_bytes
NO_KEY = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class Request:
    method: str
    name: str
    by_nixl: bool = False

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and not self.name


Fault = int | tuple[int, str] | bytes | str | None
"""An HTTP status (and S3's error code), a body to answer with, UNREACHABLE, or None: it is served."""


class Raw(BytesIO):
    """The body of an answer."""

    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        yield self.read()


@dataclass
class Bucket:
    """What is stored, and when it was written. `fault`: asked before each request."""

    clock: Clock
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[Request], Fault] = lambda _: None
    deletes: str = "any"  # which it takes: any form, DeleteObjects with "Content-MD5" only, or "one by one" only
    page_names: int = 1000
    ends_early: bool = False  # a page of a listing says that it is the last
    repeats_name: bool = False  # a listing begins with the name that it is to begin behind
    on_their_way: list[Transfer] = field(default_factory=list)  # by NIXL
    agents: list[Agent] = field(default_factory=list)  # NIXL's

    def put(self, name: str, body: bytes) -> None:
        self.objects[name] = body, self.clock.now

    def count(self, method: str) -> int:
        return sum(request.method == method for request in self.requests)

    def rows(self) -> set[str]:
        return {name for name in self.objects if name.count("/") == 3}

    # --- boto3

    def answer(self, request: Any, **_: object) -> AWSResponse:
        """As a handler of botocore's event before-send."""
        url = urlsplit(request.url)
        name = unquote(url.path.lstrip("/").partition("/")[2])
        asked = Request(request.method, name)
        self.requests.append(asked)
        fault = self.fault(asked)
        if fault == UNREACHABLE:
            raise EndpointConnectionError(endpoint_url="here")
        headers, status, body = self._headers(), 200, b""
        if isinstance(fault, (int, tuple)):
            status, code = (fault, "SlowDown") if isinstance(fault, int) else fault
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        elif isinstance(fault, bytes):
            body = fault
        else:
            query = parse_qs(url.query, keep_blank_values=True)
            status, body = self._serve(asked, request, query, headers)
        if asked.method == "HEAD":
            headers["Content-Length"], body = str(len(body)), b""
        return AWSResponse(request.url, status, headers, Raw(body))

    def _headers(self) -> HeadersDict:
        return HeadersDict({"Date": formatdate(self.clock.now, usegmt=True), "Content-Type": "application/xml"})

    def _serve(
        self, asked: Request, request: Any, query: dict[str, list[str]], headers: HeadersDict
    ) -> tuple[int, bytes]:
        found = self.objects.get(asked.name)
        if found is not None:
            headers["ETag"] = _etag(found[0])
            headers["Last-Modified"] = formatdate(found[1], usegmt=True)
        if "list-type" in query:
            (after,) = query.get("continuation-token") or query.get("start-after", [""])
            return 200, self._page(query["prefix"][0], after, repeats=self.repeats_name and "start-after" in query)
        if "versioning" in query:
            return 200, b"<VersioningConfiguration/>"
        match asked.method:
            case "POST":
                md5 = request.headers.get("Content-MD5")
                if self.deletes == "one by one" or (self.deletes == "Content-MD5" and not md5):
                    return 400, b"<Error><Code>InvalidRequest</Code><Message>Content-MD5</Message></Error>"
                body = _body(request)
                assert not md5 or md5 == b64encode(hashlib.md5(body).digest())
                for each in re.findall(rb"<Key>([^<]+)</Key>", body):
                    self.objects.pop(each.decode(), None)
                return 200, b"<DeleteResult></DeleteResult>"
            case "PUT":
                expected = request.headers.get("If-Match")
                none = request.headers.get("If-None-Match")
                expected, none = (each.decode() if isinstance(each, bytes) else each for each in (expected, none))
                etag = None if found is None else _etag(found[0])
                if (expected and expected != etag) or (none and found is not None):
                    return 412, b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>"
                body = _body(request)
                self.put(asked.name, body)
                headers["ETag"] = _etag(body)
                return 200, b""
            case "DELETE":
                self.objects.pop(asked.name, None)
                return 204, b""
        if not asked.name:  # the bucket
            return 200, b""
        return (404, NO_KEY) if found is None else (200, found[0])

    def _page(self, prefix: str, after: str, *, repeats: bool) -> bytes:
        found = [
            (name, *self.objects[name])
            for name in sorted(self.objects)
            if name.startswith(prefix) and (name > after or (repeats and name == after))
        ]
        page = found[: self.page_names]
        more = ""
        if len(found) > len(page) and not self.ends_early:
            more = f"<NextContinuationToken>{page[-1][0]}</NextContinuationToken>"
        rows = "".join(
            f"<Contents><Key>{name}</Key><LastModified>{_iso(at)}</LastModified><ETag>{_etag(body)}</ETag>"
            f"<Size>{len(body)}</Size></Contents>"
            for name, body, at in page
        )
        truncated = f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        return f"<ListBucketResult>{truncated}{more}{rows}</ListBucketResult>".encode()

    # --- NIXL

    def move(self) -> int:
        """What NIXL has begun ends; how much that was."""
        moved, self.on_their_way = self.on_their_way, []
        for transfer in moved:
            transfer.end()
        return len(moved)


def _body(request: Any) -> bytes:
    body = request.body
    if body is None:
        return b""
    return bytes(body) if isinstance(body, (bytes, bytearray)) else bytes(body.read())


def _etag(body: bytes) -> str:
    return f'"{hash(body) & 0xFFFFFFFF:08x}-{len(body)}"'


def _iso(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


@dataclass(eq=False)
class Transfer:
    """In place of NIXL's. An error page lands where a row should."""

    bucket: Bucket
    method: str
    name: str
    address: int
    nbytes: int
    ended: TransferState = TransferState.PENDING

    def state(self) -> TransferState:
        return self.ended

    def release(self) -> None:
        assert self.ended is not TransferState.PENDING, "its bytes could still land"

    def end(self) -> None:
        asked = Request(self.method, self.name, by_nixl=True)
        self.bucket.requests.append(asked)
        fault = self.bucket.fault(asked)
        if fault is not None or (self.method == "GET" and self.name not in self.bucket.objects):
            page = NO_KEY if fault is None else b""
            if isinstance(fault, tuple):
                page = f"<Error><Code>{fault[1]}</Code></Error>".encode()
            if self.method == "GET":
                ctypes.memmove(self.address, page, len(page))
            self.ended = TransferState.FAILED
        elif self.method == "GET":
            body = self.bucket.objects[self.name][0][: self.nbytes]  # a short one is no error
            ctypes.memmove(self.address, body, len(body))
            self.ended = TransferState.DONE
        else:
            self.bucket.put(self.name, ctypes.string_at(self.address, self.nbytes))
            self.ended = TransferState.DONE


class Agent:
    """In place of NIXL's."""

    def __init__(self, bucket: Bucket, parameters: dict[str, str]) -> None:
        self.bucket = bucket
        self.access_key = parameters["access_key"]
        self.names: list[str] = []
        self.memory: list[Registration] = []  # that is registered: none any more once it was released
        bucket.agents.append(self)

    def register_dram(self, address: int, nbytes: int) -> Registration:
        self.memory.append(Registration(None, (0,)))
        return self.memory[-1]

    def register_region(self, region: HostRegion) -> Registration:
        return self.register_dram(0, 0)

    def register_objects(self, names: Sequence[str], nbytes: int) -> Registration:
        self.names += names
        return Registration(None, tuple(range(len(self.names) - len(names), len(self.names))))

    def deregister(self, registration: Registration) -> None:
        if any(each is registration for each in self.memory):
            self.memory = [each for each in self.memory if each is not registration]

    def read(self, spans: Sequence[Span]) -> Transfer:
        return self._begin("GET", spans)

    def write(self, spans: Sequence[Span]) -> Transfer:
        return self._begin("PUT", spans)

    def _begin(self, method: str, spans: Sequence[Span]) -> Transfer:
        ((address, nbytes, _, device),) = spans
        self.bucket.on_their_way.append(Transfer(self.bucket, method, self.names[device], address, nbytes))
        return self.bucket.on_their_way[-1]


def key_of(number: int) -> bytes:
    return b"key-%04d" % number


class SteppedTier:
    """`round` is one of everything that its threads would do, and of the mover's loop."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        rows: int = 8,
        capacity_rows: int = 1000,
        times: Times = PRODUCTION,
        **fields: Any,
    ) -> None:
        self.bucket = bucket
        self.clock = bucket.clock
        self.region = HostRegion.create(GEOMETRY, rows)
        named = {"bucket": "kv-stepped", "prefix": "p", "endpoint": "http://here", "capacity": capacity_rows * ROW}
        config = S3Config(**{"type": "s3", **named, **fields})
        self.tier = S3Tier(config, GEOMETRY, self.region, times)
        self.control = self.tier._control
        self.control.connect = self._connect  # type: ignore[method-assign]
        self.control.denials._clock = self.clock
        self.rows = self.tier._rows
        self.questions = HandPool()
        for asks in (self.rows._checker, self.rows._uploads):
            asks._pool = self.questions  # type: ignore[assignment]
            asks._clock = self.clock
        self.finished: dict[int, list[Outcome]] = {}
        self.found: list[Entry] = []

    def _connect(self, timeout_s: float = 0.0) -> None:
        attempt = self.control._connecting = Future()
        self.control._connect()
        self.control._connecting = None
        attempt.result(0)

    def other_has_stored(self, rows: int) -> None:
        """Another mover says so; this one hears of it."""
        self.bucket.put(f"p/{budget.COUNTER_NAME}other", b"%d" % (rows * ROW))
        self.clock.now += 5.0
        self.budget_step()

    def open(self, namespace: bytes = NAMESPACE) -> int:
        """And have it write the usage record."""
        slots = self.tier.open(namespace, 0)
        self.budget_step()
        return slots

    @property
    def budget(self) -> budget.Budget:
        assert self.rows._budget is not None
        return self.rows._budget

    def budget_step(self) -> None:
        self.budget.step()

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / budget.TERMS.renew_s)):
            self.clock.now += budget.TERMS.renew_s
            self.budget_step()
            self.round()

    def control_steps(self, most: int = 20) -> int:
        """What the control thread would do now."""
        for count in range(most):
            if (task := self.control._next(self.clock.now)) is None:
                return count
            self.control._do(task)
        return most

    def round(self, *, moves: bool = True) -> None:
        self.clock.now += 0.001
        self.questions.run()
        self.control_steps()
        if moves:
            self.bucket.move()
        self.tier._pace.hurry()
        for done in self.tier.poll():
            self.finished[done.batch_id] = list(done.outcomes)
        self.found += self.tier.found()

    def end(self, batch_id: int) -> list[Outcome]:
        for _ in range(50):
            if batch_id in self.finished:
                return self.finished.pop(batch_id)
            self.round()
        raise AssertionError("a batch does not end")

    def moves(self, numbers: Sequence[int], *, seal: bool = False) -> list[Move]:
        return [Move(number % self.region.rows, number, key_of(number), number, seal) for number in numbers]

    def begin_store(self, *numbers: int) -> int:
        for number in numbers:
            self.region.rows_view[number % self.region.rows] = number % 251
        return self.tier.store(self.moves(numbers, seal=True))

    def store(self, *numbers: int) -> list[Outcome]:
        return self.end(self.begin_store(*numbers))

    def load(self, *numbers: int) -> list[Outcome]:
        """Into rows of zeros. An OK row holds what was stored."""
        self.region.rows_view[:] = 0
        outcomes = self.end(self.tier.load(self.moves(numbers)))
        for number, outcome in zip(numbers, outcomes, strict=True):
            row = self.region.rows_view[number % self.region.rows][: GEOMETRY.cell_payload]
            assert outcome is not Outcome.OK or (row == number % 251).all(), "a wrong byte"
        return outcomes

    def ask(self, *numbers: int, check_id: int = 1, chain: bool = False) -> None:
        assert self.tier.check_existence(check_id, [key_of(number) for number in numbers], chain)

    def name(self, number: int, namespace: bytes = NAMESPACE) -> str:
        return self.rows.names.name(namespace.hex(), key_of(number))

    def sealed(self, number: int, namespace: bytes = NAMESPACE, *, epoch: int = 0, sealed_at: int = 1) -> bytearray:
        """The object that holds this key in that namespace."""
        row = self.region.rows_view[0]
        row[:] = number % 251
        Sealer(GEOMETRY, namespace, epoch).seal(row, key_of(number), sealed_at=sealed_at)
        return bytearray(row.tobytes())

    def release(self) -> None:
        with suppress(AssertionError):
            self.bucket.move()
        self.tier._data.poll(self.clock.now)
        self.region.close()


def install(monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> None:
    """Have every tier made from now on be a stepped one."""
    clock = bucket.clock
    time = SimpleNamespace(monotonic=clock, time=clock, sleep=lambda _: None)
    for module in (connection, control, data, rows, tier_module):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(endpoint, "time", time)  # botocore's, between two attempts
    monkeypatch.setattr(budget, "budget_clock", clock)
    monkeypatch.setattr(rows, "budget_clock", clock)
    monkeypatch.setattr(deletes, "_works", "")
    monkeypatch.setattr(budget.Budget, "start", lambda _: None)
    monkeypatch.setattr(budget, "TERMS", Terms(confirm_s=0.0))
    monkeypatch.setattr(data, "Agent", SimpleNamespace(obj=lambda parameters: Agent(bucket, parameters)))
    monkeypatch.setattr(data, "at_low_priority", lambda start: start())
    make = connection.make_client

    def make_client(*given: Any, **named: Any) -> Any:
        client = make(*given, **named)
        client.meta.events.register("before-send.s3", bucket.answer)
        return client

    monkeypatch.setattr(connection, "make_client", make_client)
