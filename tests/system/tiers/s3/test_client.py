"""For which region requests are signed (that of the field, the environment, the profile or the bucket, in this order),
and where they go without the field `endpoint`: boto3's and NIXL's alike."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierRefused
from nixl_tiers.tiers.s3.client import Region, configured_region, endpoint_of
from nixl_tiers.tiers.s3.control import S3Control
from tests.system.tiers.s3.harness import FaultyS3, TierDriver, connects, wait_until

SMALL = Geometry(cells=1, cell_payload=64 << 10)
PROFILES = """[default]
region = ca-central-1
[profile kv]
region = eu-central-1
[profile no-region]
output = json
"""


@pytest.fixture(autouse=True)
def environment(server_credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No region is set but in a file of profiles, which tests select."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(PROFILES)
    (tmp_path / "credentials").write_text(
        "".join(f"[{name}]\naws_access_key_id = a\naws_secret_access_key = b\n" for name in ("kv", "no-region"))
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.mark.parametrize(
    ("fields", "variables", "reported", "expected"),
    [
        ({"region": "eu-north-1"}, {"AWS_REGION": "ap-south-1"}, "sa-east-1", "eu-north-1"),
        ({}, {"AWS_REGION": "ap-south-1", "AWS_DEFAULT_REGION": "ap-east-1"}, "sa-east-1", "ap-south-1"),
        ({"profile": "kv"}, {"AWS_DEFAULT_REGION": "ap-east-1", "AWS_CONFIG_FILE": "config"}, "", "ap-east-1"),
        ({"profile": "kv"}, {"AWS_REGION": "", "AWS_CONFIG_FILE": "config"}, "", "eu-central-1"),
        ({}, {"AWS_PROFILE": "kv", "AWS_CONFIG_FILE": "config"}, "", "eu-central-1"),
        ({}, {"AWS_CONFIG_FILE": "config"}, "", "ca-central-1"),
        ({"profile": "no-region"}, {"AWS_CONFIG_FILE": "config"}, "sa-east-1", "sa-east-1"),
        ({}, {}, "sa-east-1", "sa-east-1"),
        ({}, {}, "no region\tat all", "us-east-1"),
        ({}, {}, "", "us-east-1"),
    ],
)
def test_all_requests_are_signed_for_the_region(
    faulty: FaultyS3,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tmp_path: Path,
    fields: dict[str, str],
    variables: dict[str, str],
    reported: str,
    expected: str,
) -> None:
    """By boto3 and by NIXL."""
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if name == "AWS_CONFIG_FILE" else value)
    faulty.region = reported
    with TierDriver(SMALL, 4, bucket="kv-regions", endpoint=faulty.endpoint, **fields) as driver:
        driver.open()
        assert driver.store([1]) == [Outcome.OK]
        assert driver.load([1]) == [Outcome.OK]
    first, *others = faulty.requests
    assert first.method == "HEAD"
    assert {request.method for request in others} >= {"GET", "PUT", "DELETE"}
    assert {request.region for request in others if request.method != "HEAD"} == {expected}


def test_an_invalid_region_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = S3Config(type="s3", bucket="kv-regions", capacity="1GiB")
    monkeypatch.setenv("AWS_REGION", "eu west 1")
    with pytest.raises(TierRefused, match=r"^region: the environment variable AWS_REGION does not hold a region name$"):
        configured_region(tier)
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert configured_region(tier) == Region("us-east-1")


class TestAws:
    """A bucket of AWS answers in its own region only. A variable of boto3's redirects it to the test server."""

    @pytest.fixture
    def aws(self, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", faulty.endpoint)
        faulty.region = "sa-east-1"
        return faulty

    def connect(self, **fields: str) -> S3Control:
        bucket = S3Control(S3Config(type="s3", bucket="kv-regions", capacity="1GiB", **fields))
        try:
            assert wait_until(lambda: connects(bucket))
        finally:
            bucket.close()
        return bucket

    def test_the_buckets_region_overrides_the_environment_and_is_logged_once(
        self, aws: FaultyS3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("AWS_REGION", "ap-south-1")
        with caplog.at_level(logging.WARNING):
            assert self.connect().connection.region.name == "sa-east-1"
        (record,) = [record for record in caplog.records if record.name.startswith("nixl_tiers")]
        assert record.getMessage() == (
            'region: bucket "kv-regions" is in sa-east-1, which is used, and not in ap-south-1, as AWS_REGION says'
        )


# --- where they go ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["profile", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_rows_go_where_boto3_is_sent(
    source: str, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NIXL's AWS library reads neither boto3's profiles nor `endpoint_url` in them. And neither of the two goes through
    a proxy of the environment."""
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for variable in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nobody answers
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
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
