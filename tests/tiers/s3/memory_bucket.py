"""A bucket in memory, as boto3 client of the movers that share a prefix. No thread runs; its clock is the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BytesIO
from types import SimpleNamespace
from typing import Any, ClassVar

from botocore.exceptions import ClientError, EndpointConnectionError

from nixl_tiers.tiers.s3.budget import USAGE_NAME, Budget
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.record import Record, UploadQuota
from nixl_tiers.tiers.s3.takeover import Terms

CAPACITY_ROWS, WINDOW_ROWS, ROW = 64, 8, 1 << 16
STEP_S = 5.0
TERMS = Terms(confirm_s=0.0, settle_s=0.0)
NAMES = RowNames("p")
LISTING = "LIST p/"


def row(number: int, namespace: int = 0) -> str:
    return NAMES.name(f"{namespace:02x}" * 16, b"%08d" % number)


def failed(status: int) -> ClientError:
    return ClientError({"Error": {"Code": "any"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "any")


def lost() -> EndpointConnectionError:
    return EndpointConnectionError(endpoint_url="here")


@dataclass
class Bucket:
    """A boto3 client and its bucket. Each request is noted, as "PUT .usage" or "LIST p/"; as "LOOK p/" one for a page
    behind the last name."""

    objects: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda _: None  # may raise: the request does not arrive
    after: Callable[[str], None] = lambda _: None  # may raise: the answer does not
    knows_conditions: bool = True
    page_names: int = 1000
    delete_errors: tuple[dict[str, str], ...] = ()
    damaged_names: dict[str, str] = field(default_factory=dict)  # in listings
    now_s: float = 1e9
    ahead_s: float = 0.0  # of the Date to Last-Modified
    made_last: ClassVar[Bucket]

    def __post_init__(self) -> None:
        Bucket.made_last = self

    def store(self, name: str, body: bytes = b"") -> None:
        self.objects[name] = (body, f'"{body.hex()}"', self.now_s)  # as S3's: the same content has the same ETag

    def small(self, name: str) -> bytes:
        return self.objects[f"p/{name}"][0]

    @property
    def record(self) -> Record:
        """The usage record."""
        found = Record.decode(self.small(USAGE_NAME))
        assert found is not None
        return found

    @property
    def rows(self) -> set[str]:
        return {name for name in self.objects if NAMES.parse(name)}

    def count(self, request: str) -> int:
        return self.requests.count(request)

    def put_object(self, *, Bucket: str, Key: str, Body: bytes, **condition: Any) -> dict[str, Any]:  # noqa: N803
        with self._request("PUT", Key):
            found = self.objects.get(Key)
            fails = "IfNoneMatch" in condition and found is not None
            fails |= "IfMatch" in condition and (found is None or found[1] != condition["IfMatch"])
            if fails and self.knows_conditions:
                raise failed(412)
            self.store(Key, Body)
        return {"ETag": self.objects[Key][1], **self._date}

    def get_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803
        with self._request("GET", Key):
            if Key not in self.objects:
                raise failed(404)
        body, etag, modified_s = self.objects[Key]
        modified = datetime.fromtimestamp(modified_s, UTC)
        return {"Body": BytesIO(body), "ETag": etag, "LastModified": modified, **self._date}

    def delete_object(self, *, Bucket: str, Key: str) -> None:  # noqa: N803
        del self.objects[Key]

    def delete_objects(self, *, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:  # noqa: N803
        with self._request("DELETE", "rows"):
            failures = {error.get("Key") for error in self.delete_errors}
            for each in Delete["Objects"]:
                if each["Key"] not in failures:
                    self.objects.pop(each["Key"], None)
        return {"Errors": list(self.delete_errors)}

    def get_paginator(self, _: str) -> Bucket:
        return self

    def paginate(self, *, Bucket: str, Prefix: str, StartAfter: str = "") -> Iterator[dict[str, Any]]:  # noqa: N803
        while True:
            names = sorted(name for name in self.objects if name.startswith(Prefix) and name > StartAfter)
            with self._request("LIST" if names or not StartAfter else "LOOK", Prefix):  # whether it was whole
                names = sorted(name for name in self.objects if name.startswith(Prefix) and name > StartAfter)
            some = names[: self.page_names]
            contents = [
                {
                    "Key": self.damaged_names.get(name, name),
                    "Size": ROW if NAMES.parse(name) else len(self.objects[name][0]),
                    "LastModified": datetime.fromtimestamp(self.objects[name][2], UTC),
                    "ETag": self.objects[name][1],
                }
                for name in some
            ]
            yield {"Contents": contents, **self._date}
            if len(names) <= self.page_names:
                return
            StartAfter = some[-1]  # noqa: N806

    def _request(self, verb: str, name: str) -> _Request:
        return _Request(self, f"{verb} {name.removeprefix('p/') or name}")

    @property
    def _date(self) -> dict[str, Any]:
        now = datetime.fromtimestamp(self.now_s + self.ahead_s, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        return {"ResponseMetadata": {"HTTPHeaders": {"date": now}, "HTTPStatusCode": 200}}


@dataclass
class _Request:
    bucket: Bucket
    name: str

    def __enter__(self) -> None:
        self.bucket.requests.append(self.name)
        self.bucket.before(self.name)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.bucket.after(self.name)


def once(request: str) -> Callable[[str], None]:
    """The next request of this name fails."""
    left = [request]

    def fail(name: str) -> None:
        if name in left:
            left.remove(name)
            raise lost()

    return fail


class Mover:
    """Uploads, the quota that grants them, and what keeps that up to date. `others`: how many may store, too."""

    def __init__(
        self, bucket: Bucket, name: str, others: int = 0, capacity_rows: int = CAPACITY_ROWS, **named: object
    ) -> None:
        self.bucket = bucket
        self.most_rows = capacity_rows + others * WINDOW_ROWS
        self.quota = UploadQuota(name, capacity_rows * ROW, ROW)
        self.denials = Denials("the bucket", lambda: bucket.now_s)
        connection: Any = SimpleNamespace(client=bucket, delete_client=bucket, denials=self.denials)
        given: dict[str, Any] = {"terms": TERMS, **named}
        self.budget = Budget(connection, "b", "p", quota=self.quota, **given)
        self.begun: list[str] = []

    def begin(self, *names: str) -> int:
        """Begin these uploads, as many as are granted."""
        count = 0
        for name in names:
            if not self.quota.try_acquire(ROW):
                break
            self.begun.append(name)
            count += 1
        return count

    def end(self) -> None:
        """All that were begun arrive."""
        for name in self.begun:
            self.bucket.store(name)
            self.quota.upload_ended(ROW, self.bucket.now_s)
        assert len(self.bucket.rows) <= self.most_rows
        self.begun.clear()

    def store(self, *names: str) -> int:
        count = self.begin(*names)
        self.end()
        return count

    def steps(self, count: int = 1, after_s: float = STEP_S) -> None:
        for _ in range(count):
            self.bucket.now_s += after_s
            self.budget.step()

    @property
    def writes(self) -> bool:
        """Whether it writes the usage record, and so lists and deletes."""
        return self.budget.takeover.account is not None
