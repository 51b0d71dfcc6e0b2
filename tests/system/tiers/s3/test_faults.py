"""Servers that are down, slow or faulty: nothing blocks for long, and rows are lost only where that is unavoidable."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.s3 import concurrency, data
from tests.support.certificates import self_signed
from tests.support.servers import SECRET_KEY, SeaweedServer, moto_server
from tests.system.tiers.s3.harness import (
    TIMEOUT_S,
    FaultyS3,
    TierDriver,
    but,
    wait_until,
)

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes
DOWN_S = 300.0  # a bound for what never ends: the machine may be busy


pytestmark = pytest.mark.usefixtures("server_credentials")


@pytest.fixture
def driver(faulty: FaultyS3) -> Iterator[TierDriver]:
    with TierDriver(SMALL, 32, bucket="kv-faults", endpoint=faulty.endpoint) as driver:
        driver.open_ready()
        yield driver


class TestOpen:
    def test_a_server_that_accepts_and_never_answers(self) -> None:
        with moto_server() as server, TierDriver(SMALL, 4, bucket="kv-faults", endpoint=server.endpoint) as driver:
            server.make_bucket("kv-faults")
            server.pause()
            started = time.monotonic()
            with pytest.raises(TierDown, match="does not answer"):
                driver.try_open()
            assert time.monotonic() - started < DOWN_S
            server.resume()
            driver.open()


class TestWhereTheyGo:
    """By boto3 and by NIXL."""

    def test_to_where_boto3_is_sent_signed_for_the_buckets_region_and_through_no_proxy(
        self, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """NIXL's AWS library reads neither boto3's profiles nor `endpoint_url` in them."""
        for name in (
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "NO_PROXY",
            "no_proxy",
        ):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
        (tmp_path / "config").write_text(f"[profile kv]\nendpoint_url = {faulty.endpoint}\n")
        (tmp_path / "credentials").write_text(_credentials_file("of-kv", "kv"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        faulty.region = "sa-east-1"
        with TierDriver(SMALL, 4, bucket="kv-regions", profile="kv") as driver:
            driver.open()
            assert driver.store([1]) == [Outcome.OK]
            assert driver.load([1]) == [Outcome.OK]
        first, *others = faulty.requests
        assert first.method == "HEAD"
        assert {request.method for request in others} >= {"GET", "PUT", "DELETE"}
        assert {(request.region, request.access_key) for request in others} == {("sa-east-1", "of-kv")}


class TestTls:
    def test_the_certificate_is_checked(self, tmp_path: Path) -> None:
        certificate = self_signed(tmp_path)
        with moto_server(certificate=certificate) as server:
            server.make_bucket("kv-faults")
            place = {"bucket": "kv-faults", "endpoint": server.endpoint}
            with TierDriver(SMALL, 4, **place) as driver:
                driver.fails_to_open(TierDown, r"certificate .* ca_file")
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
                    caught = driver.fails_to_open(TierDown, f" at {endpoint}: {speaks}")
                assert "endpoint" in str(caught)

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

    def test_a_download_that_times_out_holds_one_staging_row(
        self, driver: TierDriver, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.store([1, 2])
        staging = len(driver.tier._data.free_staging)
        faulty.hold = threading.Event()
        with monkeypatch.context() as patch:  # of this download only: those that are answered may take their time
            patch.setattr(driver.tier._data, "_download_s", 0.3)
            assert driver.load([1]) == [Outcome.FAILED]
        held, faulty.hold = faulty.hold, None
        assert len(driver.tier._data.free_staging) == staging - 1
        assert driver.load([2]) == [Outcome.OK]
        driver.row(1)[:] = 77
        held.set()
        driver.finish()
        assert wait_until(lambda: driver.tier.poll() == [] and len(driver.tier._data.free_staging) == staging)
        assert (driver.row(1) == 77).all(), "an abandoned download wrote to the region"
        assert driver.load([1]) == [Outcome.OK]

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
            assert driver.finish(batch) == [[Outcome.OK] * 60]


def _credentials_file(access_key: str, profile: str = "default") -> str:
    return f"[{profile}]\naws_access_key_id = {access_key}\naws_secret_access_key = {SECRET_KEY}\n"
