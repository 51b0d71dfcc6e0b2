"""Servers that are down, slow or faulty: nothing blocks for long, and rows are lost only where that is unavoidable."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.s3 import concurrency, data
from nixl_tiers.tiers.s3.client import Credentials
from tests.support.certificates import self_signed
from tests.support.servers import ACCESS_KEY, SECRET_KEY, MotoServer, SeaweedServer, moto_server
from tests.system.tiers.s3.harness import (
    TIMEOUT_S,
    FaultyS3,
    Request,
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


def failing(*methods: str, times: int = 1 << 30, status: int = 503) -> Callable[[Request], int | None]:
    """A fault: the next `times` requests of these methods are answered with `status`."""
    left = [times]

    def fault(request: Request) -> int | None:
        if request.method not in methods or left[0] == 0:
            return None
        left[0] -= 1
        return status

    return fault


class TestOpen:
    def test_a_server_that_is_down_comes_up_later(self) -> None:
        server = MotoServer()
        with server, TierDriver(SMALL, 4, bucket="kv-faults", endpoint=server.endpoint) as driver:
            for _ in range(2):
                started = time.monotonic()
                with pytest.raises(TierDown, match="does not answer"):
                    driver.try_open()
                assert time.monotonic() - started < DOWN_S
            server.start().make_bucket("kv-faults")
            driver.open()
            assert driver.store([1]) == [Outcome.OK]

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


class TestCredentials:
    def test_wrong_credentials_are_down_and_never_shown(
        self, seaweedfs: SeaweedServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "w0ngSecretThatMustNotShow")
        with TierDriver(SMALL, 4, bucket="readiness", endpoint=seaweedfs.endpoint) as driver:
            caught = driver.fails_to_open(TierDown, "refuses these credentials")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
            driver.open()
            control = driver.tier._control
            own = (control.connection.credentials, *map(vars, (driver.tier, control, control.connection)))
            shown = f"{caught!r} {caught.__cause__!r} {own!r} {''.join(capfd.readouterr())}"
        assert "w0ng" not in shown
        assert SECRET_KEY not in shown

    def test_a_credentials_file_that_appears_later(
        self, seaweedfs: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        # The chain's variables must not override the file that the configuration names.
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of another user")
        path = tmp_path / "credentials"
        with TierDriver(SMALL, 4, bucket="readiness", endpoint=seaweedfs.endpoint, credentials_file=path) as driver:
            driver.fails_to_open(TierDown, "no credentials")
            path.write_text("[default]\naws_access_key_id = only-half\n")
            driver.fails_to_open(TierDown, "cannot be read")
            path.write_text(_credentials_file(ACCESS_KEY))
            driver.open()
            assert driver.store([1]) == [Outcome.OK]

    def test_credentials_from_a_profile(
        self, seaweedfs: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "credentials"
        path.write_text(_credentials_file(ACCESS_KEY, "kv"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of another user")
        with TierDriver(SMALL, 4, bucket="readiness", endpoint=seaweedfs.endpoint, profile="kv") as driver:
            driver.open()
        with TierDriver(SMALL, 4, bucket="readiness", endpoint=seaweedfs.endpoint, profile="nobody") as driver:
            driver.fails_to_open(TierDown, r'^profile: there is no profile "nobody" in ')

    def test_a_profile_named_by_the_environment(
        self, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A missing one takes the tier down, not the process; with `credentials_file` it is looked up there."""
        monkeypatch.setenv("AWS_PROFILE", "elsewhere")
        place = {"bucket": "kv-faults", "endpoint": faulty.endpoint}
        with TierDriver(SMALL, 4, **place) as driver:
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            driver.fails_to_open(TierDown, r'^profile: there is no profile "elsewhere" in ')
        path = tmp_path / "credentials"
        path.write_text(_credentials_file("a-key", "elsewhere"))
        with TierDriver(SMALL, 4, **place, credentials_file=path) as driver:
            driver.open()
            assert driver.store([1]) == [Outcome.OK]
        assert {request.access_key for request in faulty.requests} == {"a-key"}

    def test_without_credentials_the_tier_is_down(
        self, seaweedfs: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "nothing"))
        with TierDriver(SMALL, 4, bucket="readiness", endpoint=seaweedfs.endpoint) as driver:
            driver.fails_to_open(TierDown, "in the AWS credential chain")

    def test_renewed_credentials_are_used_without_reopening(self, faulty: FaultyS3, tmp_path: Path) -> None:
        path, times = tmp_path / "credentials", but(s3_credentials_s=0.05)
        path.write_text(_credentials_file("first-key"))
        place = {"bucket": "kv-faults", "endpoint": faulty.endpoint, "credentials_file": path}
        with TierDriver(SMALL, 4, times=times, **place) as driver:
            driver.open()
            driver.store([1])
            path.write_text(_credentials_file("second-key"))
            numbers = itertools.count(2)

            def renewed() -> bool:
                number = next(numbers)
                assert driver.store([number]) == [Outcome.OK]
                return Request("PUT", driver.name(number), "second-key") in faulty.requests

            assert wait_until(renewed)
            assert driver.load([1]) == [Outcome.OK]
            path.unlink()  # the old credentials stay in use
            assert driver.load([1]) == [Outcome.OK]
        assert {r.access_key for r in faulty.requests if r.method == "PUT"} == {"first-key", "second-key"}

    def test_temporary_credentials_are_renewed_and_nothing_is_lost(self, faulty: FaultyS3, tmp_path: Path) -> None:
        path, times = tmp_path / "credentials", but(s3_credentials_s=0.05, s3_download_s=60.0)
        valid = ["first-token"]
        faulty.fault = lambda request: None if request.session_token in valid else 403
        path.write_text(_credentials_file("role", token="first-token"))
        place = {"bucket": "kv-faults", "endpoint": faulty.endpoint, "credentials_file": path}
        with TierDriver(SMALL, 16, times=times, **place) as driver:
            driver.open()
            assert driver.store(range(6)) == [Outcome.OK] * 6
            faulty.hold = threading.Event()
            in_flight = driver.tier.load(driver.moves([0, 1]))  # these begin with the first token
            names = {driver.name(0), driver.name(1)}
            assert wait_until(lambda: names <= {each.name for each in faulty.requests if each.method == "GET"})
            valid[:] = ["second-token"]
            path.write_text(_credentials_file("role", token="second-token"))
            renewed = Credentials("role", SECRET_KEY, "second-token")
            assert wait_until(lambda: driver.tier._control.connection.credentials == renewed)
            assert driver.store([6, 7]) == [Outcome.OK] * 2, "they wait for nothing that was begun with the old ones"
            assert driver.tier.busy
            faulty.hold.set()
            assert driver.finish(in_flight) == [[Outcome.OK] * 2]
            assert driver.load(range(8)) == [Outcome.OK] * 8
        tokens = [request.session_token for request in faulty.requests if request.name.count("/") == 3]
        assert tokens == sorted(tokens), "only the second token, once it is in use"

    def test_new_credentials_are_looked_for_when_transfers_fail(self, faulty: FaultyS3, tmp_path: Path) -> None:
        path, times = tmp_path / "credentials", but(s3_credentials_s=3600.0, s3_credentials_again_s=0.05)
        path.write_text(_credentials_file("first-key"))
        place = {"bucket": "kv-faults", "endpoint": faulty.endpoint, "credentials_file": path}
        with TierDriver(SMALL, 4, times=times, **place) as driver:
            driver.open()
            driver.store([1])
            faulty.fault = lambda request: 403 if request.access_key == "first-key" else None
            path.write_text(_credentials_file("second-key"))
            assert wait_until(lambda: driver.load([1]) == [Outcome.OK])


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


def _credentials_file(access_key: str, profile: str = "default", token: str = "") -> str:
    lines = [f"[{profile}]", f"aws_access_key_id = {access_key}", f"aws_secret_access_key = {SECRET_KEY}"]
    return "\n".join([*lines, *([f"aws_session_token = {token}"] if token else []), ""])
