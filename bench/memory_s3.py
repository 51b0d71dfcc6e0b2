"""An S3 server that costs next to nothing: objects stay in memory, and nothing is checked, hashed or written to a disk.

On one machine a real server's processors are the client's, so that two clients are compared mostly with the server (a
SeaweedFS computes MD5 three times for each upload). Beside this one, what a client itself costs decides. One process,
one thread; it knows what the tier and boto3 need: PUT (also on a condition), GET with a range, HEAD, DELETE and
DeleteObjects, and ListObjectsV2 in one page.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from multiprocessing.connection import Connection
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

HEAD_BYTES: Final = 16384  # of a request's head, at most
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
ISO_TIME: Final = "%Y-%m-%dT%H:%M:%S.000Z"
XML: Final = b'<?xml version="1.0" encoding="UTF-8"?>'

Answer = tuple[str, dict[str, object], bytes | memoryview]
"""Status line's rest, headers, body."""


class Objects:
    """What one server holds."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytearray, str, float]] = {}
        self._writes = 0

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytearray) -> Answer:
        url = urlsplit(target)
        bucket, _, name = unquote(url.path).lstrip("/").partition("/")
        query = parse_qs(url.query, keep_blank_values=True)
        if not name:
            return self._of_bucket(bucket, method, query, body)
        if method == "PUT":
            return self._put(name, headers, body)
        if method == "DELETE":
            self._objects.pop(name, None)
            return "204 No Content", {}, b""
        return self._get(name, headers)

    def _put(self, name: str, headers: dict[str, str], body: bytearray) -> Answer:
        held = self._objects.get(name)
        if (headers.get("if-none-match") and held) or (
            "if-match" in headers and (held is None or held[1] != headers["if-match"])
        ):
            return _error("412 Precondition Failed", "PreconditionFailed")
        self._writes += 1
        tag = f'"{self._writes:032x}"'
        self._objects[name] = body, tag, time.time()
        return "200 OK", {"ETag": tag}, b""

    def _get(self, name: str, headers: dict[str, str]) -> Answer:
        if name not in self._objects:
            return _error("404 Not Found", "NoSuchKey")
        body, tag, written_s = self._objects[name]
        about: dict[str, object] = {"ETag": tag, "Last-Modified": formatdate(written_s, usegmt=True)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if wanted is None:
            return "200 OK", about, memoryview(body)
        first, last = int(wanted[1]), min(len(body) - 1, int(wanted[2] or len(body)))
        about["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        return "206 Partial Content", about, memoryview(body)[first : last + 1]

    def _of_bucket(self, bucket: str, method: str, query: dict[str, list[str]], body: bytearray) -> Answer:
        if method == "POST" and "delete" in query:
            for name in re.findall(rb"<Key>(.*?)</Key>", body):
                self._objects.pop(name.decode(), None)
            return "200 OK", {}, XML + b"<DeleteResult></DeleteResult>"
        if method == "GET" and "list-type" in query:
            return "200 OK", {}, self._listing(bucket, query.get("prefix", [""])[0])
        return "200 OK", {}, b""

    def _listing(self, bucket: str, prefix: str) -> bytes:
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{time.strftime(ISO_TIME, time.gmtime(written_s))}"
            f"</LastModified><ETag>{escape(tag)}</ETag><Size>{len(body)}</Size></Contents>"
            for name, (body, tag, written_s) in sorted(self._objects.items())
            if name.startswith(prefix)
        )
        about = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        return XML + f"<ListBucketResult>{about}{found}</ListBucketResult>".encode()


class _Connection:
    """One client's connection, whose requests are answered in turn."""

    def __init__(self, end: socket.socket, objects: Objects) -> None:
        self._end = end
        self._objects = objects
        self._head = bytearray()
        self._request: tuple[str, str, dict[str, str]] | None = None
        self._body = bytearray()
        self._missing = 0  # bytes of the body
        self._unsent: deque[memoryview] = deque()

    def proceed(self) -> int | None:
        """Do what can be done without waiting; returns what to wait for, None when the connection is over."""
        try:
            while True:
                if self._unsent:
                    if not self._send():
                        return selectors.EVENT_WRITE
                elif not self._receive():
                    return None
        except BlockingIOError:
            return selectors.EVENT_READ
        except ConnectionError:
            return None

    def close(self) -> None:
        self._end.close()

    def _send(self) -> bool:
        try:
            sent = self._end.send(self._unsent[0])
        except BlockingIOError:
            return False
        rest = self._unsent.popleft()[sent:]
        if rest:
            self._unsent.appendleft(rest)
        return True

    def _receive(self) -> bool:
        if self._request is None:
            received = self._end.recv(HEAD_BYTES)
            self._head += received
            end = self._head.find(b"\r\n\r\n")
            if end >= 0:
                self._begin(end)
            return bool(received)
        at = len(self._body) - self._missing
        received_bytes = self._end.recv_into(memoryview(self._body)[at:])
        self._missing -= received_bytes
        self._end_request_if_complete()
        return bool(received_bytes)

    def _begin(self, end: int) -> None:
        first, *lines = self._head[:end].decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        early = self._head[end + 4 :]
        self._head = bytearray()
        self._request = method, target, headers
        nbytes = int(headers.get("content-length", 0))
        self._body = bytearray(nbytes)
        self._body[: len(early)] = early
        self._missing = nbytes - len(early)
        if self._missing and "expect" in headers:
            self._unsent.append(memoryview(CONTINUE))
        self._end_request_if_complete()

    def _end_request_if_complete(self) -> None:
        if self._missing:
            return
        assert self._request is not None
        method, target, headers = self._request
        status, about, content = self._objects.answer(method, target, headers, self._body)
        self._request, self._body = None, bytearray()
        about |= {"Date": formatdate(usegmt=True), "Content-Length": len(content), "Content-Type": "application/xml"}
        head = "".join(f"{name}: {value}\r\n" for name, value in about.items())
        self._unsent.append(memoryview(f"HTTP/1.1 {status}\r\n{head}\r\n".encode()))
        if content and method != "HEAD":
            self._unsent.append(memoryview(content))


def _error(status: str, code: str) -> Answer:
    return status, {}, XML + f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _serve(ready: Connection) -> None:
    objects = Objects()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    ready.send(listener.getsockname()[1])
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    end, _ = listener.accept()
                    end.setblocking(False)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(end, selectors.EVENT_READ, _Connection(end, objects))
                elif (events := key.data.proceed()) is None:
                    selector.unregister(key.fileobj)
                    key.data.close()
                elif events != key.events:
                    selector.modify(key.fileobj, events, key.data)


@dataclass(frozen=True)
class MemoryServer:
    """As much of a `testing.servers.S3Server` as a bench needs."""

    endpoint: str
    pid: int
    env: Mapping[str, str] = field(
        default_factory=lambda: {
            "AWS_ACCESS_KEY_ID": "anything",
            "AWS_SECRET_ACCESS_KEY": "not-checked",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    )

    def make_bucket(self, name: str) -> str:
        return name


@contextlib.contextmanager
def memory_server() -> Iterator[MemoryServer]:
    """Such a server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield MemoryServer(f"http://127.0.0.1:{ours.recv()}", process.pid)
    finally:
        process.kill()
        process.join()
