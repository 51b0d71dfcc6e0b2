"""What a connection learns from the server's answers. A bucket's default encryption must be the configured one, because
NIXL's uploads cannot request it."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.connection import S3Connection, encryption_problem


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


ARN = "arn:aws:kms:eu-central-1:111122223333:"


class StubClient:
    """A client with one answer."""

    def __init__(self, default: dict[str, str] | None, code: str = "") -> None:
        self._default = default
        self._code = code

    def get_bucket_encryption(self, **_: str) -> dict[str, Any]:
        if self._code:
            raise ClientError({"Error": {"Code": self._code}}, "GetBucketEncryption")
        rules = [{"ApplyServerSideEncryptionByDefault": self._default}] if self._default is not None else [{}]
        return {"ServerSideEncryptionConfiguration": {"Rules": rules}}


def problem(sse: str | None, default: dict[str, str] | None, key: str | None = None, code: str = "") -> str | None:
    tier = S3Config.model_validate(
        {"type": "s3", "bucket": "kv-cache", "capacity": 1 << 20, "sse": sse, "sse_key": key}
    )
    return encryption_problem(StubClient(default, code), tier)


def test_another_default_encryption_is_reported_in_one_sentence() -> None:
    assert problem(None, None, code="AccessDenied") is None, "without a requirement there is no request"
    assert problem("AES256", {"SSEAlgorithm": "AES256"}) is None
    assert problem("aws:kms", {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "k"}) is None
    assert problem("aws:kms", {"SSEAlgorithm": "AES256"}) == (
        'encrypts with "AES256" by default, and sse requires "aws:kms"'
    )
    assert problem("AES256", {"SSEAlgorithm": "<b>rot13"}) == (
        'encrypts with something else by default, and sse requires "AES256"'
    )
    assert problem("AES256", None) is not None
    assert (
        problem("AES256", None, code="AccessDenied")
        == 'does not report its default encryption (AccessDenied), and sse requires "AES256"'
    )


@pytest.mark.parametrize(
    ("required", "found", "same"),
    [
        ("0d9a", "0d9a", True),
        ("0d9a", f"{ARN}key/0d9a", True),
        (f"{ARN}key/0d9a", "0d9a", True),
        ("alias/kv", f"{ARN}alias/kv", True),
        (f"{ARN}key/0d9a", "arn:aws:kms:eu-central-1:444455556666:key/0d9a", False),
        ("0d9a", f"{ARN}key/10d9a", False),
        ("alias/kv", "kv", False),
        ("0d9a", "", False),
    ],
)
def test_a_key_matches_by_id_alias_or_arn(required: str, found: str, same: bool) -> None:
    default = {"SSEAlgorithm": "aws:kms"} | ({"KMSMasterKeyID": found} if found else {})
    assert (problem("aws:kms", default, key=required) is None) is same
