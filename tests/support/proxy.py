"""FaultProxy: a TCP proxy between S3 clients and a server that injects faults. Needs no privileges.

    with moto_server() as server, FaultProxy(server.port) as proxy:
        config = {"type": "s3", "endpoint": proxy.endpoint, ...}
        proxy.inject(ProxyFault(FaultKind.ERROR_STATUS, status=503, code="SlowDown", probability=0.5))
        proxy.clear()

A fault takes effect at once, also on open connections and transfers in flight. The proxy parses the HTTP that it
relays, so a fault can be limited to some methods or to one object.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

_PIECE_BYTES: Final = 64 << 10
_LINGER_S: Final = 2.0
_GONE: Final = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


class FaultKind(StrEnum):
    """What goes wrong."""

    REFUSED = "refused"  # connections are refused, open ones reset; applies to every request, whatever the filters
    BLACK_HOLE = "black hole"  # connections are accepted, and no byte passes any more in either direction
    THROTTLE = "throttle"  # `bytes_per_s` in each direction
    RESET = "reset"  # RST in the middle of a body, or instead of a response without one
    EARLY_EOF = "early EOF"  # the connection is closed properly in the middle of a response body
    BIT_FLIP = "bit flip"  # one bit of a response or request body is flipped
    ERROR_STATUS = "error status"  # an S3 error page; the server does not see the request


@dataclass(frozen=True)
class ProxyFault:
    """A fault, and which requests it applies to."""

    kind: FaultKind
    methods: frozenset[str] | None = None  # None: every method
    target: str = ""  # a substring of the request target: an object's name, a prefix
    probability: float = 1.0  # for each matching request
    bytes_per_s: float = 1.0
    status: int = 503
    code: str = "SlowDown"  # the S3 error code

    def matches(self, method: str, target: str) -> bool:
        return (self.methods is None or method in self.methods) and self.target in target


class FaultProxy:
    """Listens on a loopback port of its own and relays HTTP/1.1 to `port` of `host`.

    `inject`, `clear` and `close` may be called from any thread. All else runs on the proxy's own thread.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", seed: int = 0) -> None:
        self.injected: Counter[FaultKind] = Counter()
        """How many requests each kind of fault was injected into."""
        self._server_at = (host, port)
        self._random = random.Random(seed)
        self._faults: tuple[ProxyFault, ...] = ()
        self.generation = 0
        """Counts the calls of inject."""
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self.port = 0
        self._run(self._listen())

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def inject(self, *faults: ProxyFault) -> None:
        """Replace the current faults: each request gets the first of `faults` that matches it."""
        self._run(self._replace(faults))

    def clear(self) -> None:
        """End all faults. What was held up goes on."""
        self.inject()

    def close(self) -> None:
        """Reset all connections, and end the thread."""
        if self._thread.is_alive():
            self._run(self._disconnect())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    # --- on the proxy's thread --------------------------------------------------------------------------------------

    async def _replace(self, faults: tuple[ProxyFault, ...]) -> None:
        self._faults = faults
        self.generation += 1
        self._changed.set()
        self._changed = asyncio.Event()
        if any(fault.kind is FaultKind.REFUSED for fault in faults):
            self.injected[FaultKind.REFUSED] += 1
            await self._disconnect()
        elif self._listener is None:
            await self._listen()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, reuse_address=True)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _disconnect(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        connections = [*self._connections]
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)
        gc.collect()  # of a connection that was just accepted asyncio leaves the socket in a cycle (Python 3.11)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        upstream: asyncio.StreamWriter | None = None
        try:
            while (request := await _read_head(reader)) is not None:
                exchange = _Exchange(self, request, reader, writer)
                await exchange.pass_black_hole()
                if exchange.kind is FaultKind.ERROR_STATUS:
                    await exchange.send_error()
                    return
                if upstream is None:
                    responses, upstream = await asyncio.open_connection(*self._server_at)
                if not await exchange.relay(responses, upstream):
                    return
        except _GONE:
            pass
        except asyncio.CancelledError:
            _reset(writer)  # not raised again: _disconnect only waits for this task to end
        finally:
            self._connections.discard(task)
            for each in (writer, upstream):
                if each is not None:
                    each.close()

    def choose_fault(self, method: str, target: str) -> ProxyFault | None:
        """The fault to inject into a request now."""
        match = next((fault for fault in self._faults if fault.matches(method, target)), None)
        if match is None or self._random.random() >= match.probability:
            return None
        self.injected[match.kind] += 1
        return match

    async def changed(self, timeout_s: float | None = None) -> None:
        """Return after the next call of inject, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)


@dataclass
class _Head:
    """The first line and the headers of a request or response, and their raw bytes."""

    raw: bytes
    first: list[str]
    headers: Mapping[str, str]

    @property
    def status(self) -> int:
        return int(self.first[1])

    @property
    def length(self) -> int | None:
        text = self.headers.get("content-length")
        return None if text is None else int(text)

    @property
    def last(self) -> bool:
        """Whether the connection ends after this message."""
        return "close" in self.headers.get("connection", "").lower() or self.first[0] == "HTTP/1.0"


class _Exchange:
    """One request and its response."""

    def __init__(
        self, proxy: FaultProxy, request: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy, self._request, self._reader, self._writer = proxy, request, reader, writer
        self._generation = -1
        self._fault: ProxyFault | None = None

    @property
    def fault(self) -> ProxyFault | None:
        """Chosen anew after each call of inject."""
        if self._generation != self._proxy.generation:
            self._generation = self._proxy.generation
            self._fault = self._proxy.choose_fault(*self._request.first[:2])
        return self._fault

    @property
    def kind(self) -> FaultKind | None:
        return None if self.fault is None else self.fault.kind

    async def pass_black_hole(self) -> None:
        while self.kind is FaultKind.BLACK_HOLE:
            await self._proxy.changed()

    async def send_error(self) -> None:
        """Respond with an S3 error, and ignore the request body."""
        assert self._fault is not None
        code, status = self._fault.code, self._fault.status
        page = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
        body = b"" if self._request.first[0] == "HEAD" else page.encode()
        head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(page)}\r\n"
        self._writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await self._writer.drain()
        self._writer.write_eof()
        with contextlib.suppress(TimeoutError):  # a reset now would discard the page
            await asyncio.wait_for(_drain(self._reader), _LINGER_S)

    async def relay(self, responses: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> bool:
        """Relay the request and its response; True if the connections may be reused."""
        up = asyncio.ensure_future(self._relay_request(upstream))
        down = asyncio.ensure_future(self._relay_response(responses))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if not down.done():
                up.result()  # raises if the request failed
            return await down and up.done() and not self._request.last
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _relay_request(self, upstream: asyncio.StreamWriter) -> None:
        await self._send(upstream, self._request.raw)
        pieces = _body(self._reader, self._request, until_eof=False)
        if self.kind is FaultKind.BIT_FLIP and self._request.length:
            pieces = _flipped(pieces)
        async for piece in pieces:
            if self.kind is FaultKind.RESET:
                await self._send(upstream, piece[: len(piece) // 2])
                raise self._reset_client()
            await self._send(upstream, piece)

    async def _relay_response(self, responses: asyncio.StreamReader) -> bool:
        while True:
            head = await _read_head(responses)
            if head is None:
                return False
            await self.pass_black_hole()
            if head.status >= 200:
                break
            await self._send(self._writer, head.raw)
        if self.kind is FaultKind.RESET and not head.length:
            raise self._reset_client()
        if self._request.first[0] == "HEAD" or head.status in {204, 304}:
            await self._send(self._writer, head.raw)
            return not head.last
        success = head.status in {200, 206}
        await self._send(self._writer, head.raw)
        pieces = _body(responses, head, until_eof=True)
        if self.kind is FaultKind.BIT_FLIP and success:
            pieces = _flipped(pieces)
        async for piece in pieces:
            if self.kind in {FaultKind.RESET, FaultKind.EARLY_EOF}:
                await self._send(self._writer, piece[: len(piece) // 2])
                if self.kind is FaultKind.RESET:
                    raise self._reset_client()
                return False
            await self._send(self._writer, piece)
        return not head.last and (head.length is not None or "transfer-encoding" in head.headers)

    def _reset_client(self) -> ConnectionError:
        _reset(self._writer)
        return ConnectionResetError("injected")

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Write at the speed that the current fault allows."""
        while data:
            await self.pass_black_hole()
            fault = self.fault
            if writer.is_closing():
                raise ConnectionResetError("the peer has disconnected")
            if fault is not None and fault.kind is FaultKind.REFUSED:  # what was throttled goes no further
                raise self._reset_client()
            if fault is None or fault.kind is not FaultKind.THROTTLE:
                writer.write(data)
                await writer.drain()
                return
            some = max(1, int(fault.bytes_per_s / 10))
            writer.write(data[:some])
            await writer.drain()
            data = data[some:]
            await self._proxy.changed(some / fault.bytes_per_s)


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """None at the end of the connection."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return _Head(raw, first.split(" ", 2), headers)


async def _body(reader: asyncio.StreamReader, head: _Head, *, until_eof: bool) -> AsyncIterator[bytes]:
    """The body that follows `head`, as raw bytes of the connection."""
    if "chunked" in head.headers.get("transfer-encoding", "").lower():
        size = -1
        while size:
            line = await reader.readline()
            size = int(line.split(b";")[0], 16)
            line += await reader.readexactly(size + 2) if size else b""
            while not size and not line.endswith(b"\n\r\n"):  # trailers, and an empty line
                line += await reader.readline()
            yield line
    elif head.length is not None:
        left = head.length
        while left:
            piece = await reader.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ConnectionResetError("a body has ended early")
            left -= len(piece)
            yield piece
    elif until_eof:
        while piece := await reader.read(_PIECE_BYTES):
            yield piece


async def _drain(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(_PIECE_BYTES):
            pass


async def _flipped(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A body with one bit flipped in the middle of each piece. Of what is as long as rows, in the highest byte of a
    float32, where it matters; a list or a page of few bytes can still be read."""
    begin = 0
    async for piece in pieces:
        at, bit = len(piece) // 2, 0x10
        if len(piece) >= 4096:
            at, bit = at + (3 - begin - at) % 4, 0x40
        yield piece[:at] + bytes([piece[at] ^ bit]) + piece[at + 1 :]
        begin += len(piece)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST, after what was written has been sent."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
