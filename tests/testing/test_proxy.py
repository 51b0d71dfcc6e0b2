"""The fault proxy, between a plain HTTP client and a server of a few lines."""

from __future__ import annotations

import http.client
import http.server
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.proxy import FaultProxy, Kind, Trouble
from tests.support.waiting import until

BODY = bytes(range(256)) * 1024  # four pieces


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
    """Sends a request on a connection that is kept, as long as it can be."""
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


def test_what_is_carried_is_not_changed_and_connections_are_kept(proxy: FaultProxy, ask: Ask, server: Server) -> None:
    for path in ("/one", "/chunked"):
        assert ask("GET", path) == (200, BODY)
    assert ask("HEAD", "/one") == (200, b"")
    assert ask("PUT", "/new", BODY[:70_000]) == (200, b"")
    assert ask("GET", "/new") == (200, BODY[:70_000])
    assert ask("GET", "/none") == (404, b"")
    assert proxy.requests == 6
    assert len(proxy._connections) == 1
    assert not proxy.struck


def test_refuse_resets_what_is_connected_and_comes_back_on_the_same_port(proxy: FaultProxy, ask: Ask) -> None:
    assert ask("GET", "/one") == (200, BODY)
    proxy.disturb(Trouble(Kind.REFUSE))
    for _ in range(2):
        with pytest.raises(OSError):
            ask("GET", "/one")
    proxy.clear()
    assert ask("GET", "/one") == (200, BODY)


def test_a_black_hole_swallows_open_connections_too_and_gives_back_what_it_held(proxy: FaultProxy, ask: Ask) -> None:
    assert ask("GET", "/one") == (200, BODY)
    proxy.disturb(Trouble(Kind.BLACK_HOLE))
    answers: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: answers.append(ask("GET", "/one")))
    thread.start()
    until(lambda: proxy.struck[Kind.BLACK_HOLE], "the request to get there")
    fresh = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=0.3)
    fresh.request("GET", "/two")
    with pytest.raises(TimeoutError):
        fresh.getresponse()
    fresh.close()
    assert not answers
    proxy.clear()
    thread.join(120)
    assert answers == [(200, BODY)]


def test_a_black_hole_in_the_middle_of_a_body(proxy: FaultProxy, server: Server) -> None:
    proxy.disturb(Trouble(Kind.TRICKLE, bytes_per_s=4e4))
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.request("GET", "/one")
    answer = connection.getresponse()
    some = answer.read(1000)
    proxy.disturb(Trouble(Kind.BLACK_HOLE))
    until(lambda: proxy.struck[Kind.BLACK_HOLE], "the transfer to notice")
    proxy.clear()
    assert some + answer.read() == BODY
    connection.close()


def test_a_trickle_meant_for_one_object_leaves_the_others_alone(proxy: FaultProxy, ask: Ask) -> None:
    proxy.disturb(Trouble(Kind.TRICKLE, within="/two", bytes_per_s=1.0))
    assert ask("GET", "/one") == (200, BODY)
    began = time.monotonic()
    answers: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: answers.append(ask("GET", "/two")))
    thread.start()
    until(lambda: proxy.struck[Kind.TRICKLE], "the request to get there")
    thread.join(0.5)
    assert not answers
    proxy.clear()
    thread.join(120)
    assert answers == [(200, BODY)]
    assert time.monotonic() - began < len(BODY)


def test_what_is_cut_reset_short_or_wrong(proxy: FaultProxy, ask: Ask) -> None:
    proxy.disturb(Trouble(Kind.CUT))
    with pytest.raises(http.client.IncompleteRead) as cut:
        ask("GET", "/one")
    assert 0 < len(cut.value.partial) < len(BODY)
    proxy.disturb(Trouble(Kind.RESET))
    with pytest.raises(ConnectionResetError):
        ask("GET", "/one")
    with pytest.raises(OSError):
        ask("HEAD", "/none")
    proxy.disturb(Trouble(Kind.SHORT))
    assert ask("GET", "/one") == (200, BODY[: len(BODY) // 2])
    proxy.disturb(Trouble(Kind.WRONG))
    status, body = ask("GET", "/one")
    assert (status, len(body)) == (200, len(BODY))
    assert body != BODY


def test_an_upload_that_is_reset_or_wrong(proxy: FaultProxy, ask: Ask, server: Server) -> None:
    proxy.disturb(Trouble(Kind.RESET, methods=frozenset({"PUT"})))
    with pytest.raises(OSError):
        ask("PUT", "/new", BODY)
    assert "/new" not in server.bodies or server.bodies["/new"] != BODY
    proxy.disturb(Trouble(Kind.WRONG, methods=frozenset({"PUT"})))
    assert ask("PUT", "/wrong", BODY) == (200, b"")
    assert len(server.bodies["/wrong"]) == len(BODY)
    assert server.bodies["/wrong"] != BODY


def test_error_pages_never_reach_the_server(proxy: FaultProxy, ask: Ask, server: Server) -> None:
    proxy.disturb(Trouble(Kind.STATUS, status=503, code="SlowDown"))
    status, page = ask("PUT", "/new", BODY)
    assert status == 503
    assert b"<Code>SlowDown</Code>" in page
    assert "/new" not in server.bodies
    assert ask("HEAD", "/one") == (503, b"")
    proxy.disturb(Trouble(Kind.STATUS, status=403, code="ExpiredToken", holder="old-key"))
    assert ask("GET", "/one", Authorization="old-key")[0] == 403
    assert ask("GET", "/one", Authorization="new-key") == (200, BODY)


def test_chance_strikes_some(proxy: FaultProxy, ask: Ask) -> None:
    proxy.disturb(Trouble(Kind.STATUS, status=500, code="InternalError", chance=0.5))
    answers = [ask("HEAD", "/one")[0] for _ in range(40)]
    assert set(answers) == {200, 500}
    assert answers.count(500) == proxy.struck[Kind.STATUS]


def test_nothing_is_left_after_close(server: Server) -> None:
    threads = threading.active_count()
    proxy = FaultProxy(server.server_address[1])
    proxy.disturb(Trouble(Kind.BLACK_HOLE))
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.request("GET", "/one")
    until(lambda: proxy.struck[Kind.BLACK_HOLE], "the request to get there")
    proxy.close()
    with pytest.raises(OSError):
        connection.getresponse()
    connection.close()
    proxy.close()
    assert threading.active_count() <= threads + 1  # the server's own, for a connection
