"""What a connection learns from the server's answers."""

from __future__ import annotations

import pytest
from botocore.exceptions import EndpointConnectionError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.answers import no_answer, tier_error
from nixl_tiers.tiers.s3.client import Credentials, client_of
from nixl_tiers.tiers.s3.connection import S3Connection
from nixl_tiers.tiers.s3.data import _parameters


def answer(**headers: str) -> dict[str, object]:
    return {"ResponseMetadata": {"HTTPHeaders": headers}}


@pytest.mark.parametrize(
    "headers",
    [{}, {"date": "Mon, 2? Nov 2026"}, {"date": "23 Nov 99999999999 12:00:00 GMT"}],
    ids=["none", "damaged", "far"],
)
def test_an_answer_without_a_readable_date_leaves_the_server_s_time_alone(headers: dict[str, str]) -> None:
    connection = S3Connection(S3Config(type="s3", bucket="kv-cache", capacity=1 << 30))
    connection._on_response(parsed=answer(date="Mon, 23 Nov 2026 12:00:00 GMT"))
    before = connection._server_time
    assert before is not None
    connection._on_response(parsed=answer(**headers))
    assert connection._server_time == before


# --- proxies of the environment ---------------------------------------------------------------------------------------


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def tier(endpoint: str | None = "http://s3.example:9000") -> S3Config:
    return S3Config(type="s3", bucket="kv-cache", endpoint=endpoint, capacity=1 << 30)


@pytest.mark.usefixtures("server_credentials")
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"])
def test_boto3_uses_no_proxy_as_nixl_cannot(variable: str, proxies: pytest.MonkeyPatch) -> None:
    proxies.setenv(variable, "http://proxy.example:3128")
    endpoint = f"{variable.lower().partition('_')[0]}://s3.example:9000"
    client = client_of(tier(endpoint), connect_s=1.0, read_s=1.0, attempts=1)
    assert client._endpoint.http_session._proxy_config.proxy_url_for(endpoint) is None


@pytest.mark.parametrize(
    ("variables", "endpoint", "named"),
    [
        ({}, "http://s3.example:9000", ""),
        ({"NO_PROXY": "example"}, "http://s3.example:9000", ""),
        ({"HTTP_PROXY": ""}, "http://s3.example:9000", ""),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": ".svc,s3.example"}, "http://s3.example:9000", ""),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": ".svc"}, "http://s3.example:9000", "HTTP_PROXY"),
        ({"HTTPS_PROXY": "http://p:1"}, None, "HTTPS_PROXY"),
        ({"https_proxy": "http://p:1", "HTTP_PROXY": "http://p:1"}, None, "HTTP_PROXY and https_proxy"),
    ],
)
def test_a_server_that_does_not_answer_is_named_with_the_proxy_that_is_not_used(
    variables: dict[str, str], endpoint: str | None, named: str, proxies: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        proxies.setenv(name, value)
    note = f"; it is asked directly, in spite of {named}" if named else ""
    error = EndpointConnectionError(endpoint_url="http://user:password@p:1")
    place = endpoint or "AWS us-east-1"
    wanted = f's3 bucket "kv-cache" at {place}: does not answer (EndpointConnectionError){note}'
    assert str(tier_error(tier(endpoint), "us-east-1", error)) == wanted
    assert no_answer(tier(endpoint), "within 3 s") == f"does not answer within 3 s{note}"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_nixl_uses_the_endpoints_scheme_and_checks_what_comes(scheme: str) -> None:
    config = S3Config(type="s3", bucket="kv-cache", capacity=1 << 30, endpoint=f"{scheme}://s3.example:9000")
    given = _parameters(config, Credentials("key", "secret"), "us-east-1", config.endpoint)
    assert (given["scheme"], given["endpoint_override"]) == (scheme, config.endpoint)
    assert (given["req_checksum"], given["resp_checksum"]) == ("required", "required")
