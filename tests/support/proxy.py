"""FaultProxy: a TCP proxy between S3 clients and a server, that misbehaves when it is told to. Needs no privileges.

    with moto_server() as server, FaultProxy(server.port) as proxy:
        config = {"type": "s3", "endpoint": proxy.endpoint, ...}
        proxy.disturb(Trouble(Kind.STATUS, status=503, code="SlowDown", chance=0.5))
        proxy.clear()

What is told counts at once, also for connections and transfers that are under way. The proxy reads the HTTP that it
carries, so a trouble can be meant for some methods or for one object only.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self

_PIECE_BYTES: Final = 64 << 10
_LINGER_S: Final = 2.0
_GONE: Final = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


class Kind(StrEnum):
    """What goes wrong."""

    REFUSE = "refuse"  # nobody listens, and what was connected is reset; strikes everything, whatever else is said
    BLACK_HOLE = "black hole"  # connections are accepted, and not one byte passes any more in either direction
    TRICKLE = "trickle"  # `bytes_per_s` in each direction
    RESET = "reset"  # the connection is reset in the middle of a body, or instead of an answer without one
    CUT = "cut"  # the connection ends properly in the middle of an answer's body
    SHORT = "short"  # half of an answer's body, announced as the whole
    WRONG = "wrong"  # one bit of an answer's body, or of a request's, is another
    STATUS = "status"  # an error page; the server never hears of the request


@dataclass(frozen=True)
class Trouble:
    """One thing that goes wrong, and the requests that it happens to."""

    kind: Kind
    methods: frozenset[str] | None = None  # None: every method
    within: str = ""  # a part of the request's target: an object's name, a prefix
    holder: str = ""  # a part of the Authorization header: an access key that is not good any more
    chance: float = 1.0  # of each request that is meant
    bytes_per_s: float = 1.0
    status: int = 503
    code: str = "SlowDown"  # what S3 calls the error

    def means(self, method: str, target: str, authorization: str) -> bool:
        return (
            (self.methods is None or method in self.methods) and self.within in target and self.holder in authorization
        )


class FaultProxy:
    """Listens on a loopback port of its own and carries HTTP/1.1 to `port` of `host`.

    `disturb`, `clear` and `close` may be called from any thread. All else happens on a thread of the proxy's own.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", seed: int = 0) -> None:
        self.struck: Counter[Kind] = Counter()
        """How many requests each kind of trouble has happened to."""
        self.requests = 0
        self._server_at = (host, port)
        self._random = random.Random(seed)
        self._troubles: tuple[Trouble, ...] = ()
        self._generation = 0
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self.port = 0
        self._do(self._listen())

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def disturb(self, *troubles: Trouble) -> None:
        """From now on these happen, in place of those of before: to each request the first that is meant for it."""
        self._do(self._change(troubles))

    def clear(self) -> None:
        """All is well again. What was held up goes on."""
        self.disturb()

    def close(self) -> None:
        """Reset what is connected, and end."""
        if self._thread.is_alive():
            self._do(self._hang_up())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    # --- on the proxy's thread --------------------------------------------------------------------------------------

    async def _change(self, troubles: tuple[Trouble, ...]) -> None:
        self._troubles = troubles
        self._generation += 1
        self._changed.set()
        self._changed = asyncio.Event()
        if any(trouble.kind is Kind.REFUSE for trouble in troubles):
            self.struck[Kind.REFUSE] += 1
            await self._hang_up()
        elif self._listener is None:
            await self._listen()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, reuse_address=True)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _hang_up(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        connections = [*self._connections]
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        upstream: asyncio.StreamWriter | None = None
        try:
            while (request := await _read_head(reader)) is not None:
                exchange = _Exchange(self, request, reader, writer)
                self.requests += 1
                await exchange.gate()
                if exchange.kind is Kind.STATUS:
                    await exchange.refuse()
                    return
                if upstream is None:
                    answers, upstream = await asyncio.open_connection(*self._server_at)
                if not await exchange.carry(answers, upstream):
                    return
        except _GONE:
            pass
        except asyncio.CancelledError:
            _reset(writer)  # and not raised again: whoever cancels waits for this task, and asks nothing of it
        finally:
            self._connections.discard(task)
            for each in (writer, upstream):
                if each is not None:
                    each.close()

    def draw(self, method: str, target: str, authorization: str) -> Trouble | None:
        """The trouble that a request of now is in."""
        meant = next((t for t in self._troubles if t.means(method, target, authorization)), None)
        if meant is None or self._random.random() >= meant.chance:
            return None
        self.struck[meant.kind] += 1
        return meant

    @property
    def generation(self) -> int:
        """Counts the calls of disturb."""
        return self._generation

    async def changed(self, timeout_s: float | None = None) -> None:
        """Returns after the next disturb, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)


@dataclass
class _Head:
    """The first line and the headers of a request or an answer, and their bytes as they came."""

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
        """Whether the connection ends after this."""
        return "close" in self.headers.get("connection", "").lower() or self.first[0] == "HTTP/1.0"


class _Exchange:
    """One request and its answer."""

    def __init__(
        self, proxy: FaultProxy, request: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._request = request
        self._reader = reader
        self._writer = writer
        self._generation = -1
        self._drawn: Trouble | None = None

    @property
    def trouble(self) -> Trouble | None:
        """Drawn anew whenever somebody told the proxy something else."""
        if self._generation != self._proxy.generation:
            self._generation = self._proxy.generation
            method, target = self._request.first[:2]
            self._drawn = self._proxy.draw(method, target, self._request.headers.get("authorization", ""))
        return self._drawn

    @property
    def kind(self) -> Kind | None:
        trouble = self.trouble
        return None if trouble is None else trouble.kind

    async def gate(self) -> None:
        while self.kind is Kind.BLACK_HOLE:
            await self._proxy.changed()

    async def refuse(self) -> None:
        """Answer with an error, and take no notice of the request's body."""
        assert self._drawn is not None
        code, status = self._drawn.code, self._drawn.status
        page = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>told to</Message></Error>'
        body = b"" if self._request.first[0] == "HEAD" else page.encode()
        head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(page)}\r\n"
        self._writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await self._writer.drain()
        self._writer.write_eof()
        with contextlib.suppress(TimeoutError):  # a reset now would take the page back
            await asyncio.wait_for(_drain(self._reader), _LINGER_S)

    async def carry(self, answers: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> bool:
        """Request there, answer back; True if the connections may carry another."""
        up = asyncio.ensure_future(self._up(upstream))
        down = asyncio.ensure_future(self._down(answers))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if not down.done():
                up.result()  # raises what has happened to the request
            return await down and up.done() and not self._request.last
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _up(self, upstream: asyncio.StreamWriter) -> None:
        await self._send(upstream, self._request.raw)
        length = self._request.length
        async for piece in _body(self._reader, self._request, to_the_end=False):
            if self.kind is Kind.RESET:
                await self._send(upstream, piece[: len(piece) // 2])
                raise self._resets()
            await self._send(upstream, _flipped(piece) if self.kind is Kind.WRONG and length else piece)

    async def _down(self, answers: asyncio.StreamReader) -> bool:
        while True:
            head = await _read_head(answers)
            if head is None:
                return False
            await self.gate()
            if head.status >= 200:
                break
            await self._send(self._writer, head.raw)
        if self.kind is Kind.RESET and not head.length:
            raise self._resets()
        if self._request.first[0] == "HEAD" or head.status in {204, 304}:
            await self._send(self._writer, head.raw)
            return not head.last
        good = head.status in {200, 206}
        if good and self.kind is Kind.SHORT and head.length:
            return await self._half(head, answers)
        await self._send(self._writer, head.raw)
        async for piece in _body(answers, head, to_the_end=True):
            if self.kind in {Kind.RESET, Kind.CUT}:
                await self._send(self._writer, piece[: len(piece) // 2])
                if self.kind is Kind.RESET:
                    raise self._resets()
                return False
            await self._send(self._writer, _flipped(piece) if self.kind is Kind.WRONG and good else piece)
        return not head.last and (head.length is not None or "transfer-encoding" in head.headers)

    async def _half(self, head: _Head, answers: asyncio.StreamReader) -> bool:
        assert head.length is not None
        half = head.length // 2
        first, *lines = head.raw.split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith((b"content-length:", b"connection:"))]
        told = [b"Content-Length: %d" % half, b"Connection: close"]
        await self._send(self._writer, b"\r\n".join([first, *told, *kept]))
        await self._send(self._writer, await answers.readexactly(half))
        return False

    def _resets(self) -> ConnectionError:
        _reset(self._writer)
        return ConnectionResetError("told to")

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """As fast as the trouble of the moment allows."""
        while data:
            await self.gate()
            trouble = self.trouble
            if writer.is_closing():
                raise ConnectionResetError("the other end is gone")
            if trouble is None or trouble.kind is not Kind.TRICKLE:
                writer.write(data)
                await writer.drain()
                return
            some = max(1, int(trouble.bytes_per_s / 10))
            writer.write(data[:some])
            await writer.drain()
            data = data[some:]
            await self._proxy.changed(some / trouble.bytes_per_s)


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """None where the other end has nothing more to say."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return _Head(raw, first.split(" ", 2), headers)


async def _body(reader: asyncio.StreamReader, head: _Head, *, to_the_end: bool) -> AsyncIterator[bytes]:
    """The body that follows `head`, as it stands on the wire."""
    if "chunked" in head.headers.get("transfer-encoding", "").lower():
        size = -1
        while size:
            line = await reader.readline()
            size = int(line.split(b";")[0], 16)
            if size:
                line += await reader.readexactly(size + 2)
            else:
                while (trailer := await reader.readline()) not in {b"\r\n", b""}:
                    line += trailer
                line += b"\r\n"
            yield line
    elif head.length is not None:
        left = head.length
        while left:
            piece = await reader.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ConnectionResetError("a body has ended early")
            left -= len(piece)
            yield piece
    elif to_the_end:
        while piece := await reader.read(_PIECE_BYTES):
            yield piece


async def _drain(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(_PIECE_BYTES):
            pass


def _flipped(piece: bytes) -> bytes:
    middle = len(piece) // 2
    return piece[:middle] + bytes([piece[middle] ^ 0x10]) + piece[middle + 1 :]


def _reset(writer: asyncio.StreamWriter) -> None:
    """Have the connection end with RST, once what was written has gone out."""
    end: socket.socket | None = writer.get_extra_info("socket")
    if end is not None and end.fileno() >= 0:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
