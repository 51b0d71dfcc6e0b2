"""Conditional writes of small objects below a prefix, on which the usage record rests; whether a server has them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from botocore.exceptions import ClientError

from nixl_tiers.tiers.s3.answers import status_of

_CONDITION_FAILED: Final = {404, 409, 412}  # it does not hold (any more), or another write is in progress
_UNSUPPORTED: Final = {"NotImplemented", "MethodNotAllowed", "InvalidArgument", "InvalidRequest"}
RACERS: Final = 4
RACES: Final = 8


def put_if(client: Any, bucket: str, name: str, body: bytes, condition: dict[str, str]) -> dict[str, Any] | None:
    """Write an object on a condition (IfNoneMatch or IfMatch); boto3's answer, or None if it does not hold."""
    try:
        answer: dict[str, Any] = client.put_object(Bucket=bucket, Key=name, Body=body, **condition)
    except ClientError as error:
        if status_of(error) not in _CONDITION_FAILED:
            raise
        return None
    return answer


def get_object(client: Any, bucket: str, name: str) -> dict[str, Any] | None:
    """boto3's answer; None if there is no such object. Raises what boto3 raises."""
    try:
        found: dict[str, Any] = client.get_object(Bucket=bucket, Key=name)
    except ClientError as error:
        if status_of(error) != 404:
            raise
        return None
    return found


def conditional_writes_work(put: Callable[..., object | None], name: str) -> bool:
    """Whether the server refuses writes whose condition does not hold, for both kinds of condition.

    `put(name, body, **condition)`: writes below the prefix, and returns None if the condition does not hold. `name`: of
    the object to write, which the caller deletes.
    """
    try:
        put(name, b"conditional writes", IfNoneMatch="*")
        return (
            put(name, b"conditional writes", IfNoneMatch="*") is None
            and put(name, b"conditional writes", IfMatch='"00000000000000000000000000000000"') is None
        )
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") not in _UNSUPPORTED:
            raise
        return False


def most_winners(put: Callable[..., Mapping[str, Any] | None], name: str) -> int:
    """How many of four writes with the same condition, sent at once, the server lets through. More than one: it does
    not test the condition and write in one step.

    `put`: as above, for several threads; returns boto3's answer. `name`: of objects that are not there yet."""
    most = 0
    with ThreadPoolExecutor(RACERS) as pool:
        for number in range(RACES):
            condition = {"IfNoneMatch": "*"}
            for _ in range(2):
                write = partial(put, f"{name}-{number}", **condition)
                bodies = [secrets.token_hex(8).encode() for _ in range(RACERS)]
                answers = [answer for answer in pool.map(write, bodies) if answer is not None]
                most = max(most, len(answers))
                if answers:
                    condition = {"IfMatch": str(answers[0]["ETag"])}
    return most
