"""`inspect` and `purge` of a bucket, in memory: which objects are rows, which versions there are, and what stays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from nixl_tiers.base.chunk import object_name
from nixl_tiers.base.manifest import Description, Manifest
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3 import answers, deletes, stored
from nixl_tiers.tiers.s3.answers import SKEW_S
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.record import Record
from tests.tiers.s3.memory_bucket import failed

NAMESPACE = "ab" * 16
HOME = f"p/{NAMESPACE}"
DATE = "Mon, 23 Nov 2026 12:00:00 GMT"
NOW_S = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
FOREIGN = [f"{HOME}/notes/my-thesis.row", f"{HOME}/a/b/c", "p/notes.txt", f"p/{'zz' * 16}/about.json"]
ABOUT = Manifest(NAMESPACE, Description(model="org/model"), 4096).encode()


def row(number: int) -> str:
    return f"{HOME}/{object_name(b'%d' % number)}"


def test_an_object_with_any_other_name_is_no_row() -> None:
    names, found, last = RowNames("p"), f"{NAMESPACE}/{object_name(b'key')}", object_name(b"key")
    assert names.parse(f"p/{found}") == (NAMESPACE, b"key")
    others = [
        f"{NAMESPACE[1:]}g/{last}",
        f"{NAMESPACE[1:]}/{last}",
        f"{found}0",
        f"x/{found}",
        f"{NAMESPACE}/zz{last[2:]}",
    ]
    for name in (f"q/{found}", *(f"p/{other}" for other in others)):
        assert names.parse(name) is None, name


class Versions:
    """A boto3 client of a bucket that keeps all versions; each delete without one leaves a marker. Its listing goes on
    behind the last version that was listed, and skips what stood there if that has been deleted."""

    def __init__(self, status: str | None) -> None:
        self.status = status
        self.kept: dict[tuple[str, str], tuple[bytes, float]] = {}  # by name and version; the last one is the newest
        self.denied: set[str] = set()
        self.numbers = itertools.count()

    def put(self, name: str, body: bytes = b"row", at_s: float = NOW_S) -> None:
        if not self.status:
            self.kept = {at: found for at, found in self.kept.items() if at[0] != name}
        self.kept[name, f"v{next(self.numbers)}" if self.status else ""] = body, at_s

    @property
    def names(self) -> list[str]:
        return sorted(name for name, _ in self.kept)

    def _newest(self, name: str) -> tuple[bytes, float]:
        found = [each for (kept, _), each in self.kept.items() if kept == name]
        if not found:
            raise failed(404)
        return found[-1]

    def _check(self, operation: str) -> None:
        if operation in self.denied:
            raise ClientError(
                {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, operation
            )

    def get_bucket_versioning(self, **_: str) -> dict[str, str]:
        self._check("GetBucketVersioning")
        return {"Status": self.status} if self.status else {}

    def list_object_versions(self, **_: object) -> None:
        self._check("ListObjectVersions")

    def get_object(self, *, Key: str, VersionId: str = "", **_: str) -> dict[str, Any]:  # noqa: N803
        self._check(f"GetObject {Key}")
        body, at_s = self.kept[Key, VersionId] if VersionId else self._newest(Key)
        answer = {"HTTPHeaders": {"date": DATE}}
        return {"Body": BytesIO(body), "LastModified": datetime.fromtimestamp(at_s, UTC), "ResponseMetadata": answer}

    def delete_objects(self, *, Delete: dict[str, Any], **_: str) -> dict[str, Any]:  # noqa: N803
        for each in Delete["Objects"]:
            if "VersionId" in each or not self.status:
                self.kept.pop((each["Key"], each.get("VersionId", "")), None)
        return {"Deleted": [each | {"DeleteMarker": bool(self.status)} for each in Delete["Objects"]]}

    def get_paginator(self, request: str) -> SimpleNamespace:
        return SimpleNamespace(paginate=self._pages if request == "list_objects_v2" else self._version_pages)

    def _pages(self, *, Prefix: str, StartAfter: str = "", **_: str) -> Iterator[dict[str, Any]]:  # noqa: N803
        names = sorted({name for name in self.names if name.startswith(Prefix) and name > StartAfter})
        found = [(name, "", *self._newest(name)) for name in names]
        yield {"Contents": [_listed(*each) for each in found], "IsTruncated": False}

    def _version_pages(self, *, Prefix: str, KeyMarker: str = "", **_: str) -> Iterator[dict[str, Any]]:  # noqa: N803
        left = [(*at, *found) for at, found in sorted(self.kept.items()) if at[0].startswith(Prefix)]
        left = [each for each in left if each[0] > KeyMarker]
        while left:
            page, left = left[:2], left[2:]
            yield {"Versions": [_listed(*each) for each in page]}
            if (page[-1][0], page[-1][1]) not in self.kept:
                left = [each for each in left if each[0] != page[-1][0]]


def _listed(name: str, version: str, body: bytes, at_s: float) -> dict[str, Any]:
    found = {"Key": name, "Size": len(body), "LastModified": datetime.fromtimestamp(at_s, UTC)}
    return found | ({"VersionId": version} if version else {})


@pytest.fixture(params=[None, "Enabled", "Suspended"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Versions:
    made = Versions(request.param)
    monkeypatch.setattr(stored, "client_of", lambda *_, **__: made)
    monkeypatch.setattr(deletes, "_works", "checksum")
    monkeypatch.setattr(deletes, "MAX_DELETES", 5)
    for number in range(4):
        for body in (b"oldest", b"old", b"new"):
            made.put(row(number), body)
    made.put(f"{HOME}/about.json", ABOUT)
    for name in FOREIGN:
        made.put(name, b"precious")
    return made


def find(before_s: float | None = math.inf) -> list[stored.ObjectNamespace]:
    return stored.find(S3Config(type="s3", bucket="kv-cache", prefix="p", capacity="1GiB"), before_s)


def test_a_purge_deletes_all_versions_of_rows_and_manifest_and_nothing_else(bucket: Versions) -> None:
    (looked_at,) = find(None)
    assert (looked_at.name, looked_at.rows, looked_at.place) == (NAMESPACE, 4, "s3://kv-cache/p")
    assert looked_at.manifest is not None
    (found,) = find()
    assert found.rows == (12 if bucket.status else 4)
    found.delete(lambda _: None)
    assert not found.problem
    assert bucket.names == sorted(FOREIGN)


def test_what_was_written_since_it_was_listed_stays_and_so_does_its_manifest(bucket: Versions) -> None:
    (found,) = find()
    bucket.put(row(7), b"newer", NOW_S + 1)
    found.delete(lambda _: None)
    assert bucket.names == sorted([*FOREIGN, row(7), f"{HOME}/about.json"])


@pytest.mark.parametrize("denied", [["ListObjectVersions"], ["ListObjectVersions", "GetBucketVersioning"]])
def test_versions_that_may_be_left_are_told(bucket: Versions, denied: list[str]) -> None:
    bucket.denied = {*denied}
    (found,) = find()
    assert ("allow s3:ListBucketVersions" in found.problem) == (len(denied) == 1 and bool(bucket.status))
    found.delete(lambda _: None)
    assert ("older versions may still be there" in found.problem) == bool(bucket.status)


def test_one_object_that_may_not_be_read_is_told_and_the_others_are_verified(bucket: Versions) -> None:
    bucket.denied = {f"GetObject {row(1)}", f"GetObject {HOME}/about.json"}
    (found,) = find(None)
    assert f"{HOME}/about.json cannot be read" in found.problem
    verdicts = [each.verdict for each in found.check(lambda _: None)]
    assert sorted(verdicts) == ["corrupt"] * 3 + ["unreadable"]


@pytest.mark.parametrize(
    ("name", "body", "lease_s", "held_by"),
    [
        (".usage", Record(0, writer="mover").encode(), 30, "at least one engine"),
        (".usage", Record(0, writer="").encode(), 30, ""),
        (".owner", b'{"engine": "pod-7", "since": 0, "lease": 60}', 60, "engine pod-7"),
        (".janitor", b"mover 1", 30, "engine mover"),
        (".janitor", b"", 30, ""),
    ],
)
def test_who_uses_it_is_alive_to_a_date_that_is_minutes_ahead(
    bucket: Versions, monkeypatch: pytest.MonkeyPatch, *, name: str, body: bytes, lease_s: float, held_by: str
) -> None:
    """A gateway's Date, and a Last-Modified of the storage behind it. Released: at once."""
    bucket.put(f"p/{name}", body)
    for ahead_s in (0.0, -3600.0, lease_s + SKEW_S, lease_s + SKEW_S + 1):
        monkeypatch.setattr(answers, "answered_at_s", lambda _, ahead_s=ahead_s: NOW_S + ahead_s)
        (found,) = find(None)
        assert found.holder == (held_by if ahead_s <= lease_s + SKEW_S else "")
    monkeypatch.setattr(answers, "answered_at_s", lambda _: NOW_S)
    (found,) = find()
    found.delete(lambda _: None)
    assert (f"{HOME}/about.json" in bucket.names) == bool(held_by), "of an engine that goes on"


def test_an_about_json_of_somebody_else_stays(bucket: Versions) -> None:
    name = f"p/{'cd' * 16}/about.json"
    bucket.put(name, b"precious")
    for found in find():
        found.delete(lambda _: None)
    assert name in bucket.names
