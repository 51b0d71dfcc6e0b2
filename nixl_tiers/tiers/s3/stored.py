"""What is stored in a bucket, as commands see it (`tiers/stored.py`): objects that are rows, by namespace, at whatever
prefix they are below the one that is given."""

from __future__ import annotations

import errno
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from botocore.exceptions import ClientError
from numpy.typing import NDArray

from nixl_tiers.base.chunk import key_of_object
from nixl_tiers.base.manifest import MANIFEST_NAME, Manifest
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS, code_of, status_of, tier_error
from nixl_tiers.tiers.s3.budget import engine_now
from nixl_tiers.tiers.s3.client import client_of, configured_region
from nixl_tiers.tiers.s3.deletes import delete_objects, most_names
from nixl_tiers.tiers.s3.names import below
from nixl_tiers.tiers.s3.sweep import whole_listing
from nixl_tiers.tiers.stored import NamespaceByKey, Problems, Step, StoredRow, reason

_NAME: Final = re.compile(r"(?:(?P<root>.*)/)?(?P<namespace>[0-9a-f]{32})/(?P<rest>[^/]+/[^/]+|about\.json)")
_DENIED: Final = {"AccessDenied", "InvalidObjectState"}  # of one object: others may be readable
_KEPT: Final = "the bucket has versioning, so older versions may still be there"

T = TypeVar("T")


def find(config: S3Config, before_s: float | None) -> list[ObjectNamespace]:
    """The namespaces below a prefix, "" for the whole bucket, for `find_stored`."""
    bucket = _Bucket(config, old_versions=before_s is not None)
    found: dict[tuple[str, str], ObjectNamespace] = {}
    manifests: dict[tuple[str, str], _Object] = {}
    for each in bucket.objects(bucket.prefix):
        at = each.root, each.namespace
        if at not in found:
            place = f"s3://{below(config.bucket, each.root)}"
            found[at] = ObjectNamespace(place, each.namespace, before_s, bucket=bucket, root=each.root)
        if each.key:
            found[at].count(each)
        elif at not in manifests or manifests[at].time_s < each.time_s:
            manifests[at] = each
    holders = {root: bucket.holder(root) for root in {root for root, _ in found}}
    for at, namespace in found.items():
        namespace.holder = holders[namespace.root]
        namespace.describe(manifests.get(at))
    return [found[at] for at in sorted(found)]


@dataclass(frozen=True)
class _Object(StoredRow):
    """`key`: b"": it is the manifest."""

    object_name: str
    root: str
    namespace: str
    version: str  # "" unless versions are listed

    @property
    def request(self) -> dict[str, str]:
        return {"Key": self.object_name} | ({"VersionId": self.version} if self.version else {})


@dataclass
class ObjectNamespace(NamespaceByKey[_Object]):
    bucket: _Bucket = field(kw_only=True, repr=False)
    root: str = field(kw_only=True)

    layout: ClassVar[str] = "s3"

    def describe(self, about: _Object | None) -> None:
        """Once all rows were counted. `about`: its manifest."""
        self.problem, raw = self.bucket.problem, None
        try:
            raw = None if about is None else self.bucket.download(about)
        except PermissionError as error:
            self.problem = f"{below(self.root, self.name)}/{MANIFEST_NAME} cannot be read ({reason(error)})"
        self.manifest = None if raw is None else Manifest.decode(raw)
        self.tell_last_use()

    def stored(self, problems: Problems) -> Iterator[_Object]:
        return filter(lambda each: each.key, self._objects())

    def read(self, row: _Object) -> NDArray[np.uint8] | None:
        body = self.bucket.download(row)
        return None if body is None else np.frombuffer(body, np.uint8)

    def delete(self, step: Step) -> None:
        problems = Problems()
        before, again = math.inf, True
        while again:
            deleted = 0
            for batch in _batches(self.counted(problems)):
                self.bucket.delete(batch, problems)
                step(len(batch))
                deleted += len(batch)
            # A page of versions begins after one that may have been deleted by then: some servers skip others.
            again = self.bucket.old_versions and 0 < deleted < before and not str(problems)
            before = deleted
        ours = self.rows or self.manifest is not None  # else its about.json is something foreign
        if ours and not self.holder and not str(problems):
            left = next(_batches(self._objects()), [])
            if left and not any(each.key for each in left):
                self.bucket.delete(left, problems)
        self.problem = str(problems) or self.bucket.problem or self.problem

    def _objects(self) -> Iterator[_Object]:
        return self.bucket.objects(f"{below(self.root, self.name)}/")


class _Bucket:
    """Requests to one bucket. It raises TierDown or TierRefused, but for one object that may not be read."""

    def __init__(self, config: S3Config, *, old_versions: bool) -> None:
        """`old_versions`: list those too, if that is possible."""
        self._config = config
        self._client: Any = self._asked(lambda: client_of(config, connect_s=5.0, read_s=60.0, attempts=4))
        self.prefix = f"{config.prefix}/" if config.prefix else ""
        self.problem = ""  # with old versions
        self.old_versions = old_versions and self._lists_versions()

    def objects(self, prefix: str) -> Iterator[_Object]:
        """Rows and manifests below a prefix."""
        pages = whole_listing(self._client, self._config.bucket, prefix, versions=self.old_versions)
        while (page := self._asked(lambda: next(pages, None))) is not None:
            yield from filter(None, map(self._parse, page["Versions" if self.old_versions else "Contents"]))

    def _parse(self, found: dict[str, Any]) -> _Object | None:
        """None: the object is foreign."""
        match = _NAME.fullmatch(found["Key"])
        if match is None:
            return None
        key = b"" if match["rest"] == MANIFEST_NAME else key_of_object(match["rest"])
        if key is None:
            return None
        return _Object(
            key,
            f"s3://{self._config.bucket}/{found['Key']}",
            found["Size"],
            found["LastModified"].timestamp(),
            found["Key"],
            match["root"] or "",
            match["namespace"],
            found.get("VersionId", ""),
        )

    def download(self, wanted: _Object) -> bytes | None:
        """None if it has gone. Raises PermissionError if it may not be read."""

        def get() -> bytes | None:
            try:
                found = self._client.get_object(Bucket=self._config.bucket, **wanted.request)
            except ClientError as error:
                if status_of(error) == 404:
                    return None
                if code_of(error) in _DENIED:
                    raise PermissionError(errno.EACCES, code_of(error)) from error
                raise
            return bytes(found["Body"].read())

        return self._asked(get)

    def delete(self, batch: Sequence[_Object], problems: Problems) -> None:
        objects = [each.request for each in batch]
        answer = self._asked(lambda: delete_objects(self._client, self._config.bucket, objects, quiet=False))
        for error in answer.get("Errors", ()):
            problems.add(f"s3://{self._config.bucket}/{error.get('Key')}", str(error.get("Code")), "deleted")
        if not self.old_versions and any(each.get("DeleteMarker") for each in answer.get("Deleted", ())):
            self.problem = self.problem or f"{_KEPT}: the server has only marked what was to be deleted"

    def holder(self, root: str) -> str:
        """That engines run there, as far as can be told from one look."""
        return self._asked(lambda: engine_now(self._client, self._config.bucket, root))

    def _lists_versions(self) -> bool:
        """Whether the bucket may have versions, and they can be listed."""
        bucket, known = self._config.bucket, False
        try:
            if not self._client.get_bucket_versioning(Bucket=bucket).get("Status"):
                return False
            known = True
        except REQUEST_ERRORS:  # no right to ask, or a server without versions
            pass
        try:
            self._client.list_object_versions(Bucket=bucket, Prefix=self.prefix, MaxKeys=1)
        except REQUEST_ERRORS as error:  # if nothing is known, the answers to deletes tell
            if known:
                self.problem = f"{_KEPT}, and cannot be listed ({code_of(error)}: allow s3:ListBucketVersions)"
            return False
        return True

    def _asked(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except (*REQUEST_ERRORS, TierDown, TierRefused, KeyError) as error:
            raise tier_error(self._config, configured_region(self._config).name, error) from None


def _batches(objects: Iterator[_Object]) -> Iterator[list[_Object]]:
    while batch := list(itertools.islice(objects, most_names())):
        yield batch
