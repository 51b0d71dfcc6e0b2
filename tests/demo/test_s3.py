"""The S3 server of the demo: one that runs is left as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nixl_tiers.demo.run import BUCKET, BUCKET_VARIABLE, s3_server
from nixl_tiers.testing.servers import MotoServer, S3Server


def test_bucket_on_a_server_that_runs_is_made_and_removed(
    moto: MotoServer, s3_credentials: Callable[[S3Server], None]
) -> None:
    s3_credentials(moto)
    with s3_server(moto.endpoint) as server:
        name = server.make_bucket(BUCKET)
        server.client().put_object(Bucket=name, Key="row", Body=b"row")
    assert name not in [bucket["Name"] for bucket in moto.client().list_buckets()["Buckets"]]


def test_bucket_that_is_named_is_kept(
    moto: MotoServer, s3_credentials: Callable[[S3Server], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_credentials(moto)
    monkeypatch.setenv(BUCKET_VARIABLE, moto.make_bucket("somebodys"))
    moto.client().put_object(Bucket="somebodys", Key="theirs", Body=b"theirs")
    with s3_server(moto.endpoint) as server:
        assert server.make_bucket(BUCKET) == "somebodys"
    assert [found["Key"] for found in moto.client().list_objects_v2(Bucket="somebodys")["Contents"]] == ["theirs"]
