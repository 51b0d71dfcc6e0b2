"""Conditional writes of small objects below a prefix: what the janitor's lease and a private prefix's lease rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from nixl_tiers.tiers.s3.names import WRITE_TEST_NAME

REQUEST_ERRORS: Final = (BotoCoreError, ClientError, HTTPError, ResponseParserError)
"""What boto3 raises without a good answer. ResponseParserError: for all that was damaged on its way (xml_parser.py).
urllib3's error: GetObject's error page is read outside of its handlers."""

_CONDITION_FAILED: Final = {404, 409, 412}  # it does not hold (any more), or another write is in progress
_UNSUPPORTED: Final = {"NotImplemented", "MethodNotAllowed", "InvalidArgument", "InvalidRequest"}


def put_if(client: Any, bucket: str, name: str, body: bytes, condition: dict[str, str]) -> dict[str, Any] | None:
    """Write an object on a condition (IfNoneMatch or IfMatch); boto3's answer, or None if it does not hold."""
    try:
        answer: dict[str, Any] = client.put_object(Bucket=bucket, Key=name, Body=body, **condition)
    except ClientError as error:
        if status_of(error) not in _CONDITION_FAILED:
            raise
        return None
    return answer


def small_object(client: Any, bucket: str, name: str) -> bytes | None:
    """The first 64 KiB of an object; None if there is none. Raises what boto3 raises."""
    try:
        found = client.get_object(Bucket=bucket, Key=name)
    except ClientError as error:
        if status_of(error) != 404:
            raise
        return None
    return bytes(found["Body"].read(1 << 16))


def conditional_writes_work(put: Callable[..., object | None]) -> bool:
    """Whether the server refuses writes whose condition does not hold, for both kinds of condition.

    `put(name, body, **condition)`: writes below the prefix, and returns None if the condition does not hold.
    """
    try:
        put(WRITE_TEST_NAME, b"conditional writes", IfNoneMatch="*")
        return (
            put(WRITE_TEST_NAME, b"conditional writes", IfNoneMatch="*") is None
            and put(WRITE_TEST_NAME, b"conditional writes", IfMatch='"00000000000000000000000000000000"') is None
        )
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") not in _UNSUPPORTED:
            raise
        return False


def answered_at_s(answer: Mapping[str, Any]) -> float | None:
    """The server's Unix time when it answered, in whole seconds; None if it has no Date. Raises ResponseParserError."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise ResponseParserError(f"the Date of an answer is damaged ({type(error).__name__})") from error


def status_of(error: ClientError) -> int:
    """The HTTP status of an error that the server answered with, or 0."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
