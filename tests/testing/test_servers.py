"""S3 servers for tests: started on ports that other processes may take first, or run by somebody else (`pytest -m s3
--endpoint URL`)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.servers import (
    MotoServer,
    PortTakenError,
    RunningServer,
    S3Server,
    SeaweedServer,
    ServerError,
    moto_server,
    running_server,
)

ROOT = Path(__file__).parents[2]
Use = Callable[[S3Server], None]


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


def names(server: S3Server, bucket: str) -> list[str]:
    found = server.client().list_objects_v2(Bucket=bucket).get("Contents", ())
    return [each["Key"] for each in found]


def buckets(server: S3Server) -> set[str]:
    return {bucket["Name"] for bucket in server.client().list_buckets()["Buckets"]}


def test_bucket_that_is_given_keeps_what_was_there(seaweedfs: SeaweedServer, s3_credentials: Use) -> None:
    s3_credentials(seaweedfs)
    theirs = seaweedfs.make_bucket("theirs")
    seaweedfs.client().put_object(Bucket=theirs, Key="precious", Body=b"bytes")
    with running_server(seaweedfs.endpoint, theirs) as server:
        assert server.make_bucket("tiers") == theirs
        server.client().put_object(Bucket=theirs, Key=f"{server.prefix}-1/row", Body=b"row")
        assert len(names(seaweedfs, theirs)) == 2
    assert names(seaweedfs, theirs) == ["precious"]


def test_bucket_that_was_made_is_removed(seaweedfs: SeaweedServer, s3_credentials: Use) -> None:
    s3_credentials(seaweedfs)
    before = buckets(seaweedfs)
    with running_server(seaweedfs.endpoint) as server:
        made = server.make_bucket("tiers")
        server.client().put_object(Bucket=made, Key="row", Body=b"row")
        assert buckets(seaweedfs) == before | {made}
    assert buckets(seaweedfs) == before


def test_server_that_refuses_is_named(seaweedfs: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "knows")
    server = RunningServer(seaweedfs.endpoint)
    with pytest.raises(ServerError, match=f"{seaweedfs.endpoint} cannot be used: .*"):
        server.start()
    server.close()


def test_marked_tests_run_on_the_endpoint(seaweedfs: SeaweedServer) -> None:
    """Two of them; each runs once, and nothing of them is left on the server."""
    before = buckets(seaweedfs)
    file = "tests/tiers/s3/test_round_trip.py"
    chosen = [f"{file}::test_an_empty_batch_finishes", f"{file}::TestCorruptObjects::test_a_missing_object"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "s3", "--endpoint"]
    done = subprocess.run(
        [*command, seaweedfs.endpoint, *chosen], cwd=ROOT, env={**os.environ, **seaweedfs.env}, capture_output=True,
        text=True, timeout=500, check=False,
    )  # fmt: skip
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert buckets(seaweedfs) == before
