"""An answer that was damaged on its way is a request that failed, which is sent again: never a crash, nor a wrong row.
Answers are parsed once, in pieces that do not hold the interpreter lock for long.

Damage that leaves an answer well-formed shows only where it breaks a rule: a digit of a name that became another digit
is a row that is not there, and its load finds that out."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nixl_tiers.base.chunk import object_name
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS
from nixl_tiers.tiers.s3.client import client_of
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.names import RowNames
from tests.tiers.s3.stepped import Raw

pytestmark = pytest.mark.filterwarnings("ignore:tzname .* identified")  # dateutil's, of damaged times

NAMES = RowNames("p q")  # with the space a listing's names are encoded
NAMESPACE, ROW = "a" * 32, 100_000
KEYS = sorted((b"key-%04d" % number for number in range(6)), key=object_name)
HEADERS = {
    "Date": "Mon, 23 Nov 2026 12:00:00 GMT",
    "Content-Type": "application/xml",
    "Last-Modified": "Mon, 23 Nov 2026 11:00:00 GMT",
    "x-amz-delete-marker": "false",
}


def contents(key: bytes) -> str:
    name = NAMES.name(NAMESPACE, key).replace(" ", "%20")
    return (
        f"<Contents><Key>{name}</Key><LastModified>2026-11-23T11:00:00.000Z</LastModified><ETag>&quot;e0&quot;</ETag>"
        f"<Size>{ROW}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def page(keys: list[bytes], *, more: bool = False) -> bytes:
    """As S3 answers ListObjectsV2."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>kv</Name><Prefix>p%20q/</Prefix><KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<EncodingType>url</EncodingType><IsTruncated>{str(more).lower()}</IsTruncated>"
        + ("<NextContinuationToken>t0ken</NextContinuationToken>" if more else "")
        + "".join(map(contents, keys))
        + "</ListBucketResult>"
    ).encode()


ERROR = b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code><Message>none</Message><HostId>h</HostId></Error>'


class Answers:
    """A boto3 client whose requests are answered with these, then with pages of KEYS; nothing is sent."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.bodies: list[bytes] = []
        self.status = 200
        self.headers: dict[str, str] = HEADERS
        client.meta.events.register("before-send.s3", self._answer)

    def _answer(self, request: Any, **_: object) -> AWSResponse:
        after = parse_qs(urlsplit(request.url).query).get("start-after", [""])[0]
        left = [key for key in KEYS if NAMES.name(NAMESPACE, key) > after]
        body = self.bodies.pop(0) if self.bodies else page(left[:4], more=len(left) > 4)
        return AWSResponse(request.url, self.status, self.headers, Raw(body))

    def list(self, body: bytes) -> dict[str, Any]:
        self.bodies = [body] * 2  # boto3 asks twice
        return self.client.list_objects_v2(Bucket="kv", Prefix=NAMES.root)


@pytest.fixture
def answers(server_credentials: None, monkeypatch: pytest.MonkeyPatch) -> Answers:
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))
    tier = S3Config(type="s3", bucket="kv-cache", endpoint="http://here", capacity=1 << 20)
    client = client_of(tier, connect_s=1.0, read_s=1.0, attempts=2)
    Denials("here").watch(client)
    return Answers(client)


@st.composite
def damages(draw: st.DrawFn, body: bytes) -> bytes:
    """Flips of a few bits, other bytes, pieces cut out."""
    damaged = bytearray(body)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(damaged) - 1))
        match draw(st.sampled_from(["bit", "byte", "digit", "other digit", "cut"])):
            case "bit":
                damaged[at] ^= 1 << draw(st.integers(0, 7))
            case "byte":
                damaged[at] = draw(st.integers(0, 255))
            case "digit" | "other digit" as kind:
                digits = [place for place, byte in enumerate(damaged) if byte in b"0123456789abcdef"]
                others = b"-+_ .TZ\xd9x" if kind == "digit" else b"0123456789abcdef"
                if digits:
                    damaged[draw(st.sampled_from(digits))] = draw(st.sampled_from(others))
            case "cut":
                del damaged[at : at + draw(st.integers(1, 40))]
        if not damaged:
            break
    return bytes(damaged)


any_example = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@any_example
@given(damages(page(KEYS, more=True)))
def test_a_damaged_page_is_a_page_or_a_failed_request(answers: Answers, body: bytes) -> None:
    try:
        found = answers.list(body)
    except REQUEST_ERRORS:
        return
    assert isinstance(found["IsTruncated"], bool)
    for each in found.get("Contents", ()):
        assert isinstance(each["Key"], str)
        assert each["Size"] >= 0
        assert datetime(1, 1, 1, tzinfo=UTC) <= each["LastModified"]
        each["LastModified"].timestamp()


@any_example
@given(damages(ERROR), st.sampled_from([404, 412, 503]))
def test_a_damaged_error_keeps_its_status(answers: Answers, body: bytes, status: int) -> None:
    answers.bodies, answers.status = [body] * 2, status
    with pytest.raises(ClientError) as error:
        answers.client.get_object(Bucket="kv", Key="k")
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert isinstance(error.value.response["Error"].get("Code", ""), str)


@any_example
@given(st.sampled_from(["Last-Modified", "x-amz-delete-marker", "x-amz-missing-meta", "Date"]), st.data())
def test_a_damaged_header_is_an_answer_or_a_failed_request(answers: Answers, name: str, data: st.DataObject) -> None:
    value = {**HEADERS, "x-amz-missing-meta": "12"}[name]
    damaged = data.draw(damages(value.encode())).decode("latin-1")
    answers.headers, answers.bodies = HEADERS | {name: damaged}, [b"body"]
    try:
        found = answers.client.get_object(Bucket="kv", Key="k")
    except REQUEST_ERRORS:
        return
    found["LastModified"].timestamp()


@pytest.mark.parametrize(
    "damage",
    [
        (b"2026-11-23T11", b"2026-11-2?T11"),
        (b"<Size>100000", b"<Size>1000x0"),
        (b"<Size>100000", b"<Size>-10000"),
        (b"<Size>100000", b"<Size>10_000"),
        (b"<Size>100000</Size>", b""),
        (b"<KeyCount>6", b"<KeyCount>v"),
        (b">true<", b">trve<"),
        (b"<IsTruncated>true</IsTruncated>", b""),
        (b"<EncodingType>url", b"<EncodingType>urm"),
        (b"<LastModified>2026-11-23T11:00:00.000Z</LastModified>", b""),
        (b"ListBucketResult", b"html"),
        (b"<Key>", b"<Kex>"),
    ],
    ids=repr,
)
def test_a_damaged_value_is_a_failed_request(answers: Answers, damage: tuple[bytes, bytes]) -> None:
    whole = page(KEYS, more=True)
    assert damage[0] in whole
    assert len(answers.list(whole)["Contents"]) == len(KEYS)
    with pytest.raises(REQUEST_ERRORS):
        answers.list(whole.replace(*damage).replace(b"</Key>", b"</Kex>" if b"<Kex>" in damage else b"</Key>"))


@pytest.mark.parametrize("request_of", ["list_objects_v2", "delete_objects"])
def test_an_error_with_status_200_is_an_error(answers: Answers, request_of: str) -> None:
    answers.bodies = [ERROR] * 2
    fields = {"Delete": {"Objects": [{"Key": "p/1"}]}} if request_of == "delete_objects" else {"Prefix": "p/"}
    with pytest.raises(ClientError, match="NoSuchKey"):
        getattr(answers.client, request_of)(Bucket="kv", **fields)
