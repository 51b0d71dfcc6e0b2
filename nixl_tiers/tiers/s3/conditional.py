"""Conditional writes of small objects below a prefix, on which the usage record rests; whether a server has them."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from botocore.exceptions import ClientError

from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS, status_of
from nixl_tiers.tiers.s3.names import WRITE_TEST_NAME

_CONDITION_FAILED: Final = {404, 409, 412}  # it does not hold (any more), or another write is in progress
_UNSUPPORTED: Final = {"NotImplemented", "MethodNotAllowed", "InvalidArgument", "InvalidRequest"}
CONDITIONS: Final = "conditional writes"  # the kind under which it is reported that they do not work
DOUBT_S: Final = 60.0
DOUBT_TRIES: Final = 6
MAX_RETRY_S: Final = 15.0
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


def small_object(client: Any, bucket: str, name: str) -> bytes | None:
    """The first 64 KiB of an object; None if there is none. Raises what boto3 raises."""
    found = get_object(client, bucket, name)
    return None if found is None else bytes(found["Body"].read(1 << 16))


def delete_object(client: Any, bucket: str, name: str) -> None:
    """Delete an object if that is allowed, and the server answers."""
    with contextlib.suppress(*REQUEST_ERRORS):
        client.delete_object(Bucket=bucket, Key=name)


def write_test_name(writer: str) -> str:
    """The name below the prefix of an object that nobody but this engine or mover writes and deletes."""
    return f"{WRITE_TEST_NAME}-{re.sub('[^A-Za-z0-9._-]', '-', writer)[:128]}"


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


class ConditionalWrites:
    """Whether the server knows conditional writes, as far as its answers say. No I/O; `now` is any steady clock.

    That it does not is believed only if it still says so after `doubt_s`: one answer may be a gateway's, or the object
    of the test writes may have been deleted between them. What was found out is not asked again.
    """

    def __init__(self, doubt_s: float | None = None, retry_s: float = 1.0) -> None:
        self.work: bool | None = None
        """None: not known yet."""
        self.next_at_s = float("-inf")
        """When to ask."""
        self.refused = False
        """Whether the last answer was that it does not know them."""
        self._doubt_s = DOUBT_S if doubt_s is None else doubt_s
        self._retry_s = self._first_retry_s = retry_s
        self._refused_s = 0.0

    def asking(self, now: float) -> None:
        """Without an answer it is asked again soon."""
        self.next_at_s = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def answered(self, work: bool, now: float) -> None:
        self._retry_s = self._first_retry_s
        if not work and not self.refused:
            self._refused_s = now
        self.refused = not work
        settled = work or now - self._refused_s >= self._doubt_s
        if settled:
            self.work = work
        self.next_at_s = float("inf") if settled else now + self._doubt_s / DOUBT_TRIES
