"""A connection to one bucket: who signs its requests for which region, where they go, what is never shown, what is
learned from answers, what its thread does next, and the memory in which downloads land."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from botocore.exceptions import EndpointConnectionError

from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.s3.answers import no_answer, tier_error
from nixl_tiers.tiers.s3.client import (
    Credentials,
    client_of,
    configured_region,
    endpoint_of,
    find_credentials,
    settled_region,
)
from nixl_tiers.tiers.s3.concurrency import MOST
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.data import MIN_STAGING_ROWS, SPARE_STAGING_ROWS, STAGING_BYTES, _parameters, _staging
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.names import RECENT_NAMES
from tests.support.fake_movers import Clock
from tests.support.times import changed
from tests.tiers.s3.stepped import Bucket, SteppedTier

MIB = 1 << 20
HERE = "http://s3.example:9000"
SECRET = "s3cretThatMustNotShow"
PROFILES = """[default]
region = ca-central-1
[profile kv]
region = eu-central-1
endpoint_url = http://s3.kv:9000
[profile no-region]
output = json
"""

pytestmark = pytest.mark.usefixtures("server_credentials")


def config(endpoint: str | None = HERE, **fields: Any) -> S3Config:
    return S3Config(type="s3", bucket="kv-cache", endpoint=endpoint, capacity=1 << 30, **fields)


def credentials_file(access_key: str, secret: str = SECRET, profile: str = "default") -> str:
    return f"[{profile}]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret}\n"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Neither region, profile, endpoint nor proxy is set but in files of profiles, which tests select."""
    for name in ("REGION", "DEFAULT_REGION", "PROFILE", "ENDPOINT_URL", "ENDPOINT_URL_S3"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    (tmp_path / "config").write_text(PROFILES)
    (tmp_path / "credentials").write_text(
        credentials_file("of-kv", profile="kv") + credentials_file("b", profile="no-region")
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return monkeypatch


class TestRegions:
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
            # a bucket of AWS answers in its own region only
            ({"endpoint": None}, {"AWS_REGION": "ap-south-1"}, "sa-east-1", "sa-east-1"),
            ({"endpoint": None}, {}, "sa-east-1", "sa-east-1"),
            ({"endpoint": None, "region": "eu-north-1"}, {}, "sa-east-1", "is in sa-east-1, not in eu-north-1"),
            ({}, {"AWS_REGION": "eu west 1"}, "", "AWS_REGION does not hold a region name"),
        ],
    )
    def test_it_is_that_of_the_field_the_environment_the_profile_or_the_bucket(
        self,
        environment: pytest.MonkeyPatch,
        *,
        tmp_path: Path,
        fields: dict[str, Any],
        variables: dict[str, str],
        reported: str,
        expected: str,
    ) -> None:
        for name, value in variables.items():
            environment.setenv(name, str(tmp_path / value) if name == "AWS_CONFIG_FILE" else value)
        tier = config(**fields)
        try:
            found = settled_region(tier, configured_region(tier), reported or None).name
        except TierRefused as error:
            found = str(error)
        assert found.endswith(expected)

    @pytest.mark.parametrize(
        ("url", "own"),
        [
            ("https://s3.amazonaws.com", True),
            ("https://s3.dualstack.eu-west-1.amazonaws.com", True),
            ("https://s3-fips.us-east-1.amazonaws.com", True),
            ("https://s3.cn-north-1.amazonaws.com.cn", True),
            ("https://s3.eusc-de-east-1.amazonaws.eu", True),
            ("https://bucket.vpce-0a-1b.s3.us-east-1.vpce.amazonaws.com", False),
            ("https://s3.amazonaws.com.example.com", False),
            ("http://127.0.0.1:9000", False),
        ],
    )
    def test_endpoint_of_aws_is_left_to_nixl(self, url: str, own: bool) -> None:
        """With an endpoint NIXL no longer puts the bucket into the host name, as AWS wants it."""
        assert endpoint_of(SimpleNamespace(meta=SimpleNamespace(endpoint_url=url))) == (None if own else url)


class TestCredentials:
    @pytest.mark.parametrize(
        ("fields", "variables", "found"),
        [
            ({}, {}, "tiers-test"),
            ({"profile": "kv"}, {}, "of-kv"),
            ({"credentials_file": "file"}, {}, "of-file"),  # whose variables do not override it
            ({"credentials_file": "file"}, {"AWS_PROFILE": "kv"}, "there are no credentials"),
            ({"credentials_file": "half"}, {}, "cannot be read"),
            ({"credentials_file": "gone"}, {}, "there are no credentials for s3 bucket .* in /"),
            ({"profile": "nobody"}, {}, r'profile: there is no profile "nobody"'),
            ({}, {"AWS_ACCESS_KEY_ID": "", "AWS_PROFILE": "nobody"}, r'profile: there is no profile "nobody"'),
            ({}, {"AWS_ACCESS_KEY_ID": ""}, "in the AWS credential chain"),
        ],
    )
    def test_where_they_are_found(
        self,
        environment: pytest.MonkeyPatch,
        tmp_path: Path,
        fields: dict[str, str],
        variables: dict[str, str],
        found: str,
    ) -> None:
        (tmp_path / "file").write_text(credentials_file("of-file"))
        (tmp_path / "half").write_text("[default]\naws_access_key_id = only-half\n")
        for name, value in variables.items():
            environment.setenv(name, value)
        named = {name: tmp_path / value if name == "credentials_file" else value for name, value in fields.items()}
        try:
            told = find_credentials(config(**named))[1].access_key
        except TierDown as error:
            told = str(error)
        assert re.search(found, told)
        assert SECRET not in told

    def test_nothing_shows_them(self, make_tier: Callable[..., SteppedTier], tmp_path: Path) -> None:
        (tmp_path / "file").write_text(credentials_file("AKIDSHOWN"))
        tier = make_tier(credentials_file=tmp_path / "file")
        tier.open()
        connection = tier.control.connection
        shown = "".join(map(repr, [connection.credentials, *map(vars, (tier.tier, tier.control, connection))]))
        assert SECRET not in shown
        assert "AKIDSHOWN" not in shown

    @pytest.mark.parametrize(("fails", "within_s"), [(False, 60.0), (True, PRODUCTION.s3_credentials_again_s)])
    def test_those_of_a_file_that_was_rewritten_are_used(
        self, make_tier: Callable[..., SteppedTier], bucket: Bucket, tmp_path: Path, *, fails: bool, within_s: float
    ) -> None:
        """Within a minute, and sooner when a transfer fails. Those that are in use stay when the file goes."""
        path = tmp_path / "file"
        path.write_text(credentials_file("first"))
        tier = make_tier(credentials_file=path, times=changed(stores_held_s=0.0))
        tier.open()
        tier.store(0)
        path.write_text(credentials_file("second"))
        if fails:
            bucket.fault = lambda request: 403 if request.by_nixl else None
            tier.store(1)
            bucket.fault = lambda _: None
        bucket.clock.now += within_s
        for _ in range(2):
            tier.round()
            tier.load(0)
        connection = tier.control.connection
        assert connection.credentials == Credentials("second", SECRET)
        assert connection.client._request_signer._credentials.access_key == "second"
        assert {each.access_key for each in bucket.agents if each.memory} == {"second"}
        path.unlink()
        bucket.clock.now += 60.0
        tier.round()
        assert connection.credentials == Credentials("second", SECRET)


class TestWhereRequestsGo:
    @pytest.mark.parametrize(
        ("endpoint", "fields", "expected"),
        [
            (None, {}, {"use_virtual_addressing": "true", "ca_bundle": mock.ANY}),
            ("http://s3:9000", {}, {"endpoint_override": "http://s3:9000", "scheme": "http"}),
            (
                "https://s3:9000",
                {"ca_file": Path(__file__)},
                {"endpoint_override": "https://s3:9000", "scheme": "https", "ca_bundle": __file__},
            ),
        ],
    )
    def test_those_of_nixl_are_sent_signed_and_verified_like_boto3s(
        self, endpoint: str | None, fields: dict[str, Any], expected: dict[str, str]
    ) -> None:
        signed = {"access_key": "id", "secret_key": SECRET, "session_token": "token", "region": "eu-west-1"}
        checked = {"req_checksum": "required", "resp_checksum": "required", "num_threads": "24", "bucket": "kv-cache"}
        made = _parameters(config(endpoint, **fields), Credentials("id", SECRET, "token"), "eu-west-1", endpoint)
        assert made == {"use_virtual_addressing": "false"} | checked | signed | expected
        client = client_of(config(endpoint, **fields), connect_s=1.0, read_s=1.0, attempts=1)
        assert "ca_bundle" not in expected or client._endpoint.http_session._verify == expected["ca_bundle"]

    def test_none_waits_longer_than_it_may_nor_is_sent_more_often(self, make_tier: Callable[..., SteppedTier]) -> None:
        tier = make_tier()
        tier.open()
        connection = tier.control.connection
        bounds = {
            name: (client.meta.config.connect_timeout, client.meta.config.read_timeout, tries(client))
            for name, client in vars(connection).items()
            if name.endswith("client")
        }
        assert bounds == {"client": (2, 10, 2), "delete_client": (2, 10, 1), "quick_client": (1, 1, 1)}

    @pytest.mark.parametrize(
        ("variables", "endpoint", "named"),
        [
            ({}, HERE, ""),
            ({"NO_PROXY": "example"}, HERE, ""),
            ({"HTTP_PROXY": ""}, HERE, ""),
            ({"HTTP_PROXY": "http://p:1", "NO_PROXY": ".svc,s3.example"}, HERE, ""),
            ({"HTTP_PROXY": "http://p:1", "NO_PROXY": ".svc"}, HERE, "HTTP_PROXY"),
            ({"https_proxy": "http://p:1", "HTTP_PROXY": "http://p:1"}, None, "HTTP_PROXY and https_proxy"),
        ],
    )
    def test_a_server_that_does_not_answer_is_named_with_the_proxy_that_is_not_used(
        self, variables: dict[str, str], endpoint: str | None, named: str, environment: pytest.MonkeyPatch
    ) -> None:
        for name, value in variables.items():
            environment.setenv(name, value)
        note = f"; it is asked directly, in spite of {named}" if named else ""
        error = EndpointConnectionError(endpoint_url="http://user:password@p:1")
        place = endpoint or "AWS us-east-1"
        wanted = f's3 bucket "kv-cache" at {place}: does not answer (EndpointConnectionError){note}'
        assert str(tier_error(config(endpoint), "us-east-1", error)) == wanted
        assert no_answer(config(endpoint), "within 3 s") == f"does not answer within 3 s{note}"


def tries(client: Any) -> int:
    found: int = client.meta.config.retries["total_max_attempts"]
    return found


class TestControl:
    """What its thread would do next."""

    @pytest.fixture
    def control(self) -> S3Control:
        control = S3Control(config("http://127.0.0.1:1"))
        control.connection.client = control.connection.delete_client = mock.Mock()
        control._thread = mock.Mock()
        return control

    @pytest.mark.parametrize(("status", "warned"), [("Enabled", True), ("Suspended", False), (None, False)])
    def test_a_bucket_that_keeps_deleted_rows_is_warned_of(
        self, control: S3Control, caplog: pytest.LogCaptureFixture, status: str | None, warned: bool
    ) -> None:
        control.connection.quick_client = mock.Mock(**{"get_bucket_versioning.return_value": {"Status": status}})
        control._do(control._check_versioning)
        assert ["suspend versioning" in each.getMessage() for each in caplog.records] == [True] * warned
        assert control._next(0.0) is None, "once"

    def test_a_delete_that_fails_is_not_tried_again(self, control: S3Control) -> None:
        """By then another engine may have stored the row anew. Who finds the bad one again deletes it again."""
        control.connection.delete_client.delete_objects.side_effect = EndpointConnectionError(endpoint_url="gone")
        control.delete(["nixl-tiers/row"])
        control._do(control._delete_some)
        assert not control._delete_queue
        assert control.cancel_delete("nixl-tiers/row")

    @pytest.mark.parametrize("fails", [False, True])
    def test_an_attempt_to_connect_that_ends_late_serves_the_next_call_unless_it_failed(
        self, control: S3Control, fails: bool
    ) -> None:
        """A source of credentials that takes longer than `connect` waits would never be enough otherwise."""
        opened = mock.Mock(side_effect=[TierDown("no longer so")] * fails + [None] * 2)
        control.connection.open = opened  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(TierDown, match="does not answer within"):
                control.connect(timeout_s=1e-9)
        control._do(control._connect)
        if fails:
            with pytest.raises(TierDown, match="does not answer within"):
                control.connect(timeout_s=1e-9)
            control._do(control._connect)
        control.connect(timeout_s=1e-9)
        assert opened.call_count == 1 + fails
        with pytest.raises(TierDown, match="does not answer within"):  # a result is used once
            control.connect(timeout_s=1e-9)


class TestStagingRows:
    @pytest.mark.parametrize(
        ("row_bytes", "rows"),
        [(8 * MIB, MOST + SPARE_STAGING_ROWS), (32 * MIB, 32), (512 * MIB, MIN_STAGING_ROWS)],
    )
    def test_as_many_downloads_as_are_allowed_have_room_within_a_bound(self, row_bytes: int, rows: int) -> None:
        staging = _staging(row_bytes)
        assert len(staging) == rows * row_bytes
        assert len(staging) <= max(STAGING_BYTES, MIN_STAGING_ROWS * row_bytes)
        staging.close()
        assert 2 * MOST <= RECENT_NAMES, "names of all that may run are kept"

    def test_they_stay_out_of_core_dumps(self) -> None:
        staging = _staging(1 << 20)
        address = np.frombuffer(staging, np.uint8).ctypes.data
        mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
        (flags,) = (
            lines.rpartition("VmFlags:")[2].split()
            for lines in mappings
            if int(lines.partition("-")[0], 16) <= address < int(lines.partition("-")[2].partition(" ")[0], 16)
        )
        assert "dd" in flags


def test_of_a_servers_text_only_a_code_is_shown_and_only_one_of_denials_is_one() -> None:
    recorder = Denials("here", Clock(100.0))
    for page in (b"", b"\x00<Code>", b"<Code>NoSuchKey</Code>", b"<Code>SlowDown</Code>"):
        recorder.error_page("get", page)
    assert recorder.current() == {}
    recorder.error_page("get", b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
    assert set(recorder.current()) == {"get"}
    recorder.denied("put", "Access\nDenied " + 1000 * "x")
    sentence = recorder.current()["put"]
    assert "\n" not in sentence
    assert len(sentence) < 200
