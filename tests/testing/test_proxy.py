"""The fault proxy, between an HTTP client and a minimal server."""

from __future__ import annotations

import http.client
import http.server
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.waiting import until

BODY = bytes(range(256)) * 1024  # four reads of the proxy


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    bodies: dict[str, bytes]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        body = self.server.bodies.get(self.path)
        self.send_response(404 if body is None else 200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(BODY), 100_000):
                piece = BODY[start : start + 100_000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self.server.bodies[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.bodies = {"/one": BODY, "/two": BODY, "/chunked": BODY}
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.server_address[1]) as proxy:
        yield proxy


Ask = Callable[..., tuple[int, bytes]]


@pytest.fixture
def ask(proxy: FaultProxy) -> Iterator[Ask]:
    """Sends a request on a connection that is kept open while the server allows."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)

    def send(method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except BaseException:
            connection.close()
            raise

    yield send
    connection.close()


def test_relayed_bytes_are_unchanged_and_connections_are_reused(proxy: FaultProxy, ask: Ask, server: Server) -> None:
    for path in ("/one", "/chunked"):
        assert ask("GET", path) == (200, BODY)
    assert ask("HEAD", "/one") == (200, b"")
    assert ask("PUT", "/new", BODY[:70_000]) == (200, b"")
    assert ask("GET", "/new") == (200, BODY[:70_000])
    assert ask("GET", "/none") == (404, b"")
    assert proxy.requests == 6
    assert len(proxy._connections) == 1
    assert not proxy.injected


def test_refused_resets_open_connections_and_clear_listens_on_the_same_port(proxy: FaultProxy, ask: Ask) -> None:
    assert ask("GET", "/one") == (200, BODY)
    proxy.inject(ProxyFault(FaultKind.REFUSED))
    for _ in range(2):
        with pytest.raises(OSError):
            ask("GET", "/one")
    proxy.clear()
    assert ask("GET", "/one") == (200, BODY)


def test_black_hole_stalls_open_connections_until_cleared(proxy: FaultProxy, ask: Ask) -> None:
    assert ask("GET", "/one") == (200, BODY)
    proxy.inject(ProxyFault(FaultKind.BLACK_HOLE))
    answers: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: answers.append(ask("GET", "/one")))
    thread.start()
    until(lambda: proxy.injected[FaultKind.BLACK_HOLE], "the request to arrive")
    fresh = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=0.3)
    fresh.request("GET", "/two")
    with pytest.raises(TimeoutError):
        fresh.getresponse()
    fresh.close()
    assert not answers
    proxy.clear()
    thread.join(120)
    assert answers == [(200, BODY)]


def test_black_hole_stalls_a_body_in_flight(proxy: FaultProxy, server: Server) -> None:
    proxy.inject(ProxyFault(FaultKind.THROTTLE, bytes_per_s=4e4))
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.request("GET", "/one")
    answer = connection.getresponse()
    first = answer.read(1000)
    proxy.inject(ProxyFault(FaultKind.BLACK_HOLE))
    until(lambda: proxy.injected[FaultKind.BLACK_HOLE], "the transfer to stall")
    proxy.clear()
    assert first + answer.read() == BODY
    connection.close()


def test_throttle_applies_to_the_matching_object_only(proxy: FaultProxy, ask: Ask) -> None:
    proxy.inject(ProxyFault(FaultKind.THROTTLE, target="/two", bytes_per_s=1.0))
    assert ask("GET", "/one") == (200, BODY)
    began = time.monotonic()
    answers: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: answers.append(ask("GET", "/two")))
    thread.start()
    until(lambda: proxy.injected[FaultKind.THROTTLE], "the request to arrive")
    thread.join(0.5)
    assert not answers
    proxy.clear()
    thread.join(120)
    assert answers == [(200, BODY)]
    assert time.monotonic() - began < len(BODY)


def test_faults_of_a_response_body(proxy: FaultProxy, ask: Ask) -> None:
    proxy.inject(ProxyFault(FaultKind.EARLY_EOF))
    with pytest.raises(http.client.IncompleteRead) as cut:
        ask("GET", "/one")
    assert 0 < len(cut.value.partial) < len(BODY)
    proxy.inject(ProxyFault(FaultKind.RESET))
    with pytest.raises(ConnectionResetError):
        ask("GET", "/one")
    with pytest.raises(OSError):
        ask("HEAD", "/none")
    proxy.inject(ProxyFault(FaultKind.TRUNCATED))
    assert ask("GET", "/one") == (200, BODY[: len(BODY) // 2])
    proxy.inject(ProxyFault(FaultKind.BIT_FLIP))
    status, body = ask("GET", "/one")
    assert (status, len(body)) == (200, len(BODY))
    assert body != BODY


def test_faults_of_a_request_body(proxy: FaultProxy, ask: Ask, server: Server) -> None:
    proxy.inject(ProxyFault(FaultKind.RESET, methods=frozenset({"PUT"})))
    with pytest.raises(OSError):
        ask("PUT", "/new", BODY)
    assert "/new" not in server.bodies or server.bodies["/new"] != BODY
    proxy.inject(ProxyFault(FaultKind.BIT_FLIP, methods=frozenset({"PUT"})))
    assert ask("PUT", "/wrong", BODY) == (200, b"")
    assert len(server.bodies["/wrong"]) == len(BODY)
    assert server.bodies["/wrong"] != BODY


def test_error_status_hides_the_request_from_the_server(proxy: FaultProxy, ask: Ask, server: Server) -> None:
    proxy.inject(ProxyFault(FaultKind.ERROR_STATUS, status=503, code="SlowDown"))
    status, page = ask("PUT", "/new", BODY)
    assert status == 503
    assert b"<Code>SlowDown</Code>" in page
    assert "/new" not in server.bodies
    assert ask("HEAD", "/one") == (503, b"")
    proxy.inject(ProxyFault(FaultKind.ERROR_STATUS, status=403, code="ExpiredToken", authorization="old-key"))
    assert ask("GET", "/one", Authorization="old-key")[0] == 403
    assert ask("GET", "/one", Authorization="new-key") == (200, BODY)


def test_probability_selects_some_requests(proxy: FaultProxy, ask: Ask) -> None:
    proxy.inject(ProxyFault(FaultKind.ERROR_STATUS, status=500, code="InternalError", probability=0.5))
    answers = [ask("HEAD", "/one")[0] for _ in range(40)]
    assert set(answers) == {200, 500}
    assert answers.count(500) == proxy.injected[FaultKind.ERROR_STATUS]


def test_close_leaks_nothing(server: Server) -> None:
    threads = threading.active_count()
    proxy = FaultProxy(server.server_address[1])
    proxy.inject(ProxyFault(FaultKind.BLACK_HOLE))
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.request("GET", "/one")
    until(lambda: proxy.injected[FaultKind.BLACK_HOLE], "the request to arrive")
    proxy.close()
    with pytest.raises(OSError):
        connection.getresponse()
    connection.close()
    proxy.close()
    assert threading.active_count() <= threads + 1  # one of the server's, for a connection
