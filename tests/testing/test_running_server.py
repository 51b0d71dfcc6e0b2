"""Tests on an S3 server that somebody else runs: `pytest -m s3 --endpoint URL`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_tiers.testing.servers import RunningServer, S3Server, SeaweedServer, ServerError, running_server

ROOT = Path(__file__).parents[2]
Use = Callable[[S3Server], None]


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
