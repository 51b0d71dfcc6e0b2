"""Servers for tests: started on ports that other processes may take first."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from nixl_tiers.testing import servers
from nixl_tiers.testing.servers import MotoServer, PortTakenError, moto_server


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_server_whose_port_is_taken_starts_on_another(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others start servers at the same time, and a port is free only when it is looked for."""
    found, free_ports = [taken], servers.free_ports
    monkeypatch.setattr(servers, "free_ports", lambda count: [found.pop()] if found else free_ports(count))
    with moto_server() as server:
        assert server.port != taken
        assert server.client().list_buckets()["Buckets"] == []
    assert not found


def test_given_port_that_is_taken_is_an_error(taken: int) -> None:
    with pytest.raises(PortTakenError, match=f"MotoServer on port {taken} did not start"), moto_server(port=taken):
        pass
    with MotoServer(taken) as server, pytest.raises(PortTakenError):
        server.start()
