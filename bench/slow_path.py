"""A TCP proxy on this machine that delivers a server's answers later: a distant server, for benchmarks."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from urllib.parse import urlsplit


@contextlib.contextmanager
def slow_path(endpoint: str, delay_s: float) -> Iterator[str]:
    """The URL of a proxy to this one, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(endpoint, delay_s, theirs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _serve(endpoint: str, delay_s: float, end: Connection) -> None:
    asyncio.run(_proxy(endpoint, delay_s, end))


async def _proxy(endpoint: str, delay_s: float, end: Connection) -> None:
    url = urlsplit(endpoint)
    loop = asyncio.get_running_loop()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(url.hostname, url.port)

        async def answers() -> None:
            while data := await back.read(1 << 18):
                loop.call_later(delay_s, writer.write, data)
            loop.call_later(delay_s, writer.close)

        task = asyncio.create_task(answers())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                forth.write(data)
                await forth.drain()
        forth.close()
        await task

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    end.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()
