"""A prefix of a bucket, or a whole bucket: objects that are rows, by namespace, at whatever prefix they are."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from botocore.exceptions import ClientError

from nixl_tiers.base.chunk import Key, key_of_object
from nixl_tiers.base.manifest import MANIFEST_NAME, Manifest
from nixl_tiers.cli.storage.base import Checked, Namespace, Pace, Problems, Step, Storage, Unusable, Victims
from nixl_tiers.cli.storage.seals import defect
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.s3 import janitor, lease
from nixl_tiers.tiers.s3.aws_region import configured_region
from nixl_tiers.tiers.s3.client import client_of
from nixl_tiers.tiers.s3.conditional import REQUEST_ERRORS, answered_at_s, status_of
from nixl_tiers.tiers.s3.open_errors import tier_error

_NAME: Final = re.compile(r"(?:(?P<root>.*)/)?(?P<namespace>[0-9a-f]{32})/(?P<rest>[^/]+/[^/]+|about\.json)")
_MAX_DELETES: Final = 1000  # names in one request
_DENIED: Final = {"AccessDenied", "InvalidObjectState"}  # of one object: others may be readable
_KEPT: Final = "the bucket has versioning, so older versions may still be there"

T = TypeVar("T")


class _Denied(Exception):
    """One object may not be read."""


@dataclass(frozen=True)
class _Object:
    root: str
    namespace: str
    key: Key | None  # None: the manifest
    name: str
    nbytes: int
    modified_s: float
    version: str = ""  # if versions are listed


class S3Storage(Storage):
    def __init__(self, config: S3Config, prefix: str) -> None:
        """`config`: where, and with which credentials; `prefix`: below which, empty: the whole bucket. Raises
        Unusable."""
        self._config = config
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._client = self._asked(lambda: client_of(config, connect_s=5.0, read_s=60.0, attempts=4))
        self._now_s = 0.0  # by the server's clock, as of its last listing
        self._old_versions = False
        self._problem = ""  # with older versions

    def namespaces(self, step: Step, *, old_versions: bool = False) -> list[Namespace]:
        self._old_versions = old_versions and self._lists_versions()
        counted: dict[tuple[str, str], list[float]] = {}
        manifests: dict[tuple[str, str], _Object] = {}
        for each in self._objects(self._prefix, step):
            found = counted.setdefault((each.root, each.namespace), [0, 0, float("inf"), float("-inf")])
            if each.key is not None:
                found[0] += 1
                found[1] += each.nbytes
                found[2] = min(found[2], each.modified_s)
                found[3] = max(found[3], each.modified_s)
            elif (at := (each.root, each.namespace)) not in manifests or manifests[at].modified_s < each.modified_s:
                manifests[at] = each
        holders = {root: self._holder(root) for root in {root for root, _ in counted}}
        return [
            self._described(root, name, holders[root], manifests.get((root, name)), *found)
            for (root, name), found in sorted(counted.items())
        ]

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
            self._client.list_object_versions(Bucket=bucket, Prefix=self._prefix, MaxKeys=1)
        except REQUEST_ERRORS as error:  # if nothing is known, the answers to deletes tell
            if known:
                self._problem = f"{_KEPT}, and cannot be listed ({_code(error)}: allow s3:ListBucketVersions)"
            return False
        return True

    def _described(self, root: str, name: str, holder: str, about: _Object | None, *counts: float) -> Namespace:
        rows, nbytes, oldest_s, newest_s = counts
        raw, problem = None, self._problem
        try:
            raw = None if about is None else self._asked(lambda: self._download(about))
        except _Denied as error:
            problem = f"{_below(root, name)}/{MANIFEST_NAME} cannot be read ({error})"
        manifest = None if raw is None else Manifest.decode(raw)
        used = [*([newest_s] if rows else []), *([float(manifest.last_used)] if manifest is not None else [])]
        return Namespace(
            f"s3://{_below(self._config.bucket, root)}",
            "s3",
            name,
            int(rows),
            int(nbytes),
            oldest_s=oldest_s if rows else None,
            newest_s=newest_s if rows else None,
            last_used_s=max(used, default=None),
            manifest=manifest,
            holder=holder,
            problem=problem,
        )

    def check(self, namespace: Namespace, pace: Pace) -> Iterator[Checked]:
        digest = bytes.fromhex(namespace.name)
        for each in self._objects(self._home(namespace), lambda _: None):
            if each.key is None:
                continue
            pace.take(each.nbytes)
            name = f"s3://{self._config.bucket}/{each.name}"
            try:
                body = self._asked(lambda each=each: self._download(each))  # type: ignore[misc]
            except _Denied as error:
                yield Checked(name, 0, "unreadable", str(error))
                continue
            if body is None:
                yield Checked(name, each.nbytes, "changed")
                continue
            reason = defect(np.frombuffer(body, np.uint8), digest, each.key)
            yield Checked(name, len(body), "corrupt" if reason else "ok", reason)

    def victims(self, namespace: Namespace, before_s: float | None) -> Victims:
        rows = nbytes = 0
        for each in self._objects(self._home(namespace), lambda _: None):
            if each.key is not None and (before_s is None or each.modified_s < before_s):
                rows += 1
                nbytes += each.nbytes
        return Victims(rows, nbytes, problem=self._problem)

    def delete(self, namespace: Namespace, before_s: float | None, step: Step) -> str:
        problems = Problems()
        before, again = math.inf, True
        while again:
            selected = 0
            for batch in _batches(self._selected(namespace, before_s)):
                self._delete(batch, problems)
                step(len(batch))
                selected += len(batch)
            # A page of versions begins after one that may have been deleted by then: some servers skip others.
            again = self._old_versions and 0 < selected < before and not str(problems)
            before = selected
        ours = namespace.rows or namespace.manifest is not None  # else its about.json is something foreign
        if ours and not namespace.holder and not str(problems):
            left = list(itertools.islice(self._objects(self._home(namespace), lambda _: None), _MAX_DELETES))
            if all(each.key is None for each in left):
                self._delete(left, problems)
        return str(problems)

    def _delete(self, batch: list[_Object], problems: Problems) -> None:
        if not batch:
            return
        names = [{"Key": each.name} | ({"VersionId": each.version} if each.version else {}) for each in batch]
        answer = self._asked(lambda: self._client.delete_objects(Bucket=self._config.bucket, Delete={"Objects": names}))
        for error in answer.get("Errors", ()):
            problems.add(f"s3://{self._config.bucket}/{error.get('Key')}", str(error.get("Code")), "deleted")
        if not self._old_versions and any(each.get("DeleteMarker") for each in answer.get("Deleted", ())):
            self._problem = self._problem or f"{_KEPT}: the server has only marked what was to be deleted"

    def _selected(self, namespace: Namespace, before_s: float | None) -> Iterator[_Object]:
        """Rows that were there when the namespace was found."""
        newest_s = namespace.newest_s
        for each in self._objects(self._home(namespace), lambda _: None):
            old = before_s is None or each.modified_s < before_s
            if each.key is not None and newest_s is not None and each.modified_s <= newest_s and old:
                yield each

    def _home(self, namespace: Namespace) -> str:
        root = namespace.place.removeprefix(f"s3://{self._config.bucket}").strip("/")
        return f"{_below(root, namespace.name)}/"

    def _objects(self, prefix: str, step: Step) -> Iterator[_Object]:
        """Rows and manifests below a prefix."""
        request, content = "list_objects_v2", "Contents"
        if self._old_versions:
            request, content = "list_object_versions", "Versions"
        pages = iter(self._client.get_paginator(request).paginate(Bucket=self._config.bucket, Prefix=prefix))
        while (page := self._asked(lambda: next(pages, None))) is not None:
            self._now_s = self._asked(lambda: answered_at_s(page)) or self._now_s
            count = 0
            for found in page.get(content, ()):
                each = _parse(found)
                if each is not None:
                    count += each.key is not None
                    yield each
            step(count)

    def _download(self, wanted: _Object) -> bytes | None:
        version = {"VersionId": wanted.version} if wanted.version else {}
        try:
            found = self._client.get_object(Bucket=self._config.bucket, Key=wanted.name, **version)
        except ClientError as error:
            if status_of(error) == 404:
                return None
            if _code(error) in _DENIED:
                raise _Denied(_code(error)) from error
            raise
        return bytes(found["Body"].read())

    def _holder(self, root: str) -> str:
        """Of a private prefix the owner, unless its lease has surely expired; of a shared one only that some engine
        runs."""
        owner = self._record(root, lease.LEASE_NAME)
        if owner is not None and (record := lease.Record.decode(owner[0])) is not None and record.engine:
            return f"engine {record.engine}" if owner[1] <= record.lease_s + lease.SKEW_S else ""
        kept = self._record(root, janitor.LEASE_NAME)
        timeout_s = janitor.JanitorIntervals().lease_timeout_s + lease.SKEW_S
        return "at least one engine" if kept is not None and kept[0] and kept[1] <= timeout_s else ""

    def _record(self, root: str, name: str) -> tuple[bytes, float] | None:
        """A small object, and how many seconds ago it was written."""

        def get() -> tuple[bytes, float] | None:
            try:
                found = self._client.get_object(Bucket=self._config.bucket, Key=_below(root, name))
            except ClientError as error:
                if status_of(error) == 404:
                    return None
                raise
            now_s = answered_at_s(found)
            if now_s is None:
                raise KeyError("Date")
            return bytes(found["Body"].read(1 << 16)), now_s - found["LastModified"].timestamp()

        return self._asked(get)

    def _asked(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except (*REQUEST_ERRORS, TierDown, TierRefused, KeyError) as error:
            raise Unusable(str(tier_error(self._config, configured_region(self._config).name, error))) from None


def _parse(found: dict[str, Any]) -> _Object | None:
    match = _NAME.fullmatch(found["Key"])
    if match is None:
        return None
    key = None if match["rest"] == MANIFEST_NAME else key_of_object(match["rest"])
    if key is None and match["rest"] != MANIFEST_NAME:
        return None
    return _Object(
        match["root"] or "",
        match["namespace"],
        key,
        found["Key"],
        found["Size"],
        found["LastModified"].timestamp(),
        found.get("VersionId", ""),
    )


def _batches(objects: Iterator[_Object]) -> Iterator[list[_Object]]:
    while batch := list(itertools.islice(objects, _MAX_DELETES)):
        yield batch


def _code(error: Exception) -> str:
    return str(error.response.get("Error", {}).get("Code")) if isinstance(error, ClientError) else type(error).__name__


def _below(root: str, name: str) -> str:
    return f"{root}/{name}" if root and name else root or name
