"""Where requests go without the field `endpoint`: boto3's and NIXL's to the same server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.s3.client import endpoint_of
from tests.tiers.s3.harness import FaultyS3, TierDriver

SMALL = Geometry(cells=1, cell_payload=64 << 10)


@pytest.mark.parametrize("source", ["profile", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_rows_go_where_boto3_is_sent(
    source: str, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NIXL's AWS library reads neither boto3's profiles nor `endpoint_url` in them."""
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # AWS is not to be reached, whatever fails
    fields = {}
    if source == "profile":
        config, credentials = tmp_path / "config", tmp_path / "credentials"
        config.write_text(f"[profile kv]\nendpoint_url = {faulty.endpoint}\n")
        credentials.write_text("[kv]\naws_access_key_id = id\naws_secret_access_key = secret\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
        fields = {"profile": "kv"}
    else:
        monkeypatch.setenv(source, faulty.endpoint)
    with TierDriver(SMALL, 2, bucket="kv-endpoint", **fields) as driver:
        driver.open()
        assert driver.store([1]) == [Outcome.OK]
        assert driver.name(1) in faulty.objects
        assert driver.load([1]) == [Outcome.OK]


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("https://s3.amazonaws.com", True),
        ("https://s3.eu-west-1.amazonaws.com", True),
        ("https://s3.dualstack.eu-west-1.amazonaws.com", True),
        ("https://s3-fips.us-east-1.amazonaws.com", True),
        ("https://s3.cn-north-1.amazonaws.com.cn", True),
        ("https://s3.eusc-de-east-1.amazonaws.eu", True),
        ("https://bucket.vpce-0a-1b.s3.us-east-1.vpce.amazonaws.com", False),
        ("https://s3.example.com:9000", False),
        ("https://s3.amazonaws.com.example.com", False),
        ("http://127.0.0.1:9000", False),
    ],
)
def test_endpoint_of_aws_is_left_to_nixl(url: str, own: bool) -> None:
    """With an endpoint NIXL no longer puts the bucket into the host name, as AWS wants it."""
    assert endpoint_of(SimpleNamespace(meta=SimpleNamespace(endpoint_url=url))) == (None if own else url)
