"""Listing the objects below a tier's prefix, page by page, on the control thread."""

from __future__ import annotations

import threading
from email.utils import parsedate_to_datetime
from typing import Any, Final

from nixl_tiers.chunk import Key, key_of_object

WRITE_TEST_NAME: Final = ".probe"
"""Below the prefix: a small object that is written to find out whether uploads are allowed and conditional writes
supported. It is overwritten and never deleted, because other movers that share the prefix may be in the middle of such
a test."""


class Listing:
    """A listing in progress. When `done` is set, its other attributes are complete, and belong to the tier.

    An object's age is its Last-Modified compared with the Date of the answer, both by the server's clock. The seal in
    it may be older than that; then a load finds the row expired.
    """

    def __init__(
        self,
        prefix: str,
        namespace: str,
        row_bytes: int,
        *,
        whole: bool,
        max_age_s: float | None = None,
        expired_only: bool = False,
    ) -> None:
        """`namespace`: list its rows, below the tier's `prefix`. `whole`: list all namespaces, and collect the others'
        rows as `other_rows`. `expired_only`: collect expired objects only."""
        self.expired_only = expired_only
        self.done = threading.Event()
        self.rows: list[tuple[float, Key]] = []  # by Last-Modified, oldest first
        self.expired: list[Key] = []
        self.other_rows: list[tuple[float, str, int]] = []  # of other namespaces or sizes: (Last-Modified, name, bytes)
        self.expired_other_rows: list[str] = []  # those of the other rows that have expired
        self._root = f"{prefix}/"
        self._own = f"{prefix}/{namespace}/"
        self._list_prefix = self._root if whole else self._own
        self._whole = whole
        self._row_bytes = row_bytes
        self._max_age_s = max_age_s
        self._after = ""

    def fetch_page(self, client: Any, bucket: str) -> None:
        """Fetch the next page (at most 1000 objects)."""
        position = {"StartAfter": self._after} if self._after else {}
        answer = client.list_objects_v2(Bucket=bucket, Prefix=self._list_prefix, **position)
        oldest_s = float("-inf")
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if self._max_age_s is not None and date is not None:
            oldest_s = parsedate_to_datetime(date).timestamp() - self._max_age_s
        found = answer.get("Contents", ())
        for each in found:
            self._add(each["Key"], each["Size"], each["LastModified"].timestamp(), oldest_s)
        if found:
            self._after = found[-1]["Key"]
        if not answer.get("IsTruncated") or not found:
            self.rows.sort()
            self.other_rows.sort()
            self.done.set()

    def _add(self, name: str, nbytes: int, modified_s: float, oldest_s: float) -> None:
        key = key_of_object(name[len(self._own) :]) if name.startswith(self._own) else None
        if key is not None and nbytes == self._row_bytes:
            if modified_s < oldest_s:
                self.expired.append(key)
            elif not self.expired_only:
                self.rows.append((modified_s, key))
        elif self._whole and is_row(name[len(self._root) :]):
            if modified_s < oldest_s:
                self.expired_other_rows.append(name)
            if not self.expired_only:
                self.other_rows.append((modified_s, name, nbytes))


def is_row(name: str) -> bool:
    """Whether `name`, below the prefix, can be a row of some namespace. Other objects are never counted or deleted."""
    namespace, _, rest = name.partition("/")
    return len(namespace) == 32 and set(namespace) <= set("0123456789abcdef") and key_of_object(rest) is not None
