"""bench.memory_s3 answers as an S3 server does, as far as the tier and boto3 ask it."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from bench.memory_s3 import memory_server
from bench.s3_tier import Tier, filled
from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.config.schema import S3Config

BUCKET = "rows"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with memory_server() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server.endpoint


def test_objects_come_back_by_name_range_and_condition(endpoint: str) -> None:
    client = boto3.client("s3", endpoint_url=endpoint, config=Config(s3={"addressing_style": "path"}))
    body = bytes(range(256)) * (1 << 13)  # large enough for `Expect: 100-continue`
    tag = client.put_object(Bucket=BUCKET, Key="p/a", Body=body)["ETag"]
    assert client.get_object(Bucket=BUCKET, Key="p/a")["Body"].read() == body
    assert client.get_object(Bucket=BUCKET, Key="p/a", Range="bytes=1-5000000")["Body"].read() == body[1:]
    assert client.head_object(Bucket=BUCKET, Key="p/a")["ContentLength"] == len(body)
    for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"0"'}):
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=BUCKET, Key="p/a", Body=b"", **condition)
    client.put_object(Bucket=BUCKET, Key="p/a", Body=b"new", IfMatch=tag)
    client.put_object(Bucket=BUCKET, Key="q/b", Body=b"")
    (found,) = client.list_objects_v2(Bucket=BUCKET, Prefix="p/")["Contents"]
    assert (found["Key"], found["Size"]) == ("p/a", 3)
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "p/a"}]})
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket=BUCKET, Key="p/a")


def test_tier_stores_and_loads_there(endpoint: str) -> None:
    geometry = Geometry(1, 300 * PAGE)
    with filled(geometry, 40) as region:
        config = S3Config(type="s3", bucket=BUCKET, prefix="bench", endpoint=endpoint, capacity=1 << 30)
        tier = Tier(config, geometry, region)
        tier.store()
        before = region.rows_view.copy()
        region.rows_view[:] = 0
        tier.load()
        assert (region.rows_view == before).all()
        tier.close()
