"""Deletes of many objects, in a form that the server takes: some demand Content-MD5 with DeleteObjects, in place of the
newer checksum that boto3 sends, and some do not know that request."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Sequence
from typing import Any, Final

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from nixl_tiers.tiers.s3.answers import code_of, status_of

REFUSED: Final = {400, 405, 501}
"""Statuses of DeleteObjects in a form that the server does not take. If that is not why, the last form fails too."""
_FORMS: Final = ("checksum", "Content-MD5", "one by one")
_OF_ONE_OBJECT: Final = {403, 404, 409}
_tried = threading.local()
MAX_DELETES: Final = 1000  # names in one DeleteObjects request
_works = ""  # of these forms; not known yet


def most_names() -> int:
    """For one call, which takes its time where each name is a request, as may turn out."""
    return MAX_DELETES if _works in _FORMS[:-1] else min(100, MAX_DELETES)


def delete_objects(
    client: Any, bucket: str, objects: Sequence[dict[str, str]], *, quiet: bool = True
) -> dict[str, Any]:
    """Delete these (Key, and perhaps VersionId). Returns boto3's answer to DeleteObjects, or one like it. Raises what
    boto3 raises."""
    global _works  # noqa: PLW0603
    for form in _FORMS[_FORMS.index(_works or _FORMS[0]) :]:
        _tried.form = form
        try:
            if form == _FORMS[-1]:
                answer = _one_by_one(client, bucket, objects)
            else:
                answer = client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": quiet})
        except ClientError as error:
            if form == _FORMS[-1] or status_of(error) not in REFUSED:
                raise
        else:
            _works = form
            break
    return answer


def delete_names(client: Any, bucket: str, names: Sequence[str]) -> set[str]:
    """Delete the objects of these names; those that are gone. Raises what boto3 raises."""
    answer = delete_objects(client, bucket, [{"Key": name} for name in names])
    failed = {error.get("Key") for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"}
    if not failed.issubset(names):  # it may be that of any of these
        raise ResponseParserError("an error in the answer to a delete request names no object of the request")
    return set(names) - failed


def add_md5(params: dict[str, Any], **_: object) -> None:
    """For botocore's event before-call of DeleteObjects."""
    if getattr(_tried, "form", "") == "Content-MD5":
        params["context"].pop("checksum", None)
        digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
        params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _one_by_one(client: Any, bucket: str, objects: Sequence[dict[str, str]]) -> dict[str, Any]:
    deleted, errors = [], []
    for each in objects:
        try:
            deleted.append(each | client.delete_object(Bucket=bucket, **each))
        except ClientError as error:
            if status_of(error) not in _OF_ONE_OBJECT or code_of(error) == "NoSuchBucket":
                raise
            if status_of(error) != 404:
                errors.append(each | {"Code": code_of(error)})
    return {"Deleted": deleted, "Errors": errors}
