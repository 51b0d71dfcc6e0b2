"""Servers that are down, slow or faulty: nothing blocks for long, and rows are lost only where that is unavoidable."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.s3 import concurrency, data
from tests.support.certificates import self_signed
from tests.support.servers import SECRET_KEY, SeaweedServer, moto_server
from tests.system.tiers.s3.harness import TIMEOUT_S, FaultyS3, TierDriver, but, wait_until

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes
DOWN_S = 300.0  # a bound for what never ends: the machine may be busy


pytestmark = pytest.mark.usefixtures("server_credentials")


def test_a_server_that_accepts_and_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        with TierDriver(SMALL, 4, bucket="kv-faults", endpoint=endpoint) as driver:
            started = time.monotonic()
            with pytest.raises(TierDown, match="does not answer"):
                driver.try_open()
            assert time.monotonic() - started < DOWN_S


def test_requests_go_where_boto3_is_sent_signed_for_the_buckets_region_and_through_no_proxy(
    faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By boto3 and by NIXL, whose AWS library reads neither boto3's profiles nor `endpoint_url` in them."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    (tmp_path / "config").write_text(f"[profile kv]\nendpoint_url = {faulty.endpoint}\n")
    (tmp_path / "credentials").write_text(f"[kv]\naws_access_key_id = of-kv\naws_secret_access_key = {SECRET_KEY}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    faulty.region = "sa-east-1"
    with TierDriver(SMALL, 4, bucket="kv-regions", profile="kv") as driver:
        driver.open()
        assert driver.store([1]) == [Outcome.OK]
        assert driver.load([1]) == [Outcome.OK]
    first, *others = faulty.signed
    assert first[0] == "HEAD"
    assert {method for method, *_ in others} >= {"GET", "PUT", "DELETE"}
    assert {(key, region) for _, key, region in others} == {("of-kv", "sa-east-1")}


class TestTls:
    def test_the_certificate_is_checked(self, tmp_path: Path) -> None:
        certificate = self_signed(tmp_path)
        with moto_server(certificate=certificate) as server:
            server.make_bucket("kv-faults")
            place = {"bucket": "kv-faults", "endpoint": server.endpoint}
            with TierDriver(SMALL, 4, **place) as driver:
                driver.fails_to_open(r"certificate .* ca_file")
            with TierDriver(SMALL, 4, **place, ca_file=certificate[0]) as driver:
                driver.open()
                assert driver.store([1, 2]) == [Outcome.OK, Outcome.OK]
                assert driver.load([1, 2]) == [Outcome.OK, Outcome.OK]

    def test_a_wrong_scheme_of_the_endpoint_is_reported(self, tmp_path: Path, faulty: FaultyS3) -> None:
        with moto_server(certificate=self_signed(tmp_path)) as server:
            for endpoint, speaks in (
                (server.endpoint.replace("https:", "http:"), "speaks https, not http"),
                (faulty.endpoint.replace("http:", "https:"), "speaks http, not https"),
            ):
                with TierDriver(SMALL, 4, bucket="kv-faults", endpoint=endpoint) as driver:
                    driver.fails_to_open(rf" at {endpoint}: {speaks} \(see endpoint\)")

    def test_nixl_checks_the_certificate_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trusted, other = tmp_path / "trusted", tmp_path / "other"
        certificates = [self_signed(directory) for directory in (trusted, other)]
        with moto_server(certificate=certificates[0]) as server:
            server.make_bucket("kv-faults")
            # Only the data connection is given the wrong bundle here.
            monkeypatch.setattr(data, "trusted_certificates", lambda _: str(certificates[1][0]))
            config = {"bucket": "kv-faults", "endpoint": server.endpoint, "ca_file": certificates[0][0]}
            with TierDriver(SMALL, 4, **config) as driver:
                driver.open()
                assert driver.store([1]) == [Outcome.FAILED]


class TestTransfers:
    def test_a_server_restart_loses_nothing(self, s3_prefix: str) -> None:
        with SeaweedServer().start() as server:
            server.make_bucket("kv-faults")
            with TierDriver(SMALL, 32, bucket="kv-faults", prefix=s3_prefix, endpoint=server.endpoint) as driver:
                driver.open()
                numbers = list(range(8))
                assert driver.store(numbers) == [Outcome.OK] * 8
                server.stop()
                assert driver.load(numbers) == [Outcome.FAILED] * 8
                assert driver.store([20, 21]) == [Outcome.FAILED] * 2
                server.start()
                assert driver.load(numbers) == [Outcome.OK] * 8
                assert driver.settled(8)

    def test_more_transfers_run_at_once_than_one_agent_has_connections(
        self, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(concurrency, "FIRST", 60)
        times = but(s3_download_s=TIMEOUT_S)
        with TierDriver(SMALL, 64, bucket="kv-faults", endpoint=faulty.endpoint, times=times) as driver:
            driver.open()
            driver.store(range(60))
            faulty.hold = threading.Event()
            batch = driver.tier.load(driver.moves(range(60)))
            assert wait_until(lambda: faulty.concurrent >= 60)
            faulty.hold.set()
            assert driver.finish(batch) == [Outcome.OK] * 60
