"""The proxy by which tests inject faults between a tier and its S3 server."""

from __future__ import annotations

import socket
import threading

from tests.support.proxy import FaultKind, FaultProxy, ProxyFault

BODY = bytes(1 << 20)


def test_connection_that_is_throttled_is_reset_when_connections_are_refused() -> None:
    """Not a byte of the response comes afterwards: a row that arrived whole would be a hit during the fault."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)

        thread = threading.Thread(target=serve)
        thread.start()
        with FaultProxy(server.getsockname()[1]) as proxy:
            proxy.inject(ProxyFault(FaultKind.THROTTLE, bytes_per_s=1000))
            with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                came = len(client.recv(1))
                proxy.inject(ProxyFault(FaultKind.REFUSED))
                try:
                    while some := client.recv(1 << 16):
                        came += len(some)
                except ConnectionResetError:
                    pass
        thread.join()
    assert came < 10_000
